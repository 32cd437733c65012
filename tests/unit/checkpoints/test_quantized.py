"""Quantised tensors read as their format defines them, slice by slice, and what is not read is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import load_file, save_file

from rayserve_moe.checkpoints.files import CheckpointError, CheckpointFiles, open_checkpoint
from rayserve_moe.checkpoints.loader import WeightSource, load_parameters
from rayserve_moe.model.families.qwen3_moe import CHECKPOINT_RULES
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.model.parameters import parameter_specs
from tests.support.checkpoints.quantized_tensors import FORMATS, Format

NAME = "w.weight"


def opened(directory: Path, stored: dict, settings: dict | list | None, config: dict | None = None) -> CheckpointFiles:
    directory.mkdir()
    save_file(stored, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**(config or {}), "quantization_config": settings}))
    return open_checkpoint(directory)


@pytest.fixture(params=FORMATS.values(), ids=FORMATS.keys())
def case(request, tmp_path) -> tuple[Format, dict[str, np.ndarray], CheckpointFiles]:
    made = request.param
    stored = made.make(np.random.default_rng(5))
    return made, stored, opened(tmp_path / "model", stored, made.settings)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_every_value_is_what_its_format_defines_rounded_once(case, dtype):
    made, stored, files = case
    wanted = np.array([made.value(stored, at) for at in np.ndindex(*made.shape)]).reshape(made.shape)
    values = files.read(NAME)
    assert values.dtype == np.float32 and values.shape == files.tensors[NAME].shape == made.shape
    if dtype == np.float32:
        np.testing.assert_array_equal(values, wanted.astype(np.float32))
    np.testing.assert_array_equal(values.astype(dtype), wanted.astype(np.float32).astype(dtype))


def test_a_decoded_slice_is_the_slice_of_the_whole(case):
    made, _, files = case
    whole, rng = files.read(NAME), np.random.default_rng(6)
    for _ in range(40):
        bounds = (sorted(rng.integers(0, size + 1, 2)) for size in made.shape[: rng.integers(1, len(made.shape) + 1)])
        index = tuple(slice(int(start), int(stop)) for start, stop in bounds)
        np.testing.assert_array_equal(files.read(NAME, index), whole[index])


def test_only_decoded_tensors_are_seen_and_all_bytes_are_counted(case):
    _, stored, files = case
    assert set(files.tensors) == {NAME}
    assert files.num_bytes == sum(values.nbytes for values in stored.values())


def test_reading_a_slice_reads_no_other_rows(case, monkeypatch):
    made, stored, files = case
    sizes = []
    read = CheckpointFiles._read_stored

    def noted(self, name, index):
        values = read(self, name, index)
        sizes.append(values.nbytes)
        return values

    monkeypatch.setattr(CheckpointFiles, "_read_stored", noted)
    files.read(NAME, (slice(1, 2),))
    of_row = max(values.nbytes for values in stored.values()) / made.shape[0]
    assert sizes[0] == of_row


def test_a_quantised_checkpoint_loads_as_its_decoded_twin(tmp_path, single):
    tensors, rng = load_file(single / "model.safetensors"), np.random.default_rng(8)
    stored, decoded = dict(tensors), dict(tensors)
    for name in (name for name in tensors if name.endswith("_proj.weight")):
        stored[name] = rng.integers(-128, 128, tensors[name].shape, dtype=np.int8)
        stored[f"{name}_scale"] = rng.uniform(0.001, 0.01, (len(tensors[name]), 1)).astype(np.float32)
        decoded[name] = stored[name].astype(np.float32) * stored[f"{name}_scale"]
    config = json.loads((single / "config.json").read_text())
    loaded = []
    for directory, held, settings in (
        ("quantised", stored, {"quant_method": "compressed-tensors"}),
        ("twin", decoded, None),
    ):
        files = opened(tmp_path / directory, held, settings, config)
        tree = parameter_specs(spec_from_config(files.config), dtype="bfloat16")
        source = WeightSource(files, CHECKPOINT_RULES)
        loaded.append(load_parameters(source, tree, sharding_of=lambda _: SingleDeviceSharding(jax.devices()[0])))
    jax.tree.map(np.testing.assert_array_equal, *loaded)


def with_change(case: str, **changes: np.ndarray | None) -> dict[str, np.ndarray]:
    stored = FORMATS[case].make(np.random.default_rng(0))
    for name, values in changes.items():
        stored[f"w.weight_{name}" if name else "w.weight"] = values
    return {name: values for name, values in stored.items() if values is not None}


def of_strategy(strategy: str, **more: object) -> dict[str, object]:
    weights = {"num_bits": 4, "symmetric": True, "strategy": strategy, **more}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


ODD = np.ones((2, 2), np.float32)
INT8_GROUPS = {"group_0": {"weights": {"num_bits": 8}}}
REFUSED = {
    "method": ({}, {"quant_method": "gptq"}, "quant_method = 'gptq' is not supported .*fp8, mxfp4, compressed-tensors"),
    "no method": ({}, {"bits": 4}, "quant_method = 'None' is not supported"),
    "settings of another type": ({}, "mxfp4", r"config\.json: quantization_config must be an object, found 'mxfp4'"),
    "block fp8 that is none": ({}, {"quant_method": "fp8"}, "quant_method = 'fp8', but no tensor is stored that way"),
    "mxfp4 that is none": ({}, {"quant_method": "mxfp4"}, "'mxfp4', but no tensor .* remove quantization_config"),
    "compressed that is none": ({}, {"quant_method": "compressed-tensors"}, "but no tensor is stored that way"),
    "block sizes": ({}, {"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two"),
    "scales of another shape": (
        with_change("block fp8", scale_inv=ODD),
        FORMATS["block fp8"].settings,
        r"w.weight_scale_inv, F32 of shape \[2, 2\], does not match .* \[37, 50\] in blocks of \[16, 16\]",
    ),
    "values without a scale": (
        with_change("block fp8", scale_inv=None),
        FORMATS["block fp8"].settings,
        "w.weight is F8_E4M3, but its scale w.weight_scale_inv is missing",
    ),
    "scale without values": (
        {"w.weight_scale_inv": ODD},
        FORMATS["block fp8"].settings,
        "w.weight must be F8_E4M3 or I8 .* found nothing",
    ),
    "zero points": (
        with_change("int4 by groups", zero_point=ODD),
        FORMATS["int4 by groups"].settings,
        "zero_point: zero points and reordered groups are not supported",
    ),
    "asymmetric": (
        {},
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"symmetric": False}}}},
        "zero points are not supported",
    ),
    "eight bits packed into words": (
        with_change("int4 by groups"),
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": INT8_GROUPS},
        "packed weights of 8 bits are not supported",
    ),
    "scales of integers": (
        with_change("int8 by rows", scale=np.ones((9, 1), np.int32)),
        FORMATS["int8 by rows"].settings,
        "I32 .* does not match",
    ),
    "nothing quantised": (
        with_change("int8 by rows", **{"": np.zeros((0, 21), np.int8)}),
        FORMATS["int8 by rows"].settings,
        r"w.weight must be F8_E4M3 or I8 .* found I8 of shape \[0, 21\]",
    ),
    "scales of other groups": (
        with_change("int4 by groups", scale=np.ones((7, 1), np.float32)),
        of_strategy("group", group_size=32),
        r"w.weight_scale, F32 of shape \[7, 1\], does not match .* in blocks of \[1, 32\]",
    ),
    "one scale for all rows": (
        with_change("int8 by rows", scale=np.ones((1, 1), np.float32)),
        of_strategy("channel"),
        r"w.weight_scale, .* does not match .* in blocks of \[1, 21\]",
    ),
    "blocks without scales": (
        with_change("mxfp4", scales=None),
        FORMATS["mxfp4"].settings,
        "w.weight_scales must be U8 with 3 dimensions, found nothing",
    ),
}


@pytest.mark.parametrize(("stored", "settings", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_read_is_refused_by_name_when_the_checkpoint_is_opened(tmp_path, stored, settings, message):
    with pytest.raises(CheckpointError, match=message) as refusal:
        opened(tmp_path / "model", stored or {"w.weight": ODD}, settings)
    assert str(refusal.value).startswith(str(tmp_path / "model")), "the directory is named"


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("int4 by groups", of_strategy("group", group_size=32)),
        ("int8 by rows", of_strategy("channel")),
        ("fp8 with one scale", of_strategy("tensor")),
        ("fp8 with one scale", of_strategy("block", block_structure=[16, 128])),
    ],
    ids=str,
)
def test_scales_are_those_of_the_strategy_where_one_is_stated(tmp_path, case, settings):
    made = FORMATS[case]
    stored = made.make(np.random.default_rng(0))
    plain, stated = (opened(tmp_path / str(i), stored, each) for i, each in enumerate((made.settings, settings)))
    np.testing.assert_array_equal(stated.read(NAME), plain.read(NAME))


@pytest.mark.parametrize(
    ("case", "scale"), [("block fp8", "scale_inv"), ("int4 by groups", "scale"), ("mxfp4", "scales")]
)
def test_scales_that_are_not_finite_give_values_that_are_not(tmp_path, case, scale):
    """Without a warning: who loads them refuses the tensor."""
    made = FORMATS[case]
    of_case = with_change(case)[f"w.weight_{scale}"]
    stored = with_change(case, **{scale: np.full_like(of_case, 255 if case == "mxfp4" else np.inf)})
    assert not np.isfinite(opened(tmp_path / "model", stored, made.settings).read(NAME)).any()
