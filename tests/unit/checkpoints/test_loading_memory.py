"""While a whole quantised checkpoint loads, its host holds little more than its share of the decoded model."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import save_file

from rayserve_moe.checkpoints.files import open_checkpoint
from rayserve_moe.checkpoints.loader import WeightSource, load_parameters
from rayserve_moe.checkpoints.names import tensor_places
from rayserve_moe.model.family_table import family_of, spec_from_config
from rayserve_moe.model.param_spec import ParamSpec
from rayserve_moe.model.parameters import parameter_specs
from tests.support.checkpoints.quantized_tensors import MODELOPT, store_as
from tests.support.models.families import FAMILY_CASES, config_of

MESH = jax.make_mesh((4,), ("devices",), devices=jax.devices()[:4])
NUM_EXPERTS = 32
SIZES = {"hidden_size": 512, "num_hidden_layers": 4, "moe_intermediate_size": 256}
LATENT = {"n_routed_experts": NUM_EXPERTS, "kv_lora_rank": 128, "v_head_dim": 32}


@dataclass(frozen=True)
class Case:
    """A model of a family, and the format that its matrices are stored in."""

    model: str
    changes: dict[str, Any]
    settings: dict[str, Any]


CASES = {
    "block fp8": Case("deepseek_v3-0", LATENT, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "int4 by groups": Case("deepseek_v3-1", LATENT, {"quant_method": "compressed-tensors"}),
    "int8 by rows": Case(
        "qwen3_moe-0",
        {"num_experts": NUM_EXPERTS},
        {"quant_method": "compressed-tensors"},
    ),
    "mxfp4": Case("gpt_oss-0", {"num_local_experts": NUM_EXPERTS, "intermediate_size": 256}, {"quant_method": "mxfp4"}),
    "nvfp4": Case("mistral4-0", LATENT, MODELOPT),
}


def written(directory: Path, config: dict[str, Any], form: str) -> Path:
    """A checkpoint of random bytes: experts, and where the format has matrices of any kind other projections too."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    rng, tensors = np.random.default_rng(11), {}
    tree = parameter_specs(spec_from_config(config), dtype="bfloat16")
    for name, (place, *_) in tensor_places(tree, family_of(config).CHECKPOINT_RULES).items():
        shape = place.spec.file_shape
        is_stored = len(shape) == 3 if form in ("mxfp4", "nvfp4") else name.endswith("_proj.weight")
        tensors |= store_as(form, name, shape, rng) if is_stored else {name: np.ones(shape, ml_dtypes.bfloat16)}
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("num_redundant", [4, pytest.param(32, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=() if form == "mxfp4" else pytest.mark.slow) for form in CASES]
)
def test_a_host_holds_its_share_of_a_quantised_checkpoint_and_a_piece(tmp_path: Path, form: str, num_redundant: int):
    """Of 80 to 210 MB: also where every expert has a replica on another device, never a whole parameter decoded."""
    case = CASES[form]
    model = next(each for each in FAMILY_CASES if each.name == case.model)
    sized = replace(model, config={**model.config, **SIZES, **case.changes})
    config = config_of(sized, quantization_config=case.settings, dtype="bfloat16")
    files = open_checkpoint(written(tmp_path / "model", config, form))
    tree = parameter_specs(spec_from_config(config), dtype="bfloat16", num_redundant=num_redundant)
    num_layers = tree["experts"]["gate_MPDF"].shape[0]
    slots = np.tile(np.arange(NUM_EXPERTS + num_redundant) % NUM_EXPERTS, (num_layers, 1))

    def sharding_of(spec: ParamSpec) -> NamedSharding:
        return NamedSharding(MESH, PartitionSpec(None, "devices") if spec.num_experts else PartitionSpec())

    source = WeightSource(files, family_of(config).CHECKPOINT_RULES, slots)
    tracemalloc.start()
    held = load_parameters(source, tree, sharding_of=sharding_of, in_host_memory=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    share = sum(values.nbytes for staged in jax.tree.leaves(held) for values, _ in staged.shards)
    piece = max(4 * int(np.prod(entry.shape[-2:])) for entry in files.tensors.values())
    assert share < peak < 1.2 * share + piece, f"{peak / share:.3f} of the share"
