"""Decoded weights are, to the last bit, what transformers decodes from the same tensors; needs torch."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from rayserve_moe.checkpoints.files import open_checkpoint
from tests.support.checkpoints.quantized_tensors import FORMATS

torch = pytest.importorskip("torch", reason="the live comparison needs torch: `make parity`")
fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
loading = pytest.importorskip("transformers.core_model_loading")
safetensors_torch = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.parity


def decoded_by_transformers(name: str, stored: dict) -> torch.Tensor:
    if name == "mxfp4":
        blocks, scales = stored["w.weight_blocks"], stored["w.weight_scales"]
        return mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    if name.startswith("nvfp4"):
        parts = [stored[f"e.up_proj{ending}"] for ending in ("", "_weight_scale", "_weight_scale_2")]
        patterns = ["values", "scales", "factors", "divisors"]
        given = dict(zip(patterns, [*parts, torch.ones(len(parts[2]))], strict=True))
        given["factors"] = given["factors"].reshape(-1)
        decoded = loading.Inkling2LoopDequantizeExperts().convert(given, patterns, ["decoded"])
        return decoded["decoded"]
    return fp8.Fp8Dequantize(None)._dequantize_one(stored["w.weight"], stored["w.weight_scale_inv"], torch.bfloat16)


@pytest.mark.parametrize("name", ["block fp8", "mxfp4", "nvfp4 of each expert"])
def test_decoded_values_are_those_of_transformers(tmp_path, name):
    stored = FORMATS[name].make(np.random.default_rng(9))
    if name == "block fp8":
        # transformers takes only matrices that divide into blocks.
        stored["w.weight"] = np.resize(stored["w.weight"], (48, 64))
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": FORMATS[name].settings}))
    wanted = decoded_by_transformers(name, safetensors_torch.load_file(tmp_path / "model.safetensors"))
    values = torch.from_numpy(np.ascontiguousarray(open_checkpoint(tmp_path).read(FORMATS[name].name))).to(
        torch.bfloat16
    )
    assert torch.equal(values, wanted)
