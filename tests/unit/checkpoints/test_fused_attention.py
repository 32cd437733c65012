"""Queries, keys and values that lie in one tensor of the file load as those that have one each."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from rayserve_moe.checkpoints.files import SINGLE_FILE, open_checkpoint
from rayserve_moe.checkpoints.loader import WeightSource, load_parameters
from rayserve_moe.model.families.qwen3_moe import CHECKPOINT_RULES, spec_from_hf
from rayserve_moe.model.param_spec import ParamSpec
from rayserve_moe.model.parameters import parameter_specs
from tests.support.models.attention_specs import with_attention

FUSED = "model.layers.{layer}.attention.query_key_value.weight"
FUSED_RULES = CHECKPOINT_RULES | {"q": FUSED, "k": FUSED, "v": FUSED}
MESH = jax.make_mesh((4,), ("heads",), devices=jax.devices()[:4])


@pytest.fixture(scope="module")
def fused_qkv(single: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = shutil.copytree(single, tmp_path_factory.mktemp("fused") / "model")
    tensors = load_file(copy / SINGLE_FILE)
    for layer in range(spec_from_hf(open_checkpoint(single).config).num_layers):
        parts = [tensors.pop(CHECKPOINT_RULES[role].format(layer=layer)) for role in "qkv"]
        tensors[FUSED.format(layer=layer)] = np.concatenate(parts)
    save_file(tensors, copy / SINGLE_FILE)
    return copy


@pytest.mark.parametrize("tensor_size", [1, 4])
def test_fused_queries_keys_and_values_load_as_one_tensor_each(single: Path, fused_qkv: Path, tensor_size: int):
    by_heads, whole = (NamedSharding(MESH, PartitionSpec(*axes)) for axes in ((None, None, "heads"), ()))

    def sharding_of(spec: ParamSpec) -> NamedSharding:
        return by_heads if tensor_size > 1 and spec.role in ("q", "k", "v") else whole

    loaded = []
    for path, rules in ((single, CHECKPOINT_RULES), (fused_qkv, FUSED_RULES)):
        files = open_checkpoint(path)
        spec = spec_from_hf(files.config)
        spec = with_attention(spec, fused_qkv=path == fused_qkv)
        tree = parameter_specs(spec, dtype="float32", tensor_size=tensor_size)
        loaded.append(load_parameters(WeightSource(files, rules), tree, sharding_of=sharding_of)["gqa"])
    assert loaded[0].keys() == loaded[1].keys()
    for name, array in loaded[0].items():
        np.testing.assert_array_equal(array, loaded[1][name], err_msg=name)
