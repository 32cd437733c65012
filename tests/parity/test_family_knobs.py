"""Every knob of every family shows: turned, it moves the logits of that family's models; needs torch for weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayserve_moe.model.layers.attention import GroupedAttention
from rayserve_moe.model.layers.latent import LatentAttention
from rayserve_moe.model.layers.mamba2 import Mamba2
from rayserve_moe.model.spec import ModelSpec, RopeSpec
from tests.support.engine.host_runners import new_runner
from tests.support.models.attention_specs import with_attention
from tests.support.models.core import NUM_PAGES
from tests.support.models.families import FAMILY_CASES, FamilyCase
from tests.support.models.full_logits import prompt_logits_of

live = pytest.importorskip("tests.parity.family_reference", reason="transformers writes checkpoints with torch")

pytestmark = pytest.mark.parity

MOVED = 1e-4
LENGTH = 48
SAMPLED = ("gpt_oss-0", "deepseek_v3-0")
CASES = [
    pytest.param(case, id=case.name, marks=() if case.name in SAMPLED else pytest.mark.slow) for case in FAMILY_CASES
]

NOT_TURNED = {
    "kind",
    "layout",
    "fused_qkv",
    "fused",
    "gate_form",
    "bias_in_row",
    "selection_bias_in_row",
    "num_groups",
    "groups_kept",
    "shared_size",
    "value_dim",
    "norm_offset",
    "values",
    "rounded_embedding_multiplier",
    "float32_norms",
    "index",
    "latent_size",
    "rank",
    "decay_rates_in_block",
    "rounds_decays",
}
"""Where tensors lie, what stands with another knob, what another shape of parameters goes with, what is added to them
when they are read, and what rounds nothing in float32."""


WITHOUT_GATE = ("relu2",)
"""Activations of experts that have no gate, as all others have."""


def turned(spec: Any) -> Iterator[tuple[str, Any]]:
    """Every spec that differs from `spec` in one knob, set to its plain value, with the path of the knob."""
    for knob in fields(spec):
        value = getattr(spec, knob.name)
        if knob.name == "mixers":
            for place, own in enumerate(value):
                for path, part in turned(own):
                    if path == "rope.rotary_dim" and _has_block_index(own):
                        continue  # heads of the index have no more elements: see `_others_of_block_index`
                    yield f"{own.kind}.{path}", replace(spec, mixers=(*value[:place], part, *value[place + 1 :]))
        elif is_dataclass(value) and knob.default is not None:
            yield from ((f"{knob.name}.{path}", replace(spec, **{knob.name: part})) for path, part in turned(value))
        elif knob.default not in (MISSING, value) and knob.name not in NOT_TURNED and value not in WITHOUT_GATE:
            yield knob.name, replace(spec, **{knob.name: knob.default})


def others(spec: ModelSpec) -> Iterator[tuple[str, ModelSpec]]:
    """What has no plain value."""
    router = spec.router
    if spec.has_post_norms:
        yield "post_norms", replace(spec, layers=tuple(replace(layer, post_norms=False) for layer in spec.layers))
    if spec.has_scalars:
        yield "scalars", replace(spec, layers=tuple(replace(layer, has_scalar=False) for layer in spec.layers))
    if spec.has_windows:
        yield "windows", replace(spec, layers=tuple(replace(layer, window=0) for layer in spec.layers))
    yield "norm_eps", replace(spec, norm_eps=0.1)
    for name in ("expert_limit", "mlp_limit"):
        if any(getattr(layer, name) for layer in spec.layers):
            yield name, replace(spec, layers=tuple(replace(layer, **{name: 0.0}) for layer in spec.layers))
    if router.top_k > 1:
        yield "router.renormalize", replace(spec, router=replace(router, renormalize=not router.renormalize))
    if router.num_groups > 1:
        other = {"max": "top2_sum", "top2_sum": "max"}[router.group_score]
        yield "router.group_score", replace(spec, router=replace(router, group_score=other))
        yield "router.num_groups", replace(spec, router=replace(router, num_groups=1, groups_kept=1))
        yield "router.groups_kept", replace(spec, router=replace(router, groups_kept=router.groups_kept + 1))
    for own in spec.mixers:
        yield from _others_of_mixer(spec, own)


def _others_of_mixer(spec: ModelSpec, own: Any) -> Iterator[tuple[str, ModelSpec]]:
    if isinstance(own, LatentAttention):
        yield f"{own.kind}.norm_eps", with_attention(spec, kind=own.kind, norm_eps=0.1)
        yield from _others_of_index(spec, own)
        if growth := own.query_scale:
            for name in ("beta", "length"):
                doubled = replace(growth, **{name: 2 * getattr(growth, name)})
                yield f"{own.kind}.query_scale.{name}", with_attention(spec, kind=own.kind, query_scale=doubled)
    if isinstance(own, Mamba2):
        yield f"{own.kind}.min_step", replace(spec, mixers=tuple(_with_min_step(each) for each in spec.mixers))
    if not isinstance(own, GroupedAttention | LatentAttention):
        return
    if own.rope is None:
        yield f"{own.kind}.rope", with_attention(spec, kind=own.kind, rope=RopeSpec(1e4))
        return
    yield f"{own.kind}.rope.theta", with_attention(spec, kind=own.kind, theta=own.rope.theta / 4)
    if isinstance(own, GroupedAttention):
        if not _has_block_index(own):
            yield f"{own.kind}.rope", with_attention(spec, kind=own.kind, rope=None)
        yield from _others_of_block_index(spec, own)
    for name, scaling in _other_scalings(own.rope):
        path = f"{own.kind}.rope.{name}"
        yield path, with_attention(spec, kind=own.kind, **{name.partition(".")[0]: scaling})


def _with_min_step(own: Any) -> Any:
    return replace(own, min_step=own.min_step + 0.5) if isinstance(own, Mamba2) else own


def _other_scalings(rope: RopeSpec) -> Iterator[tuple[str, Any]]:
    if yarn := rope.yarn:
        for name, value in {"attention_factor": 1.7, "truncate": not yarn.truncate, "factor": 16.0}.items():
            yield f"yarn.{name}", replace(yarn, **{name: value})
    if llama3 := rope.llama3:
        for name in ("factor", "original_length", "low_turns", "high_turns"):
            yield f"llama3.{name}", replace(llama3, **{name: 2 * getattr(llama3, name)})


def _others_of_index(spec: ModelSpec, own: LatentAttention) -> Iterator[tuple[str, ModelSpec]]:
    """Layers that share an index take the same number of tokens; a choice of all tokens shows by that alone."""
    if own.index is None or own.kind != "dsa":
        return
    is_whole = own.index.top_k >= LENGTH
    others = {"interleaved": not own.index.interleaved, "norm_eps": 1.0}
    for name, value in ({"top_k": LENGTH // 3} if is_whole else others).items():
        index = replace(own.index, **{name: value})
        yield f"dsa.index.{name}", with_attention(spec, kind=own.kind, index=index)
    fewer = replace(own.index, top_k=own.index.top_k // 2)
    mixers = tuple(replace(mixer, index=fewer) for mixer in spec.mixers if isinstance(mixer, LatentAttention))
    if not is_whole:
        yield "dsa.index.top_k", replace(spec, mixers=mixers)


def _has_block_index(own: Any) -> bool:
    return isinstance(own, GroupedAttention) and own.index is not None


def _others_of_block_index(spec: ModelSpec, own: GroupedAttention) -> Iterator[tuple[str, ModelSpec]]:
    if (index := own.index) is None:
        return
    yield f"{own.kind}.rope.rotary_dim", with_attention(spec, kind=own.kind, rotary_dim=own.rotary_width // 2)
    # A choice of all blocks shows by their number alone. Else a token's own block is left to its score, or forced along
    # with more blocks.
    is_whole = index.top_k * index.block_size >= LENGTH
    others = {
        "block_size": index.block_size + 1, "top_k": index.top_k - 1, "local_blocks": 0, "first_blocks": 1,
    }  # fmt: skip
    for name, value in ({"top_k": index.top_k - 1} if is_whole else others).items():
        changed = replace(index, **{name: value})
        yield f"{own.kind}.index.{name}", with_attention(spec, kind=own.kind, index=changed)


def knobs_of(spec: ModelSpec) -> dict[str, ModelSpec]:
    """Each knob of a model by its path, and the model that has another value there."""
    found = dict(turned(spec)) | dict(others(spec))
    if spec.router.renormalize_floor < 1e-6:
        found.pop("router.renormalize_floor", None)
    return found


@pytest.mark.parametrize("case", CASES)
def test_every_knob_of_a_family_moves_its_logits(
    case: FamilyCase, tmp_path: Path, record_property: Callable[[str, object], None]
):
    runner = new_runner(live.reference_model(case).save(tmp_path), dtype="float32", num_pages=NUM_PAGES)
    runner.load()
    ids = np.random.default_rng(case.variant).integers(3, case.config["vocab_size"], LENGTH).tolist()
    plain = prompt_logits_of(runner, longest=LENGTH)(ids)
    moved = {
        path: float(np.abs(prompt_logits_of(runner, longest=LENGTH, spec=spec)(ids) - plain).max())
        for path, spec in knobs_of(runner.config.spec).items()
    }
    record_property("knobs turned", len(moved))
    record_property("least move of a knob", min(moved.values()))
    assert {path: change for path, change in moved.items() if change <= MOVED} == {}
