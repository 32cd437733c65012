"""Experts are quantised while they are read: column by column, whatever the sharding, the parts and the layout."""

from __future__ import annotations

from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from rayserve_moe.checkpoints import parts
from rayserve_moe.checkpoints.files import SINGLE_FILE, CheckpointError, open_checkpoint
from rayserve_moe.checkpoints.loader import StagedParameter, WeightSource, load_parameters, quantize_columns
from rayserve_moe.checkpoints.synthetic import write_checkpoint
from rayserve_moe.model.families.qwen3_moe import CHECKPOINT_RULES
from rayserve_moe.model.family_table import FAMILIES, spec_from_config
from rayserve_moe.model.layers.moe import SCALE_OF
from rayserve_moe.model.param_spec import ParamSpec
from rayserve_moe.model.parameters import parameter_specs
from tests.support.checkpoints.fused_experts import FUSED_RULES, LAYOUTS, fused, fused_family
from tests.support.experts.quantized_experts import by_hand

FOUR = jax.make_mesh((4,), ("ranks",), devices=jax.devices()[:4])
MATRICES = arrays(
    np.float32, st.tuples(st.integers(1, 5), st.integers(1, 4)), elements=st.floats(-(2.0**99), 2.0**99, width=32)
)


def over_experts(spec: ParamSpec) -> NamedSharding:
    return NamedSharding(FOUR, PartitionSpec(*((None, "ranks") if spec.num_experts else ())))


def on_one(spec: ParamSpec) -> NamedSharding:
    return NamedSharding(jax.make_mesh((1,), ("ranks",), devices=jax.devices()[:1]), PartitionSpec())


def experts_of(path: Path, *, expert_dtype: str = "int8", rules=CHECKPOINT_RULES, **keywords) -> dict:
    files = open_checkpoint(path)
    tree = parameter_specs(spec_from_config(files.config), dtype="bfloat16", expert_dtype=expert_dtype)
    keywords = {"sharding_of": on_one, **keywords}
    return load_parameters(WeightSource(files, rules), tree, **keywords)["experts"]


@pytest.fixture(scope="module")
def wanted(single: Path) -> dict[str, np.ndarray]:
    """By the definition, from the file's own float32 and not from what it is rounded to."""
    files = open_checkpoint(single)
    tree = parameter_specs(spec_from_config(files.config), dtype="float32")
    plain = load_parameters(WeightSource(files, CHECKPOINT_RULES), tree, sharding_of=on_one)["experts"]
    found = {}
    for name, scale in SCALE_OF.items():
        found[name], found[scale] = by_hand(np.asarray(plain[name]))
    return found


def assert_held(experts: dict, wanted: dict[str, np.ndarray]) -> None:
    for name, array in wanted.items():
        assert experts[name].dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(experts[name]), array)


@given(MATRICES)
def test_no_value_is_further_off_than_half_a_step_of_its_column(values):
    integers, scales = quantize_columns(values)
    assert integers.dtype == np.int8 and np.abs(integers.astype(int)).max() <= 127
    off = np.abs(integers * scales.astype(np.float64) - values)
    assert (off <= scales * (0.5 + 1e-5) + 127 * 1.5e-45).all(), "a scale below the normal numbers is rounded itself"


@given(MATRICES, st.integers(0, 3))
def test_a_column_is_quantised_by_itself(values, column):
    column %= values.shape[1]
    both, alone = quantize_columns(values), quantize_columns(values[:, column : column + 1])
    np.testing.assert_array_equal(both.values_IO[:, [column]], alone.values_IO)
    assert both.scales_ZO[0, column] == alone.scales_ZO[0, 0]


def test_what_is_quantised_stays_as_it_is():
    """Quantising what the integers stand for brings the same integers, and scales to the last place."""
    values = np.random.default_rng(0).standard_normal((200, 50)).astype(np.float32)
    integers, scales = quantize_columns(values)
    again, scales_again = quantize_columns(integers * scales)
    np.testing.assert_array_equal(again, integers)
    np.testing.assert_allclose(scales_again, scales, rtol=2e-7)
    assert (np.abs(integers.astype(int)).max(axis=0) == 127).all()
    assert not quantize_columns(np.zeros((3, 2), ml_dtypes.bfloat16)).scales_ZO.any()


@pytest.mark.parametrize("sharding_of", [on_one, over_experts])
@pytest.mark.parametrize("part_bytes", [parts.PART_BYTES, 128])
def test_any_sharding_and_any_parts_hold_the_same(single, wanted, sharding_of, part_bytes, monkeypatch):
    monkeypatch.setattr(parts, "PART_BYTES", part_bytes)
    experts = experts_of(single, sharding_of=sharding_of)
    assert_held(experts, wanted)
    assert experts["router_MDE"].dtype == np.float32
    assert list(experts) == list(parameter_specs_of(single)), "scales come behind what they are scales of"


def parameter_specs_of(path: Path) -> dict[str, ParamSpec]:
    spec = spec_from_config(open_checkpoint(path).config)
    return parameter_specs(spec, dtype="bfloat16", expert_dtype="int8")["experts"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("part_bytes", [parts.PART_BYTES, 128])
def test_experts_in_one_tensor_are_quantised_alike(single, wanted, tmp_path, monkeypatch, layout, part_bytes):
    monkeypatch.setitem(FAMILIES, layout, fused_family(layout))
    monkeypatch.setattr(parts, "PART_BYTES", part_bytes)
    assert_held(experts_of(fused(single, tmp_path / layout, layout), rules=FUSED_RULES), wanted)


def test_staged_ones_are_quantised_in_host_memory(single, wanted):
    staged = experts_of(single, in_host_memory=True, sharding_of=over_experts)
    assert isinstance(staged["gate_MPDF"], StagedParameter)
    assert {shard.dtype for shard, _ in staged["gate_MPDF"].shards} == {np.dtype(np.int8)}
    assert_held({name: parameter.on_devices() for name, parameter in staged.items()}, wanted)


def test_a_checkpoint_of_bfloat16_is_quantised_from_its_own_values(tmp_path, config):
    path = write_checkpoint(tmp_path / "model", config, seed=7, dtype="bfloat16")
    plain, experts = experts_of(path, expert_dtype=""), experts_of(path)
    for name, scale in SCALE_OF.items():
        values, scales = by_hand(np.asarray(plain[name]).astype(np.float32))
        assert_held(experts, {name: values, scale: scales})


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_what_is_not_finite_is_refused_by_its_tensor(single, config, tmp_path, value):
    path = write_checkpoint(tmp_path / "model", config, seed=7, dtype="float32")
    tensors, name = load_file(path / SINGLE_FILE), "model.layers.2.mlp.experts.3.up_proj.weight"
    tensors[name][1, 2] = value
    save_file(tensors, path / SINGLE_FILE)
    with pytest.raises(CheckpointError, match=rf"{name} holds values that are not finite"):
        experts_of(path)
