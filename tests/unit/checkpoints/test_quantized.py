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
from tests.support.checkpoints.quantized_tensors import (
    FORMATS,
    MODELOPT,
    PACKED_FLOATS,
    Format,
    decode_whole,
    parts_of,
)

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
    values = files.read(made.name)
    assert values.dtype == np.float32 and values.shape == files.tensors[made.name].shape == made.shape
    if dtype == np.float32:
        np.testing.assert_array_equal(values, wanted.astype(np.float32))
    np.testing.assert_array_equal(values.astype(dtype), wanted.astype(np.float32).astype(dtype))


def test_a_decoded_slice_is_the_slice_of_the_whole(case):
    made, _, files = case
    whole, rng = files.read(made.name), np.random.default_rng(6)
    for _ in range(40):
        bounds = (sorted(rng.integers(0, size + 1, 2)) for size in made.shape[: rng.integers(1, len(made.shape) + 1)])
        index = tuple(slice(int(start), int(stop)) for start, stop in bounds)
        np.testing.assert_array_equal(files.read(made.name, index), whole[index])


def test_only_decoded_tensors_are_seen_and_all_bytes_are_counted(case):
    made, stored, files = case
    assert set(files.tensors) == {made.name}
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
    files.read(made.name, (slice(1, 2),))
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


@pytest.mark.parametrize("form", ["nvfp4", "nvfp4 with a divisor"])
def test_every_pair_of_codes_of_nvfp4_is_decoded(tmp_path, form):
    """Next to the types of ml_dtypes: e2m1 codes by e4m3 scales, all but the NaNs."""
    values, scale, factor = parts_of(form, NAME)
    codes = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    scales = np.arange(256, dtype=np.uint8)
    scales[(scales & 0x7F) == 0x7F] = 0
    stored = {
        values: np.tile(codes, (256, 1)),
        scale: np.repeat(scales, 256)[:, None].view(ml_dtypes.float8_e4m3fn),
        factor: np.full((1,), np.float32(1) / np.float32(3)),
    }
    files = opened(tmp_path / "model", stored, FORMATS[form].settings)
    np.testing.assert_array_equal(files.read(NAME), decode_whole(form, NAME, stored))


@pytest.mark.parametrize("algorithm", ["NVFP4", "MIXED_PRECISION", "w4a16_nvfp4"])
def test_tensors_that_settings_exclude_are_read_as_they_are(tmp_path, algorithm):
    """Next to NVFP4, and fp8 with a scale of the whole; scales of activations and caches are left out."""
    stored = {
        **FORMATS["nvfp4"].make(np.random.default_rng(1)),
        **{
            name.replace("w.", "f."): held
            for name, held in FORMATS["fp8 of modelopt"].make(np.random.default_rng(2)).items()
        },
        "router.weight": np.ones((2, 16), np.float32),
        "k_proj.k_scale": np.ones((), np.float32),
    }
    settings = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["router*"]}
    files = opened(tmp_path / "model", stored, settings)
    assert set(files.tensors) == {"w.weight", "f.weight", "router.weight"}
    assert files.tensors["router.weight"].dtype == "F32" and "router.weight" not in files.quantized
    np.testing.assert_array_equal(files.read("router.weight"), stored["router.weight"])


def test_the_settings_of_older_exports_stand_in_a_file_of_their_own(tmp_path):
    made, directory = FORMATS["nvfp4"], tmp_path / "model"
    stored = made.make(np.random.default_rng(5))
    wanted = opened(tmp_path / "twin", stored, made.settings).read(NAME)
    directory.mkdir()
    save_file(stored, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({}))
    with pytest.raises(CheckpointError, match=r"tensor w\.weight has dtype U8"):
        open_checkpoint(directory).read(NAME)
    older = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (directory / "hf_quant_config.json").write_text(json.dumps(older))
    np.testing.assert_array_equal(open_checkpoint(directory).read(NAME), wanted)
    (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "INT4_AWQ"}}))
    with pytest.raises(CheckpointError, match="quant_algo = 'INT4_AWQ' is not supported"):
        open_checkpoint(directory)


def test_the_settings_may_stand_in_the_config_of_the_text_model(tmp_path):
    made = FORMATS["nvfp4"]
    stored = made.make(np.random.default_rng(5))
    inner = opened(tmp_path / "inner", stored, None, {"text_config": {"quantization_config": made.settings}})
    np.testing.assert_array_equal(inner.read(NAME), opened(tmp_path / "outer", stored, made.settings).read(NAME))


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
    "nvfp4 of another algorithm": (
        {},
        {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"},
        r"quant_algo = 'NVFP4_AWQ' is not supported \(only NVFP4, W4A16_NVFP4, FP8, MIXED_PRECISION\)",
    ),
    "nvfp4 without an algorithm": ({}, {"quant_method": "modelopt"}, "quant_algo = None is not supported"),
    "nvfp4 in other groups": (
        {},
        {**MODELOPT, "group_size": 32},
        r"group_size = 32 is not supported for NVFP4 \(only 16\)",
    ),
    "nvfp4 that is none": ({}, MODELOPT, "quant_method = 'modelopt', but no tensor is stored that way"),
    "nvfp4 without scales": (
        with_change("nvfp4", scale=None),
        MODELOPT,
        "w.weight is U8, but its scale w.weight_scale is missing",
    ),
    "nvfp4 of experts without scales": (
        {"e.up_proj": FORMATS["nvfp4 of all experts"].make(np.random.default_rng(0))["e.up_proj"]},
        MODELOPT,
        "e.up_proj is U8, but its scale e.up_proj_weight_scale is missing",
    ),
    "packed values without scales": (
        with_change("nvfp4 with a divisor", scale=None),
        PACKED_FLOATS,
        "w.weight_packed is U8, but its scale w.weight_scale is missing",
    ),
    "nvfp4 without values": (
        with_change("nvfp4", **{"": None}),
        MODELOPT,
        "quantised tensor w.weight must be F8_E4M3 or I8 with 2 or 3 dimensions, found nothing",
    ),
    "nvfp4 without a factor": (
        with_change("nvfp4", scale_2=None),
        MODELOPT,
        "quantised tensor w.weight_scale_2 must be one F32 number, found nothing",
    ),
    "nvfp4 with a factor per row": (
        with_change("nvfp4", scale_2=np.ones(7, np.float32)),
        MODELOPT,
        r"w.weight_scale_2 must be one F32 number, found F32 of shape \[7\] in model.safetensors",
    ),
    "nvfp4 with factors of halves": (
        {
            **FORMATS["nvfp4 of all experts"].make(np.random.default_rng(0)),
            "e.up_proj_weight_scale_2": np.ones((3, 2), np.float32),
        },
        MODELOPT,
        r"e.up_proj_weight_scale_2 must be one F32 number or 3 of them, found F32 of shape \[3, 2\]",
    ),
    "nvfp4 with a divisor of another type": (
        with_change("nvfp4 with a divisor", global_scale=np.ones(1, np.float16)),
        PACKED_FLOATS,
        "w.weight_global_scale must be one F32 number, found F16",
    ),
    "nvfp4 with scales of other groups": (
        with_change("nvfp4", scale=np.ones((7, 6), ml_dtypes.float8_e4m3fn)),
        MODELOPT,
        r"w.weight_scale, F8_E4M3 of shape \[7, 6\], does not have a scale for each group of 16 values of w.weight",
    ),
    "nvfp4 with wide scales": (
        with_change("nvfp4", scale=np.ones((7, 3), np.float32)),
        MODELOPT,
        "w.weight_scale must be F8_E4M3 or U8 with 2 dimensions, found F32",
    ),
    "nvfp4 with scales of channels": (
        {**with_change("nvfp4"), "w.pre_quant_scale": np.ones(48, np.float32)},
        MODELOPT,
        "model.safetensors: w.pre_quant_scale: scales of channels are not supported",
    ),
    "scales of other experts": (
        {
            **FORMATS["block fp8 of all experts"].make(np.random.default_rng(0)),
            "e.up_proj_scale_inv": np.ones((2, 3, 4), np.float32),
        },
        FORMATS["block fp8 of all experts"].settings,
        r"e.up_proj_scale_inv, F32 of shape \[2, 3, 4\], does not match a matrix of shape \[3, 37, 50\]",
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
    ("case", "scale"),
    [
        ("block fp8", "scale_inv"),
        ("int4 by groups", "scale"),
        ("mxfp4", "scales"),
        ("mxfp4 of a matrix", "scale"),
        ("nvfp4", "scale_2"),
        ("nvfp4 with a divisor", "global_scale"),
    ],
)
def test_scales_that_are_not_finite_give_values_that_are_not(tmp_path, case, scale):
    """Without a warning: who loads them refuses the tensor."""
    made = FORMATS[case]
    of_case = with_change(case)[f"w.weight_{scale}"]
    wrong = {np.dtype(np.uint8): 255}.get(of_case.dtype, np.nan if "fp4" in case else np.inf)
    stored = with_change(case, **{scale: np.full_like(of_case, wrong)})
    assert not np.isfinite(opened(tmp_path / "model", stored, made.settings).read(NAME)).any()


@pytest.mark.parametrize(
    ("form", "part", "wrong"), [("nvfp4", "scale", np.nan), ("nvfp4 with a divisor", "global_scale", 0)]
)
def test_scales_of_nvfp4_that_are_no_numbers_give_values_that_are_not(tmp_path, form, part, wrong):
    held = with_change(form)[f"w.weight_{part}"]
    stored = with_change(form, **{part: np.full_like(held, wrong)})
    assert not np.isfinite(opened(tmp_path / "model", stored, FORMATS[form].settings).read(NAME)).all()
