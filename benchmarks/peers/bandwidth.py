"""What reading weights costs at the least: the machine's read bandwidth, and the bytes that decode steps must read."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from benchmarks.conditions import num_cores
from rayserve_moe.model.parameters import parameter_specs
from rayserve_moe.model.spec import ModelSpec

BUFFER_BYTES = 1 << 30
REPEATS = 7
BF16_BYTES = 2


def read_bytes_per_s() -> float:
    """Return the best of several passes over a buffer that no cache holds, each core reading a part of its own."""
    parts = np.array_split(np.ones(BUFFER_BYTES // 8, np.int64), num_cores())
    best = 0.0
    with ThreadPoolExecutor(len(parts)) as pool:
        for _ in range(REPEATS):
            started = time.perf_counter()
            list(pool.map(np.sum, parts))
            best = max(best, BUFFER_BYTES / (time.perf_counter() - started))
    return best


def bytes_per_step(spec: ModelSpec, num_streams: int, *, expert_dtype: str = "bfloat16") -> float:
    """Return weights that a step of `num_streams` single tokens reads; experts as even routing touches them.

    In bfloat16, but for the matrices of experts where they are in int8; scales and float32 routers count as bfloat16.
    """
    touched = 1 - (1 - spec.router.top_k / spec.router.num_experts) ** num_streams
    read = 0.0
    for group in parameter_specs(spec, dtype="bfloat16", expert_dtype=expert_dtype).values():
        for param in group.values():
            of_tokens_alone = param.role == "embedding" and not spec.tie_embeddings
            share = touched if param.num_experts else 0.0 if of_tokens_alone else 1.0
            read += share * math.prod(param.shape) * (1 if param.dtype == "int8" else BF16_BYTES)
    return read


def most_tokens_per_s(
    spec: ModelSpec, num_streams: int, *, bytes_per_s: float, expert_dtype: str = "bfloat16"
) -> float:
    """Return output tokens a second of `num_streams` that decode together, if reading weights were all."""
    return num_streams * bytes_per_s / bytes_per_step(spec, num_streams, expert_dtype=expert_dtype)
