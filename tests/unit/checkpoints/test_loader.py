"""Loaded parameters are the file's tensors, whatever the sharding and the dtype."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file

from rayserve_moe.checkpoints import pieces
from rayserve_moe.checkpoints.files import CheckpointError, CheckpointFiles, open_checkpoint
from rayserve_moe.checkpoints.loader import PieceReader, WeightSource, load_parameters, read_region
from rayserve_moe.checkpoints.names import tensor_places, walk
from rayserve_moe.checkpoints.synthetic import write_checkpoint
from rayserve_moe.model.families.qwen3_moe import CHECKPOINT_RULES
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.model.param_spec import ParamSpec
from rayserve_moe.model.parameters import parameter_specs

MESH = jax.make_mesh((2, 2), ("rows", "columns"), devices=jax.devices()[:4])


def _replicated(spec: ParamSpec) -> NamedSharding:
    return NamedSharding(MESH, PartitionSpec())


def _last_dim(spec: ParamSpec) -> NamedSharding:
    return NamedSharding(MESH, PartitionSpec(*[None] * (len(spec.shape) - 1), ("rows", "columns")))


def _two_last_dims(spec: ParamSpec) -> NamedSharding:
    axes = ("rows", "columns") if len(spec.piece_shape) > 1 else ("rows",)
    return NamedSharding(MESH, PartitionSpec(*[None] * (len(spec.shape) - len(axes)), *axes))


def _experts(spec: ParamSpec) -> NamedSharding:
    axes = (None, ("rows", "columns")) if spec.num_experts else ()
    return NamedSharding(MESH, PartitionSpec(*axes))


def _experts_and_inner(spec: ParamSpec) -> NamedSharding:
    axes = (None, "columns", "rows") if spec.num_experts else ()
    return NamedSharding(MESH, PartitionSpec(*axes))


SHARDINGS = [_replicated, _last_dim, _two_last_dims, _experts, _experts_and_inner]


def _load(path: Path, dtype: str = "float32", sharding_of=_replicated):
    files = open_checkpoint(path)
    tree = parameter_specs(spec_from_config(files.config), dtype=dtype)
    return tree, load_parameters(WeightSource(files, CHECKPOINT_RULES), tree, sharding_of=sharding_of)


def _stacked(path: Path, tree) -> dict[tuple[str, ...], np.ndarray]:
    """Assemble every parameter whole, straight from safetensors."""
    tensors = load_file(path / "model.safetensors")
    whole = {keys: np.zeros(spec.shape, np.float32) for keys, spec in walk(tree)}
    for name, (place,) in tensor_places(tree, CHECKPOINT_RULES).items():
        whole[place.path][place.stack_index] = tensors[name].T if place.spec.file.transposed else tensors[name]
    return whole


@pytest.mark.parametrize("sharding_of", SHARDINGS)
def test_any_sharding_holds_the_same_values(single, sharding_of):
    tree, loaded = _load(single, sharding_of=sharding_of)
    specs = dict(walk(tree))
    for (group, name), wanted in _stacked(single, tree).items():
        array, spec = loaded[group][name], specs[group, name]
        assert array.sharding == sharding_of(spec)
        assert (array.shape, array.dtype) == (spec.shape, spec.dtype)
        np.testing.assert_array_equal(np.asarray(array), wanted)
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), wanted[shard.index])


def test_an_indexed_set_loads_as_the_single_file(single, indexed):
    (_, one), (_, several) = _load(single), _load(indexed)
    jax.tree.map(np.testing.assert_array_equal, one, several)


def test_values_are_rounded_once_to_the_asked_dtype(single):
    tree, loaded = _load(single, dtype="bfloat16")
    for (group, name), wanted in _stacked(single, tree).items():
        array = loaded[group][name]
        assert array.dtype == (np.float32 if name.startswith("router") else jax.numpy.bfloat16)
        np.testing.assert_array_equal(np.asarray(array), wanted.astype(array.dtype))


def test_a_bfloat16_checkpoint_loads_as_its_float32_twin_rounded(tmp_path, single, config):
    twin = write_checkpoint(tmp_path / "twin", config, seed=7, dtype="bfloat16")
    (tree, loaded) = _load(twin)
    for (group, name), wanted in _stacked(single, tree).items():
        np.testing.assert_array_equal(
            np.asarray(loaded[group][name]), wanted.astype(jax.numpy.bfloat16).astype(np.float32)
        )


def test_kv_heads_are_repeated_where_devices_outnumber_them(single, config):
    """Each file head fills as many neighbouring held heads, for the whole parameter and for every device's part."""
    files = open_checkpoint(single)
    spec, source = spec_from_config(files.config), WeightSource(files, CHECKPOINT_RULES)
    once, repeated = (parameter_specs(spec, dtype="float32", tensor_size=size)["gqa"] for size in (1, 4))
    heads, width = config.num_key_value_heads, config.head_dim
    for name in ("k_LDG", "v_LDG"):
        whole = [(0, size) for size in once[name].shape]
        plain = read_region(source, once[name], region=tuple(whole))
        wanted = plain.reshape(*plain.shape[:2], heads, width).repeat(4 // heads, axis=2).reshape(*plain.shape[:2], -1)
        for start in range(0, 4 * width, width):
            region = (*whole[:2], (start, start + width))
            part = read_region(source, repeated[name], region=region)
            np.testing.assert_array_equal(part, wanted[..., start : start + width])
    loaded = load_parameters(
        source,
        parameter_specs(spec, dtype="float32", tensor_size=4),
        sharding_of=_last_dim,
    )
    np.testing.assert_array_equal(np.asarray(loaded["gqa"]["v_LDG"]), wanted)


def test_loading_needs_only_the_files_that_hold_the_asked_region(tmp_path, config):
    """With one tensor per file, expert 0 can be read when every other file is gone."""
    path = write_checkpoint(tmp_path / "model", config, dtype="float32", max_shard_bytes=1)
    files = open_checkpoint(path)
    source = WeightSource(files, CHECKPOINT_RULES)
    spec = parameter_specs(spec_from_config(files.config), dtype="float32")["experts"]["gate_MPDF"]
    region = ((0, 1), (0, 1), (2, 6), (0, 8))
    whole = read_region(source, spec, region=tuple((0, size) for size in spec.shape))
    needed = files.tensors["model.layers.0.mlp.experts.0.gate_proj.weight"].file
    for file in path.glob("*.safetensors"):
        if file != needed:
            os.truncate(file, 0)
    part = read_region(source, spec, region=region)
    np.testing.assert_array_equal(part, whole[0:1, 0:1, 2:6])
    with pytest.raises(CheckpointError, match="cannot read tensor"):
        read_region(source, spec, region=((1, 2), *region[1:]))


def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_is_loaded(single):
    files = open_checkpoint(single)
    tree = parameter_specs(spec_from_config(files.config | {"num_experts": 5}), dtype="float32")
    with pytest.raises(CheckpointError, match=r"tensors missing: .*experts\.4\..*misshapen: .*gate\.weight"):
        load_parameters(WeightSource(files, CHECKPOINT_RULES), tree, sharding_of=_replicated)


def _load_slots(files: CheckpointFiles, expert_of_slot: np.ndarray | None, **sizes: int):
    tree = parameter_specs(spec_from_config(files.config), dtype="float32", **sizes)
    return load_parameters(WeightSource(files, CHECKPOINT_RULES, expert_of_slot), tree, sharding_of=_experts)


SLOTS = np.array([[2, 0, 3, 1, 2, 2, 0, 1], [0, 1, 2, 3, 1, 1, 1, 1]])
"""For two MoE layers of four experts, over four devices."""


def test_every_slot_holds_the_expert_that_the_placement_names(single):
    tree, plain = _load(single)
    held = _load_slots(open_checkpoint(single), SLOTS, num_redundant=4)
    for name, array in plain["experts"].items():
        wanted = np.asarray(array)
        if dict(walk(tree))["experts", name].num_experts:
            wanted = np.stack([layer[experts] for layer, experts in zip(wanted, SLOTS, strict=True)])
        np.testing.assert_array_equal(np.asarray(held["experts"][name]), wanted)


def test_replicas_are_read_once(single, reads):
    _load_slots(open_checkpoint(single), SLOTS, num_redundant=4)
    experts = {name: count for name, count in reads.items() if ".experts." in name}
    assert set(experts.values()) == {1} and len(experts) == 2 * 4 * 3


def test_what_there_is_no_room_to_keep_is_read_again(single, reads, monkeypatch):
    monkeypatch.setattr(pieces, "KEPT_BYTES", 0)
    held = _load_slots(open_checkpoint(single), SLOTS, num_redundant=4)
    assert max(reads.values()) == 5
    up = np.asarray(held["experts"]["up_MPDF"])
    np.testing.assert_array_equal(up[1, 1], up[1, 7])


def test_nothing_is_kept_when_all_is_read(single):
    reader = PieceReader(open_checkpoint(single), [PIECE, PIECE, PIECE], dtype=np.dtype(np.float32))
    for _ in range(3):
        assert reader.take(PIECE).shape == (16,)
    assert reader.kept_bytes == 0


PIECE = ("model.norm.weight", ((0, 16),))


@pytest.fixture
def reads(monkeypatch) -> Counter[str]:
    """How often each tensor has been read."""
    counts: Counter[str] = Counter()
    read = CheckpointFiles.read

    def counting(files: CheckpointFiles, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        counts[name] += 1
        return read(files, name, index)

    monkeypatch.setattr(CheckpointFiles, "read", counting)
    return counts


@pytest.mark.parametrize(
    ("expert_of_slot", "message"),
    [
        (None, "8 slots for 4 experts: pass expert_of_slot"),
        (SLOTS[:1], r"expert_of_slot has shape \(1, 8\), not \(2, 8\)"),
        (SLOTS[:, :4], r"expert_of_slot has shape \(2, 4\), not \(2, 8\)"),
        (SLOTS - 1, r"expert_of_slot names an expert outside of 0\.\.3"),
        (SLOTS + 1, r"expert_of_slot names an expert outside of 0\.\.3"),
    ],
)
def test_slots_that_do_not_fit_the_model_are_refused(single, expert_of_slot, message):
    with pytest.raises(ValueError, match=message):
        _load_slots(open_checkpoint(single), expert_of_slot, num_redundant=4)


@pytest.mark.parametrize("num_devices", [4, 7, 256])
def test_a_vocabulary_that_does_not_divide_ends_in_zeros(single, num_devices, config):
    """Also where whole parts are padding: 260 words over 256 devices leave 126 of them without one."""
    files, spec = open_checkpoint(single), spec_from_config(open_checkpoint(single).config)
    plain, padded = (parameter_specs(spec, dtype="float32", num_devices=size)["embedding"] for size in (1, num_devices))
    source = WeightSource(files, CHECKPOINT_RULES)
    for name, dim in (("table_VD", 0), ("head_VD", 0)):
        wanted = read_region(source, plain[name], region=tuple((0, size) for size in plain[name].shape))
        size = padded[name].shape[dim]
        assert size % num_devices == 0 and size - config.vocab_size < num_devices
        part = size // num_devices
        parts = []
        for start in range(0, size, part):
            region = [(0, length) for length in padded[name].shape]
            region[dim] = (start, start + part)
            parts.append(read_region(source, padded[name], region=tuple(region)))
        whole = np.concatenate(parts, axis=dim)
        held, padding = np.split(whole, [config.vocab_size], axis=dim)
        np.testing.assert_array_equal(held, wanted)
        assert (padding == 0).all() and padding.shape[dim] == size - config.vocab_size


def test_rows_of_a_table_are_padded_beside_its_words(single, config):
    files, spec = open_checkpoint(single), spec_from_config(open_checkpoint(single).config)
    plain, padded = (
        parameter_specs(spec, dtype="float32", num_devices=size)["embedding"]["table_VD"] for size in (1, 7)
    )
    padded = padded.padded("table_row", config.hidden_size + 3)
    assert padded.file_shape == plain.shape and padded.shape[1] == config.hidden_size + 3
    source = WeightSource(files, CHECKPOINT_RULES)
    wanted, held = (read_region(source, each, region=tuple((0, n) for n in each.shape)) for each in (plain, padded))
    np.testing.assert_array_equal(held[: config.vocab_size, : config.hidden_size], wanted)
    assert (held[config.vocab_size :] == 0).all() and (held[:, config.hidden_size :] == 0).all()
