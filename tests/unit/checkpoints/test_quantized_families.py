"""Quantised forms under the names and layouts of families: they load as their decoded twins, share by share."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import save_file

from rayserve_moe.checkpoints.files import open_checkpoint
from rayserve_moe.checkpoints.header import CheckpointError
from rayserve_moe.checkpoints.loader import WeightSource, load_parameters
from rayserve_moe.checkpoints.names import tensor_places
from rayserve_moe.model.family_table import family_of, rules_of, spec_from_config
from rayserve_moe.model.param_spec import ParamSpec
from rayserve_moe.model.parameters import parameter_specs, parameters_in_files
from tests.support.checkpoints.quantized_tensors import MODELOPT, PACKED_FLOATS, decode_whole, store_as
from tests.support.models.families import FAMILY_CASES, config_of

MESH = jax.make_mesh((2, 2), ("experts", "outputs"), devices=jax.devices()[:4])
PLAIN_ROLES = ("embedding", "head", "router", "selection_bias")
SETTINGS = {
    "block fp8": {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]},
    "int4 by groups": {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["re:.*gate$"]},
    "mxfp4 of a matrix": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
    "nvfp4": MODELOPT,
    "nvfp4 with a divisor": PACKED_FLOATS,
}


@dataclass(frozen=True)
class Layout:
    """The names of a family's files."""

    model: str
    rules: int = 0
    """0: the family's CHECKPOINT_RULES, else the number of its OTHER_RULES."""
    architecture: str = ""
    """Of the multimodal model around it."""
    beside: tuple[str, ...] = ()
    """Tensors that the language model does not read."""

    def config(self, settings: dict[str, Any]) -> dict[str, Any]:
        case = next(case for case in FAMILY_CASES if case.name == self.model)
        changes = {"quantization_config": settings, "dtype": "bfloat16"}
        if not self.architecture:
            return config_of(case, **changes)
        return {"architectures": [self.architecture], "text_config": config_of(case), **changes}


_MISTRAL, _VISION = "Mistral3ForConditionalGeneration", ("vision_tower.patch_conv.weight",)
_MINIMAX = "MiniMaxM3SparseForConditionalGeneration"
LAYOUTS = {
    "mistral4, fused": (Layout("mistral4-0"), ("block fp8", "nvfp4")),
    "mistral4, multimodal, fused": (Layout("mistral4-0", 1, _MISTRAL, _VISION), ("block fp8", "nvfp4")),
    "mistral4, multimodal": (
        Layout("mistral4-0", 2, _MISTRAL, _VISION),
        ("nvfp4 with a divisor", "int4 by groups", "mxfp4 of a matrix"),
    ),
    "mistral4": (Layout("mistral4-1", 3), ("nvfp4",)),
    "minimax_m3_vl, multimodal": (Layout("minimax_m3_vl_text-0", 0, _MINIMAX, _VISION), tuple(SETTINGS)),
    "minimax_m3_vl, fused": (Layout("minimax_m3_vl_text-0", 1), ("block fp8", "nvfp4")),
    "afmoe": (Layout("afmoe-0"), tuple(SETTINGS)),
    "laguna": (Layout("laguna-0"), tuple(SETTINGS)),
    "hy_v3": (Layout("hy_v3-0"), tuple(SETTINGS)),
    "mimo_v2_flash": (Layout("mimo_v2_flash-0"), ("block fp8", "nvfp4 with a divisor")),
    "step3p5": (Layout("step3p5-0"), ("block fp8", "nvfp4")),
    "gemma4_text": (Layout("gemma4_text-0"), ("block fp8", "nvfp4")),
    "gemma4, multimodal": (
        Layout("gemma4_text-1", 1, "Gemma4ForConditionalGeneration", ("model.vision_tower.patch.weight",)),
        ("nvfp4",),
    ),
}
CASES = {f"{name}: {form}": (layout, form) for name, (layout, forms) in LAYOUTS.items() for form in forms}


def written(directory: Path, layout: Layout, form: str, *, without: str = "") -> tuple[Path, Path]:
    """A checkpoint of random bytes and its decoded twin; matrices whose rows are no whole groups stay plain.

    The checkpoint lacks the tensor `without`, if given.
    """
    config = layout.config(SETTINGS[form])
    family, rng = family_of(config), np.random.default_rng(11)
    rules = (family.CHECKPOINT_RULES, *getattr(family, "OTHER_RULES", ()))[layout.rules]
    spec = spec_from_config(config)
    tree = parameters_in_files(parameter_specs(spec, dtype="bfloat16"), rules, spec=spec)
    stored, decoded = {}, {}
    for name, (place, *_) in tensor_places(tree, rules).items():
        shape, role = place.spec.file_shape, place.spec.role
        if len(shape) > 1 and shape[-1] % 32 == 0 and role not in PLAIN_ROLES:
            parts = store_as(form, name, shape, rng)
            stored |= parts
            decoded[name] = decode_whole(form, name, parts)
        else:
            stored[name] = decoded[name] = rng.standard_normal(shape, np.float32)
    beside = {name: np.ones((2, 2), np.float32) for name in layout.beside}
    stored.pop(without, None)
    for path, tensors in ((directory / "quantised", stored), (directory / "twin", decoded)):
        path.mkdir()
        save_file({**tensors, **beside}, path / "model.safetensors")
        held = config if tensors is stored else {**config, "quantization_config": None}
        (path / "config.json").write_text(json.dumps(held))
    return directory / "quantised", directory / "twin"


def loaded(path: Path, *, expert_dtype: str = "") -> dict[str, Any]:
    """The parameters on four devices: experts over two, and their outputs over two."""
    files = open_checkpoint(path)
    rules, spec = rules_of(files.config, files.tensors), spec_from_config(files.config)
    tree = parameter_specs(spec, dtype="bfloat16", expert_dtype=expert_dtype)
    source = WeightSource(files, rules, None, getattr(family_of(files.config), "IGNORED", ()))

    def sharding_of(param: ParamSpec) -> NamedSharding:
        split = (None, "experts", None, "outputs") if param.num_experts else ()
        return NamedSharding(MESH, PartitionSpec(*split))

    return load_parameters(source, parameters_in_files(tree, rules, spec=spec), sharding_of=sharding_of)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("layout", "form"), CASES.values(), ids=CASES.keys())
def test_a_quantised_checkpoint_of_a_family_loads_as_its_decoded_twin(tmp_path, layout, form):
    quantised, twin = written(tmp_path, layout, form)
    assert len(open_checkpoint(quantised).quantized) > 3
    jax.tree.map(np.testing.assert_array_equal, loaded(quantised), loaded(twin))


@pytest.mark.parametrize("case", ["gemma4_text: nvfp4", "step3p5: nvfp4", "mimo_v2_flash: block fp8"])
def test_a_file_of_a_family_without_a_scale_is_refused_by_its_name(tmp_path, case):
    quantised, _ = written(tmp_path, *CASES[case])
    scales = [name for name in open_checkpoint(quantised).stored if "layers.2." in name and "_scale" in name]
    for name in scales[:3]:
        (broken := tmp_path / name).mkdir()
        lacking, _ = written(broken, *CASES[case], without=name)
        with pytest.raises(CheckpointError, match=re.escape(name)):
            open_checkpoint(lacking)


@pytest.mark.parametrize("expert_dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize(
    "case", ["mistral4, multimodal, fused: nvfp4", "minimax_m3_vl, multimodal: nvfp4 with a divisor"]
)
def test_experts_of_4_bits_are_held_in_8_as_those_of_the_decoded_twin(tmp_path, case, expert_dtype):
    quantised, twin = written(tmp_path, *CASES[case])
    held, wanted = (loaded(path, expert_dtype=expert_dtype)["experts"] for path in (quantised, twin))
    assert held["gate_MPDF"].dtype == expert_dtype
    for name, array in wanted.items():
        np.testing.assert_array_equal(np.asarray(held[name]), np.asarray(array))


def test_fused_blocks_of_fp8_keep_their_scales(tmp_path):
    """Gate and up in one tensor, each column with the scales of its own block."""
    layout, form = CASES["mistral4, multimodal, fused: block fp8"]
    quantised, _ = written(tmp_path, layout, form)
    held = loaded(quantised, expert_dtype="float8_e4m3fn")["experts"]
    files = open_checkpoint(quantised)
    name = "language_model.model.layers.1.mlp.experts.gate_up_proj"
    values = files._read_stored(name, ()).astype(np.float32)
    scales = files._read_stored(f"{name}_scale_inv", ())
    inner = values.shape[1] // 2
    for array, scale, first in (("gate_MPDF", "gate_scale_MPZF", 0), ("up_MPDF", "up_scale_MPZF", inner)):
        of_file = values[:, first : first + inner].transpose(0, 2, 1)
        np.testing.assert_array_equal(np.asarray(held[array][1]).astype(np.float32), of_file)
        np.testing.assert_array_equal(np.asarray(held[scale][1])[:, 0], np.repeat(scales[:, 0], inner, axis=1))


def test_settings_in_the_config_of_the_text_model_declare_blocks_too():
    outer = LAYOUTS["mistral4, multimodal, fused"][0].config(SETTINGS["block fp8"])
    text = {**outer["text_config"], "quantization_config": outer["quantization_config"]}
    inner = {key: value for key, value in outer.items() if key != "quantization_config"} | {"text_config": text}
    assert spec_from_config(inner).block_dtype == spec_from_config(outer).block_dtype == "float8_e4m3fn"
