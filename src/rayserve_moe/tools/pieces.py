"""What a program should read where it lies: weights of a layer, and pages of a layer."""

from __future__ import annotations

import math

import jax.numpy as jnp

from rayserve_moe.execution.memory import local_elements
from rayserve_moe.execution.served_model import ServedModel
from rayserve_moe.execution.step_types import DeviceState
from rayserve_moe.execution.weights import parameter_tree
from rayserve_moe.tools.hlo_report import Piece

LEAST_PIECE_BYTES = 64 << 10
"""Norms and biases are small enough to be copied."""


def pieces_of(served: ServedModel, state: DeviceState) -> list[Piece]:
    """A layer's weights by kind, and half of a layer's pages or more."""
    model = served.config
    pieces = []
    for group, specs in parameter_tree(model, dtype=served.dtype).items():
        for spec in specs.values():
            local = model.plan.sharding(spec.axes).shard_shape(spec.shape)[spec.num_stacked_dims :]
            size = jnp.dtype(spec.dtype).itemsize
            num_elements = math.prod(local)
            if num_elements * size >= LEAST_PIECE_BYTES:
                pieces.append(Piece(group, _hlo_dtype(spec.dtype), local, num_elements))
    pool = state.kv_pages
    per_layer = local_elements(pool) // model.spec.num_layers
    rows = pool.sharding.shard_shape(pool.shape)[2:]
    return [*pieces, Piece("kv", _hlo_dtype(str(pool.dtype)), rows, per_layer // 2, is_written=True)]


def _hlo_dtype(dtype: str) -> str:
    """How the text of a program spells a dtype."""
    short = {"bfloat16": "bf16", "float32": "f32", "float16": "f16", "int8": "s8"}
    return short.get(dtype) or dtype.replace("float8_", "f8")
