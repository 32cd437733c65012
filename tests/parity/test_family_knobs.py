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
from rayserve_moe.model.spec import ModelSpec
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
    "layout",
    "fused_qkv",
    "bias_in_row",
    "selection_bias_in_row",
    "num_groups",
    "groups_kept",
    "shared_size",
}
"""Where tensors lie, what stands with another knob, and what another shape of parameters goes with."""


def turned(spec: Any) -> Iterator[tuple[str, Any]]:
    """Every spec that differs from `spec` in one knob, set to its plain value, with the path of the knob."""
    for knob in fields(spec):
        value = getattr(spec, knob.name)
        if knob.name == "mixers":
            (own,) = value
            yield from ((f"{own.kind}.{path}", replace(spec, mixers=(part,))) for path, part in turned(own))
        elif is_dataclass(value) and knob.default is not None:
            yield from ((f"{knob.name}.{path}", replace(spec, **{knob.name: part})) for path, part in turned(value))
        elif knob.default not in (MISSING, value) and knob.name not in NOT_TURNED:
            yield knob.name, replace(spec, **{knob.name: knob.default})


def others(spec: ModelSpec) -> Iterator[tuple[str, ModelSpec]]:
    """What has no plain value."""
    router, (own,) = spec.router, spec.mixers
    assert isinstance(own, GroupedAttention | LatentAttention)
    yield f"{own.kind}.rope.theta", with_attention(spec, theta=own.rope.theta / 4)
    if spec.has_windows:
        yield "windows", with_attention(spec, windows=[0] * spec.num_layers)
    yield "norm_eps", replace(spec, norm_eps=0.1)
    if router.top_k > 1:
        yield "router.renormalize", replace(spec, router=replace(router, renormalize=not router.renormalize))
    if router.num_groups > 1:
        other = {"max": "top2_sum", "top2_sum": "max"}[router.group_score]
        yield "router.group_score", replace(spec, router=replace(router, group_score=other))
        yield "router.num_groups", replace(spec, router=replace(router, num_groups=1, groups_kept=1))
        yield "router.groups_kept", replace(spec, router=replace(router, groups_kept=router.groups_kept + 1))
    if isinstance(own, LatentAttention):
        yield "mla.norm_eps", with_attention(spec, norm_eps=0.1)
    if isinstance(own, LatentAttention) and (growth := own.query_scale):
        yield "mla.query_scale.beta", with_attention(spec, query_scale=replace(growth, beta=2 * growth.beta))
        yield "mla.query_scale.length", with_attention(spec, query_scale=replace(growth, length=2 * growth.length))
    if yarn := own.rope.yarn:
        for name, value in {"attention_factor": 1.7, "truncate": not yarn.truncate, "factor": 16.0}.items():
            yield f"{own.kind}.rope.yarn.{name}", with_attention(spec, yarn=replace(yarn, **{name: value}))


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
