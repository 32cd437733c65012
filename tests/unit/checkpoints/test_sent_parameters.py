"""Parameters filled from tensors that are sent, in any order and in parts, are those that a checkpoint loads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from rayserve_moe.checkpoints import parts
from rayserve_moe.checkpoints.bucket import SentTensor, cut
from rayserve_moe.checkpoints.files import SINGLE_FILE, CheckpointError, open_checkpoint
from rayserve_moe.checkpoints.loader import WeightSource, load_parameters
from rayserve_moe.checkpoints.names import walk
from rayserve_moe.checkpoints.sent_parameters import SentParameters
from rayserve_moe.model.families.qwen3_moe import CHECKPOINT_RULES
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.model.param_spec import ParamSpec
from rayserve_moe.model.parameters import parameter_specs

MESH = jax.make_mesh((2, 2), ("rows", "columns"), devices=jax.devices()[:4])
SLOTS = np.array([[2, 0, 3, 1, 2, 2, 0, 1], [0, 1, 2, 3, 1, 1, 1, 1]])
"""For two MoE layers of four experts, over four devices."""
SHARDINGS = {
    "whole": PartitionSpec(),
    "experts": PartitionSpec(None, ("rows", "columns")),
    "inputs and outputs": PartitionSpec(None, None, "columns", "rows"),
}
Q, EXPERT, TABLE = (
    "model.layers.1.self_attn.q_proj.weight",
    "model.layers.2.mlp.experts.1.up_proj.weight",
    "model.embed_tokens.weight",
)


class Model:
    """A checkpoint's parameters, as loaded and as filled from what is sent."""

    def __init__(
        self, path: Path, split: str, *, layout: str = "", slots: Any = SLOTS, multiple: int = 1, **keywords: Any
    ) -> None:
        files = open_checkpoint(path)
        self.slots = slots
        tree = parameter_specs(
            spec_from_config(files.config), tensor_size=4, num_redundant=0 if slots is None else 4, **keywords
        )
        wanted = {"gate_MPDF", "down_MPFD", "q_LDH"} if layout == "packed" else {"table_VD"}
        self.tree = {
            group: {
                name: replace(
                    spec.padded("expert_inner", multiple),
                    layout=layout if name in wanted and not spec.is_quantized else "",
                )
                for name, spec in specs.items()
            }
            for group, specs in tree.items()
        }
        self._split = SHARDINGS[split]

    def sharding_of(self, spec: ParamSpec) -> NamedSharding:
        axes = self._split
        if not spec.num_experts or spec.is_scale or (spec.is_quantized and len(axes) > 2):
            axes = PartitionSpec(*axes[:2]) if spec.num_experts else PartitionSpec()
        return NamedSharding(MESH, axes)

    def loaded(self, path: Path) -> dict[str, Any]:
        source = WeightSource(open_checkpoint(path), CHECKPOINT_RULES, self.slots)
        return load_parameters(source, self.tree, sharding_of=self.sharding_of)

    def sending(self, serving: dict[str, Any]) -> SentParameters:
        return SentParameters(
            self.tree,
            rules=CHECKPOINT_RULES,
            ignored=(),
            sharding_of=self.sharding_of,
            expert_of_slot=self.slots,
            serving=serving,
        )

    def filled(self, serving: dict[str, Any], tensors: list[SentTensor]) -> dict[str, Any]:
        """What serves once tensors were sent over `serving`."""
        sent = self.sending(serving)
        for tensor in tensors:
            sent.add(tensor.name, cut(tensor, sent.wanted(tensor.name, tensor.shape)))
        found = {group: dict(arrays) for group, arrays in serving.items()}
        for (group, name), parameter in sent.finished():
            found[group][name] = parameter.on_devices()
        return found


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for group, arrays in wanted.items():
        for name, array in arrays.items():
            assert found[group][name].dtype == array.dtype and found[group][name].sharding == array.sharding
            for ours, theirs in zip(found[group][name].addressable_shards, array.addressable_shards, strict=True):
                np.testing.assert_array_equal(np.asarray(ours.data), np.asarray(theirs.data), err_msg=name)


def whole(tensors: dict[str, np.ndarray], *, seed: int) -> list[SentTensor]:
    names = np.random.default_rng(seed).permutation(list(tensors))
    return [SentTensor(str(name), tensors[name]) for name in names]


@pytest.fixture(scope="module")
def changed(single: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other values in a tenth of the places of a few tensors."""
    generator = np.random.default_rng(0)
    tensors = load_file(single / SINGLE_FILE)
    for name in (Q, EXPERT, TABLE, "model.layers.0.mlp.gate.weight", "model.norm.weight"):
        tensors[name] = tensors[name].copy()
        tensors[name][generator.random(tensors[name].shape) < 0.1] = 0.25
    path = tmp_path_factory.mktemp("changed") / "model"
    path.mkdir()
    (path / "config.json").write_bytes((single / "config.json").read_bytes())
    save_file(tensors, path / SINGLE_FILE)
    return path


def differing(single: Path, changed: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """By name: flat positions that differ, and the values there."""
    before, after = load_file(single / SINGLE_FILE), load_file(changed / SINGLE_FILE)
    found = {name: np.flatnonzero(before[name] != after[name]) for name in after}
    return {name: (at.astype(np.uint32), after[name].reshape(-1)[at]) for name, at in found.items() if len(at)}


WAYS = [
    {"dtype": "bfloat16", "layout": "packed", "slots": None},
    {"dtype": "bfloat16", "layout": "packed_columns"},
    {"dtype": "float32"},
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way)))
@pytest.mark.parametrize("split", SHARDINGS)
@pytest.mark.parametrize("part_bytes", [parts.PART_BYTES, 128])
def test_what_is_sent_is_what_a_checkpoint_of_it_loads(single, changed, split, way, part_bytes, monkeypatch):
    """Whole tensors in any order, those alone that differ, and the places alone that differ."""
    monkeypatch.setattr(parts, "PART_BYTES", part_bytes)
    model = Model(single, split, **way)
    serving, wanted = model.loaded(single), model.loaded(changed)
    assert_same(model.filled(serving, whole(load_file(changed / SINGLE_FILE), seed=1)), wanted)
    other = differing(single, changed)
    assert set(other) >= {Q, EXPERT, TABLE}
    after = load_file(changed / SINGLE_FILE)
    assert_same(model.filled(serving, whole({name: after[name] for name in other}, seed=2)), wanted)
    assert_same(model.filled(serving, [SentTensor(name, at[1], at[0]) for name, at in other.items()]), wanted)


@pytest.mark.parametrize("split", ["whole", "experts"])
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_experts_in_8_bits_are_quantised_as_from_files(single, changed, split, dtype):
    model = Model(single, split, dtype="bfloat16", expert_dtype=dtype)
    serving, wanted = model.loaded(single), model.loaded(changed)
    after = load_file(changed / SINGLE_FILE)
    assert_same(model.filled(serving, whole(after, seed=1)), wanted)
    assert_same(model.filled(serving, [SentTensor(name, after[name]) for name in differing(single, changed)]), wanted)
    with pytest.raises(CheckpointError, match="is served in 8 bits"):
        model.sending(serving).wanted(EXPERT, None)


@pytest.mark.parametrize("more", [{}, {"expert_dtype": "int8"}], ids=str)
def test_experts_are_padded_with_zeros(single, changed, more):
    plain, padded = (Model(single, "experts", dtype="float32", multiple=size, **more) for size in (1, 10))
    serving, wanted, unpadded = padded.loaded(single), padded.loaded(changed), plain.loaded(changed)
    assert_same(padded.filled(serving, whole(load_file(changed / SINGLE_FILE), seed=1)), wanted)
    for name, array in unpadded["experts"].items():
        held = wanted["experts"][name]
        padding = [(0, ours - theirs) for ours, theirs in zip(held.shape, array.shape, strict=True)]
        np.testing.assert_array_equal(np.asarray(held), np.pad(np.asarray(array), padding), err_msg=name)
    assert wanted["experts"]["down_MPFD"].shape[2] == 10 > unpadded["experts"]["down_MPFD"].shape[2]


def test_a_host_wants_of_a_tensor_what_its_devices_hold(single):
    """No more of it than the tensor, and nothing of an expert that lies elsewhere."""
    model = Model(single, "inputs and outputs", dtype="float32")
    wanted = model.sending({}).wanted(EXPERT, (8, 16))
    assert sum(np.prod([stop - start for start, stop in region]) for region in wanted.regions) == 8 * 16
    assert len(model.sending({}).wanted(Q, (16, 16)).regions) == 1


def test_what_does_not_fit_is_refused(single):
    sent = Model(single, "whole", dtype="float32").sending({})
    with pytest.raises(CheckpointError, match=r"the model has no tensor model\.x"):
        sent.wanted("model.x", (2,))
    with pytest.raises(CheckpointError, match=r"is \[16\], expected \[16, 16\]"):
        sent.wanted(Q, (16,))
    assert sent.wanted("model.layers.0.rotary_emb.inv_freq", (2,)).regions == ()


def test_the_tree_of_the_test_has_scales_and_layouts(single):
    """Or the laws above are empty."""
    specs = [spec for _, spec in walk(Model(single, "whole", dtype="bfloat16", expert_dtype="int8").tree)]
    assert any(spec.is_scale for spec in specs)
