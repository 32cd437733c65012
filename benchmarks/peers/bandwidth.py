"""What reading weights costs at the least: the machine's read bandwidth, and the bytes that decode steps must read."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from benchmarks.conditions import num_cores

BUFFER_BYTES = 1 << 30
REPEATS = 7
BF16_BYTES = 2


def read_bytes_per_s() -> float:
    """The best of several passes over a buffer that no cache holds, each core reading a part of its own."""
    parts = np.array_split(np.ones(BUFFER_BYTES // 8, np.int64), num_cores())
    best = 0.0
    with ThreadPoolExecutor(len(parts)) as pool:
        for _ in range(REPEATS):
            started = time.perf_counter()
            list(pool.map(np.sum, parts))
            best = max(best, BUFFER_BYTES / (time.perf_counter() - started))
    return best


def bytes_per_step(config: dict[str, Any], num_streams: int) -> float:
    """Weights that a step of `num_streams` single tokens reads, in bfloat16; experts as even routing touches them."""
    width, layers, experts = config["hidden_size"], config["num_hidden_layers"], config["num_experts"]
    heads = config["head_dim"] * (config["num_attention_heads"] + config["num_key_value_heads"])
    touched = experts * (1 - (1 - config["num_experts_per_tok"] / experts) ** num_streams)
    of_layer = 2 * width * heads + touched * 3 * width * config["moe_intermediate_size"]
    return BF16_BYTES * (layers * of_layer + config["vocab_size"] * width)


def most_tokens_per_s(config: dict[str, Any], num_streams: int, *, bytes_per_s: float) -> float:
    """Output tokens a second of `num_streams` that decode together, if reading weights were all."""
    return num_streams * bytes_per_s / bytes_per_step(config, num_streams)
