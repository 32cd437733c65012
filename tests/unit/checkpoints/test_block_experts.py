"""Experts in e4m3, and in squares of 128 with a scale each: what files hold so is kept, all else is quantised so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file

from rayserve_moe.checkpoints import parts
from rayserve_moe.checkpoints.files import SINGLE_FILE, open_checkpoint
from rayserve_moe.checkpoints.loader import WeightSource, load_parameters, quantize_columns
from rayserve_moe.checkpoints.synthetic import write_checkpoint
from rayserve_moe.model.families.qwen3_moe import CHECKPOINT_RULES
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.model.layers.moe import SCALE_OF
from rayserve_moe.model.param_spec import LARGEST_OF, ParamSpec
from rayserve_moe.model.parameters import parameter_specs
from tests.support.experts.quantized_experts import EXPERT, blocks_by_hand, stored_in_blocks

FOUR = jax.make_mesh((4,), ("ranks",), devices=jax.devices()[:4])
DTYPE = pytest.mark.parametrize("dtype", LARGEST_OF)
WIDTH, INNER = 200, 136
"""Two blocks each, of which the last one is a part."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory, config) -> Path:
    small = replace(config, hidden_size=WIDTH, moe_intermediate_size=INNER, num_hidden_layers=3)
    return write_checkpoint(tmp_path_factory.mktemp("plain") / "model", small, seed=7, dtype="float32")


def over_experts(spec: ParamSpec) -> NamedSharding:
    return NamedSharding(FOUR, PartitionSpec(*((None, "ranks") if spec.num_experts else ())))


def experts_of(path: Path, *, dtype: str, of: Path | None = None, expert_dtype: str = "") -> dict[str, np.ndarray]:
    """Experts as a server of the checkpoint `of` holds those of `path`."""
    files, spec = open_checkpoint(path), spec_from_config(open_checkpoint(of or path).config)
    tree = parameter_specs(spec, dtype=dtype, expert_dtype=expert_dtype)
    found = load_parameters(WeightSource(files, CHECKPOINT_RULES), tree, sharding_of=over_experts)["experts"]
    return {name: np.asarray(array) for name, array in found.items() if name in {*SCALE_OF, *SCALE_OF.values()}}


def dequantized(experts: dict[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    found = {}
    for name, scale in SCALE_OF.items():
        rows = experts[name].shape[2]
        scales = np.repeat(experts[scale], 128, axis=2)[:, :, :rows]
        found[name] = (experts[name].astype(np.float32) * scales).astype(dtype)
    return found


@given(st.lists(st.floats(-448, 448, width=32), min_size=1, max_size=40))
def test_e4m3_is_rounded_as_its_definition_says(values):
    """Next to ml_dtypes, by values whose column has the scale 1."""
    column = np.array([*values, 448, 2.0**-10, 3 * 2.0**-10, 2.0**-6 - 2.0**-11], np.float32)[:, None]
    found, scales = quantize_columns(column, "float8_e4m3fn")
    assert scales.shape == (1, 1) and scales[0, 0] == 1
    expected = column.astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(found.view(np.uint8), np.where(expected == 0, 0, expected.view(np.uint8)))


@DTYPE
def test_every_number_comes_back_from_what_it_stands_for(dtype):
    bits = np.arange(256, dtype=np.uint8)
    numbers = bits[(bits & 0x7F) != 0x7F].view(dtype) if dtype == "float8_e4m3fn" else bits[bits != 128].view(dtype)
    scales = np.exp2(np.random.default_rng(0).uniform(-20, 20, (1, 50))).astype(np.float32)
    values = numbers.astype(np.float32)[:, None] * scales
    found = quantize_columns(values, dtype, block=128, scales_ZO=np.repeat(scales, 2, axis=0))
    expected = np.where(numbers == 0, 0, numbers.view(np.uint8))
    assert (found.values_IO.view(np.uint8) == expected[:, None]).all()


@pytest.mark.sampled(2)
@DTYPE
@pytest.mark.parametrize("part_bytes", [parts.PART_BYTES, 128])
def test_blocks_of_files_keep_their_bytes_and_scales(plain, tmp_path, monkeypatch, dtype, part_bytes):
    """However large the parts are that are read at once."""
    monkeypatch.setattr(parts, "PART_BYTES", part_bytes)
    path = stored_in_blocks(plain, tmp_path / "model", dtype)
    found, tensors = experts_of(path, dtype="bfloat16", expert_dtype=dtype), load_file(plain / SINGLE_FILE)
    moe_layers = spec_from_config(open_checkpoint(path).config).moe_layer_ids
    for layer, expert in ((0, 0), (len(moe_layers) - 1, 3)):
        for name, role in (("gate_MPDF", "gate_proj"), ("up_MPDF", "up_proj"), ("down_MPFD", "down_proj")):
            in_file = f"model.layers.{moe_layers[layer]}.mlp.experts.{expert}.{role}.weight"
            assert EXPERT.fullmatch(in_file)
            held, scales = found[name][layer, expert], found[SCALE_OF[name]][layer, expert]
            stored, scales_OI = blocks_by_hand(tensors[in_file], dtype)
            of_file = stored.T.astype(np.float32)  # zeros lose their signs, other bytes follow from their numbers
            np.testing.assert_array_equal(held.astype(np.float32), of_file)
            assert not (np.signbit(held.astype(np.float32)) & (of_file == 0)).any()
            of_columns = np.repeat(scales_OI.T, 128, axis=1)[:, : held.shape[1]]
            np.testing.assert_array_equal(scales[: len(of_columns)], of_columns)
            assert len(scales) == 8 and not scales[len(of_columns) :].any()


@DTYPE
def test_what_they_stand_for_has_the_bits_of_what_is_read_as_bfloat16(plain, tmp_path, dtype):
    path = stored_in_blocks(plain, tmp_path / "model", dtype)
    narrow = dequantized(experts_of(path, dtype="bfloat16", expert_dtype=dtype), "bfloat16")
    for name, array in experts_of(path, dtype="bfloat16").items():
        np.testing.assert_array_equal(narrow[name].astype(np.float32), array.astype(np.float32))


@pytest.mark.sampled(2)
@DTYPE
@pytest.mark.parametrize("part_bytes", [parts.PART_BYTES, 128])
def test_an_update_without_blocks_is_quantised_into_them(plain, tmp_path, monkeypatch, dtype, part_bytes):
    """As the files that are served have been: of the same values, the same bytes and scales."""
    served = stored_in_blocks(plain, tmp_path / "model", dtype)
    monkeypatch.setattr(parts, "PART_BYTES", part_bytes)
    found = experts_of(plain, dtype="bfloat16", of=served, expert_dtype=dtype)
    for name, array in experts_of(served, dtype="bfloat16", expert_dtype=dtype).items():
        np.testing.assert_array_equal(found[name].view(np.uint8), array.view(np.uint8))


@DTYPE
def test_columns_have_the_scales_of_their_own_largest_number(plain, dtype):
    wide, found = experts_of(plain, dtype="float32"), experts_of(plain, dtype="float32", expert_dtype=dtype)
    for name, scale in SCALE_OF.items():
        largest = np.abs(wide[name]).max(axis=2, keepdims=True)
        assert found[name].dtype == dtype
        np.testing.assert_array_equal(found[scale], largest / np.float32(LARGEST_OF[dtype]))
        off = np.abs(found[name].astype(np.float32) * found[scale] - wide[name])
        most = found[scale] * (0.5 + 1e-5) if dtype == "int8" else np.abs(wide[name]) / 15.9 + found[scale] * 2.0**-10
        assert (off <= most).all()


def test_blocks_that_are_asked_for_in_another_dtype_are_quantised_by_columns(plain, tmp_path):
    path = stored_in_blocks(plain, tmp_path / "model")
    found = experts_of(path, dtype="bfloat16", expert_dtype="int8")
    assert {found[scale].shape[2] for scale in SCALE_OF.values()} == {1}
    values, scales = blocks_by_hand(np.eye(130, 129, dtype=np.float32))
    assert values.shape == (130, 129) and scales.shape == (2, 2)
