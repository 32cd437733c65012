"""A synthetic checkpoint as a GGUF file, in its own type or in Q8_0, for llama.cpp. Needs the gguf package."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from gguf_layout import ARCHITECTURES, tensors_of
from gguf_sizes import sizes_of

Q8_0 = gguf.GGMLQuantizationType.Q8_0


def write_gguf(model: Path, file: Path, *, in_int8: bool = False) -> Path:
    """Write `file` from the checkpoint directory `model`; vectors, biases and routers become float32.

    `in_int8`: all other matrices in Q8_0, as llama.cpp's own converter has them.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(str(file), architecture)
    kinds = gguf.GGUFValueType
    types = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING, list: kinds.ARRAY}
    for name, value in sizes_of(config).items():
        writer.add_key_value(f"{architecture}.{name}", value, types[type(value)])
    is_wide = config["dtype"] == "float32"
    kept = gguf.LlamaFileType.ALL_F32 if is_wide else gguf.LlamaFileType.MOSTLY_BF16
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if in_int8 else kept)
    _write_vocabulary(writer, model, config["vocab_size"])
    for name, array in tensors_of(model, config):
        if array.dtype == np.uint16 and in_int8:
            quantized = gguf.quants.quantize((array.astype(np.uint32) << 16).view(np.float32), Q8_0)
            writer.add_tensor(name, quantized, raw_dtype=Q8_0)
        elif array.dtype == np.uint16:
            writer.add_tensor(name, array.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _write_vocabulary(writer: gguf.GGUFWriter, model: Path, size: int) -> None:
    """Write names for all ids. Prompts come as ids, so merges are never used; the loader requires one."""
    known = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    names = {number: name for name, number in known.items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([names.get(i, f"[unused {i}]") for i in range(size)])
    writer.add_token_types([gguf.TokenType.NORMAL if i in names else gguf.TokenType.UNUSED for i in range(size)])
    writer.add_token_merges(["! !"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
