"""The shape of Qwen3-30B-A3B, or a tiny one, with random weights made on the device, and the bytes of its steps."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from rayserve_moe.checkpoints.synthetic_tokenizer import write_tokenizer
from rayserve_moe.execution import runner
from rayserve_moe.execution.step.pytrees import ModelWeights
from rayserve_moe.execution.weights.placing import maps_on_devices, weight_shapes
from rayserve_moe.inprocess.engine import Engine
from rayserve_moe.model.model_config import ModelConfig

DEVIATION, PARTS_ABOVE = 0.02, 10**8
"""Standard deviation of the random weights; number of elements above which an array is made in parts.

The random bits of a whole array would take as much memory again.
"""


def shape_of(*, is_small: bool, num_layers: int = 48) -> dict[str, Any]:
    """Return the `config.json` of the shape."""
    hidden, experts, top_k, width, heads, kv_heads, head, words = (
        (128, 16, 2, 64, 4, 2, 32, 512) if is_small else (2048, 128, 8, 768, 32, 4, 128, 151_936)
    )
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
        "vocab_size": words,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "moe_intermediate_size": width,
        "num_hidden_layers": 2 if is_small else num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    """Write a checkpoint of that config without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, config["vocab_size"])
    save_file({"unused": np.zeros(4, np.float32)}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@contextmanager
def random_weights() -> Iterator[None]:
    """Have engines that start inside make their weights on the device, once for all engines of a model."""
    made: dict[str, Any] = {}

    def load(_: Any, config: ModelConfig, *, dtype: str, placement: Any, may_change: bool = False) -> ModelWeights:
        shapes = weight_shapes(config, dtype=dtype, placement=placement, may_change=may_change)
        if not made:
            numbers = iter(range(10**6))
            made.update(
                {
                    group: {name: _drawn(name, shape, next(numbers)) for name, shape in arrays.items()}
                    for group, arrays in shapes.params.items()
                }
            )
            jax.block_until_ready(made)
        return ModelWeights(made, maps_on_devices(placement, config.plan, may_change=may_change))  # ty: ignore

    with patch.object(runner, "load_weights", load):
        yield


def _drawn(name: str, shape: jax.ShapeDtypeStruct, number: int) -> jax.Array:
    """Return ones for norms, zeros for vectors, else uniform numbers of the deviation."""
    if "norm" in name or name == "scale":
        return jnp.ones(shape.shape, shape.dtype)
    if len(shape.shape) < 2:
        return jnp.zeros(shape.shape, shape.dtype)
    first, is_large = shape.shape[0], math.prod(shape.shape) > PARTS_ABOVE
    num_parts = next(n for n in range(64, 0, -1) if first % n == 0) if is_large else 1
    part = (first // num_parts, *shape.shape[1:])

    def one(i: jax.Array, array: jax.Array) -> jax.Array:
        bits = jax.random.bits(jax.random.fold_in(jax.random.key(number), i), part, jnp.uint16)
        values = (bits.astype(jnp.float32) / 65536 - 0.5) * (DEVIATION * math.sqrt(12))
        return jax.lax.dynamic_update_slice_in_dim(array, values.astype(shape.dtype), i * part[0], axis=0)

    def fill() -> jax.Array:
        return jax.lax.fori_loop(0, num_parts, one, jnp.zeros(shape.shape, shape.dtype))

    return jax.jit(fill, out_shardings=shape.sharding)()


def step_bytes(config: dict[str, Any], *, sequences: int, context: int, experts_touched: float) -> float:
    """Return the bytes that a decode step reads: touched experts, other weights, the head, keys and values."""
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    heads = (2 * config["num_attention_heads"] + 2 * config["num_key_value_heads"]) * config["head_dim"]
    expert = 3 * hidden * config["moe_intermediate_size"] * 2
    dense = heads * hidden * 2 + config["num_experts"] * hidden * 4
    rows = sequences * context * 2 * config["num_key_value_heads"] * config["head_dim"] * 2
    return layers * (experts_touched * expert + dense + rows) + config["vocab_size"] * hidden * 2


def token_flops(config: dict[str, Any]) -> float:
    """Return the operations of products of a prompt token, without attention and head."""
    hidden = config["hidden_size"]
    heads = (2 * config["num_attention_heads"] + 2 * config["num_key_value_heads"]) * config["head_dim"]
    experts = 3 * hidden * config["moe_intermediate_size"] * config["num_experts_per_tok"]
    return 2.0 * config["num_hidden_layers"] * (heads * hidden + experts + config["num_experts"] * hidden)


def experts_expected(config: dict[str, Any], sequences: int) -> float:
    """Return the expected number of a layer's experts that `sequences` tokens are routed to, if routing is even."""
    num_experts = config["num_experts"]
    return num_experts * (1 - (1 - config["num_experts_per_tok"] / num_experts) ** sequences)


def engine_of(folder: Path, **settings: Any) -> Engine:
    """Return an engine over that model."""
    fixed = {"structured_output": False, "compile_cache": "off", "devices_per_host": 1, "cpu_kernels": "off"}
    return Engine(str(folder), **{**fixed, **settings})
