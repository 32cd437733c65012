"""Loaded parameters are the file's tensors, whatever the sharding and the dtype."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file

from rayserve_moe.checkpoints.files import CheckpointError, open_checkpoint
from rayserve_moe.checkpoints.loader import load_parameters, read_region
from rayserve_moe.checkpoints.names import tensor_places, walk
from rayserve_moe.checkpoints.synthetic import write_checkpoint
from rayserve_moe.model.families.qwen3_moe import CHECKPOINT_RULES
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.model.parameters import ParamSpec, parameter_specs

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
    return tree, load_parameters(files, tree, rules=CHECKPOINT_RULES, sharding_of=sharding_of)


def _stacked(path: Path, tree) -> dict[tuple[str, ...], np.ndarray]:
    """Assemble every parameter whole, straight from safetensors."""
    tensors = load_file(path / "model.safetensors")
    whole = {keys: np.zeros(spec.shape, np.float32) for keys, spec in walk(tree)}
    for name, place in tensor_places(tree, CHECKPOINT_RULES).items():
        whole[place.path][place.stack_index] = tensors[name].T if place.spec.transposed else tensors[name]
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
    spec = spec_from_config(files.config)
    once, repeated = (parameter_specs(spec, dtype="float32", tensor_size=size)["attention"] for size in (1, 4))
    heads, width = config.num_key_value_heads, config.head_dim
    for name in ("k_LDG", "v_LDG"):
        whole = [(0, size) for size in once[name].shape]
        plain = read_region(files, once[name], rules=CHECKPOINT_RULES, region=tuple(whole))
        wanted = plain.reshape(*plain.shape[:2], heads, width).repeat(4 // heads, axis=2).reshape(*plain.shape[:2], -1)
        for start in range(0, 4 * width, width):
            region = (*whole[:2], (start, start + width))
            part = read_region(files, repeated[name], rules=CHECKPOINT_RULES, region=region)
            np.testing.assert_array_equal(part, wanted[..., start : start + width])
    loaded = load_parameters(
        files,
        parameter_specs(spec, dtype="float32", tensor_size=4),
        rules=CHECKPOINT_RULES,
        sharding_of=_last_dim,
    )
    np.testing.assert_array_equal(np.asarray(loaded["attention"]["v_LDG"]), wanted)


def test_loading_needs_only_the_files_that_hold_the_asked_region(tmp_path, config):
    """With one tensor per file, expert 0 can be read when every other file is gone."""
    path = write_checkpoint(tmp_path / "model", config, dtype="float32", max_shard_bytes=1)
    files = open_checkpoint(path)
    spec = parameter_specs(spec_from_config(files.config), dtype="float32")["experts"]["gate_MEDF"]
    region = ((0, 1), (0, 1), (2, 6), (0, 8))
    whole = read_region(files, spec, rules=CHECKPOINT_RULES, region=tuple((0, size) for size in spec.shape))
    needed = files.tensors["model.layers.0.mlp.experts.0.gate_proj.weight"].file
    for file in path.glob("*.safetensors"):
        if file != needed:
            os.truncate(file, 0)
    part = read_region(files, spec, rules=CHECKPOINT_RULES, region=region)
    np.testing.assert_array_equal(part, whole[0:1, 0:1, 2:6])
    with pytest.raises(CheckpointError, match="cannot read tensor"):
        read_region(files, spec, rules=CHECKPOINT_RULES, region=((1, 2), *region[1:]))


def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_is_loaded(single):
    files = open_checkpoint(single)
    tree = parameter_specs(spec_from_config(files.config | {"num_experts": 5}), dtype="float32")
    with pytest.raises(CheckpointError, match=r"tensors missing: .*experts\.4\..*misshapen: .*gate\.weight"):
        load_parameters(files, tree, rules=CHECKPOINT_RULES, sharding_of=_replicated)
