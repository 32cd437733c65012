"""A synthetic Qwen3-MoE checkpoint as a GGUF file in bfloat16, for llama.cpp. Needs the gguf package."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

PLAIN = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
WIDENED = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate_inp": "mlp.gate",
}
EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}


def write_gguf(model: Path, file: Path) -> Path:
    """Write `file` from the checkpoint directory `model`; every layer has experts, norms and routers become float32."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    tensors = _read_all(model)
    writer = gguf.GGUFWriter(str(file), "qwen3moe")
    _write_sizes(writer, config)
    _write_vocabulary(writer, model, config["vocab_size"])

    def put(name: str, bits: np.ndarray, *, is_wide: bool = False) -> None:
        if is_wide:
            writer.add_tensor(f"{name}.weight", (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            raw = np.ascontiguousarray(bits).view(np.uint8)
            writer.add_tensor(f"{name}.weight", raw, raw_dtype=gguf.GGMLQuantizationType.BF16)

    put("token_embd", tensors["model.embed_tokens.weight"])
    put("output_norm", tensors["model.norm.weight"], is_wide=True)
    put("output", tensors["lm_head.weight"])
    for layer in range(config["num_hidden_layers"]):
        source, target = f"model.layers.{layer}.", f"blk.{layer}."
        for names, is_wide in ((PLAIN, False), (WIDENED, True)):
            for name, theirs in names.items():
                put(target + name, tensors[f"{source}{theirs}.weight"], is_wide=is_wide)
        for name, theirs in EXPERTS.items():
            each = (f"{source}mlp.experts.{expert}.{theirs}.weight" for expert in range(config["num_experts"]))
            put(target + name, np.stack([tensors[one] for one in each]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _write_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def _write_vocabulary(writer: gguf.GGUFWriter, model: Path, size: int) -> None:
    """Names for all ids. Prompts come as ids, so merges are never used; the loader wants one all the same."""
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


def _read_all(model: Path) -> dict[str, np.ndarray]:
    """Bits of every tensor, uint16, mapped from the safetensors files."""
    tensors = {}
    for file in sorted(model.glob("*.safetensors")):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        raw = np.memmap(file, np.uint8, "r", offset=8 + length)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}"
            begin, end = entry["data_offsets"]
            tensors[name] = raw[begin:end].view(np.uint16).reshape(entry["shape"])
    return tensors
