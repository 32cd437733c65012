"""Numbers out of a `config.json`: of the right type, and no larger than any model has them."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from rayserve_moe.model.spec import UnsupportedModelError

MOST = {
    "num_hidden_layers": 512,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
    "head_dim": 4096,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "moe_intermediate_size": 1 << 20,
    "num_experts": 2048,
    "num_local_experts": 2048,
    "num_experts_per_tok": 256,
    "vocab_size": 1 << 22,
    "max_position_embeddings": 1 << 24,
    "decoder_sparse_step": 512,
}
"""Largest value of each integer: several times what published models have."""
MOST_NUMBER = 1e12


def integer_of(config: Mapping[str, Any], key: str, default: int = 0) -> int:
    """The positive integer under `key`, or `default` where there is none; UnsupportedModelError for anything else."""
    value = config.get(key) or default
    if type(value) is not int or not 1 <= value <= MOST[key]:
        raise UnsupportedModelError(
            f"config.json: {key} must be a positive integer up to {MOST[key]}, found {reprlib.repr(config.get(key))}"
        )
    return value


def number_of(config: Mapping[str, Any], key: str, default: float) -> float:
    """The positive number under `key`, or `default` where there is none; UnsupportedModelError for anything else."""
    value = config.get(key) or default
    if type(value) not in (int, float) or not 0 < value <= MOST_NUMBER:
        raise UnsupportedModelError(
            f"config.json: {key} must be a positive number up to {MOST_NUMBER:g}, found {reprlib.repr(value)}"
        )
    return float(value)


def object_of(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object under `key`, empty where there is none; UnsupportedModelError for anything else."""
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise UnsupportedModelError(f"config.json: {key} must be an object, found {reprlib.repr(value)}")
    return value
