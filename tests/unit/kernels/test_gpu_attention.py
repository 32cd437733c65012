"""Paged attention of GPUs, interpreted, is its reference: windows, sinks, latents, odd widths and empty sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.kernels.attention_config import PoolFormat
from rayserve_moe.kernels.gpu import paged_attention
from rayserve_moe.kernels.gpu.blocks import parts_of
from rayserve_moe.kernels.reference import attention as reference
from rayserve_moe.kernels.reference.attention import FULL_CAUSAL, BlockPlaces, ScoreConfig

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float8_e4m3fn": 2e-2}
"""Tolerance for values with a deviation of 1. The kernel rounds softmax weights to bfloat16; the reference does not."""


@dataclass(frozen=True)
class Shape:
    """Blocks of queries: the position of the first query and the number of queries of each; -1: an empty sequence."""

    blocks: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (4, 2)
    """Query heads and KV heads."""
    widths: tuple[int, int] = (32, 32)
    """Elements of a key and of a value."""
    page_size: int = 16
    config: ScoreConfig = FULL_CAUSAL
    has_sinks: bool = False
    latent_width: int = 0
    dtype: str = "float32"


SHAPES = {
    "single tokens of ragged lengths": Shape(((0, 1), (15, 1), (16, 1), (200, 1), (77, 1))),
    "one row": Shape(((130, 1),)),
    "an empty sequence": Shape(((5, 1), (-1, 1), (90, 1))),
    "nothing but padding": Shape(((-1, 1), (-1, 1))),
    "blocks of a prompt": Shape(((0, 8), (8, 8), (100, 3), (-1, 0))),
    "a window": Shape(((300, 1), (4, 1), (63, 1)), config=ScoreConfig(window=20)),
    "a window over blocks": Shape(((0, 8), (150, 8), (40, 5)), config=ScoreConfig(window=33)),
    "sinks": Shape(((9, 1), (120, 1), (-1, 1)), has_sinks=True),
    "sinks and a window over blocks": Shape(((3, 6), (90, 6)), config=ScoreConfig(window=16), has_sinks=True),
    "a soft cap": Shape(((60, 1), (7, 1)), config=ScoreConfig(soft_cap=5.0)),
    "a scale": Shape(((60, 1), (7, 1)), config=ScoreConfig(scale=0.3)),
    "many heads of one": Shape(((40, 4),), heads=(16, 1)),
    "as many KV heads": Shape(((40, 4), (3, 2)), heads=(3, 3)),
    "other values": Shape(((70, 1), (20, 1)), widths=(48, 16)),
    "three parts": Shape(((70, 2), (20, 1)), widths=(112, 64)),
    "latents": Shape(((70, 1), (130, 1), (-1, 1)), heads=(8, 1), widths=(80, 64), latent_width=64),
    "latents over blocks": Shape(((0, 8), (50, 8)), heads=(8, 1), widths=(80, 64), latent_width=64),
    "wide latents": Shape(((40, 1),), heads=(16, 1), widths=(576, 512), latent_width=512),
    "large pages": Shape(((200, 1), (3, 1)), page_size=128),
    "small pages": Shape(((50, 1), (3, 1)), page_size=4),
    "bfloat16": Shape(((200, 1), (77, 1), (31, 1)), dtype="bfloat16"),
    "bfloat16 over blocks": Shape(((0, 8), (90, 8)), dtype="bfloat16", has_sinks=True),
    "8 bits": Shape(((200, 1), (77, 1)), dtype="float8_e4m3fn"),
}
QUICK = ("single tokens of ragged lengths", "sinks and a window over blocks", "latents")


@pytest.fixture(autouse=True)
def _few_shares(monkeypatch):
    """The interpreter runs the programs of shares one after the other."""
    monkeypatch.setattr(paged_attention, "MAX_PROGRAMS", 64)


def arrays_of(shape: Shape) -> tuple[jax.Array, jax.Array, BlockPlaces, dict[str, Any]]:
    """Queries, a pool with NaN wherever no block sees, places and knobs."""
    generator = np.random.default_rng(len(shape.blocks) + shape.widths[0])
    num_queries = max(1, *(count for _, count in shape.blocks))
    positions = np.full((len(shape.blocks), num_queries), -1, np.int32)
    for block, (first, count) in enumerate(shape.blocks):
        if first >= 0:
            positions[block, :count] = np.arange(first, first + count)
    num_pages = max(1, int(positions.max()) // shape.page_size + 1)
    table = 1 + generator.permutation(len(shape.blocks) * num_pages).reshape(len(shape.blocks), -1)
    (num_heads, num_kv), (width, values) = shape.heads, shape.widths
    row = width if shape.latent_width else width + values
    pool = np.full((table.size + 1, shape.page_size, num_kv, row), np.nan, np.float32)
    for block, seen in enumerate(positions):
        first = max(0, seen[0] - shape.config.window + 1) if shape.config.window else 0
        for position in range(first, seen.max() + 1):
            page = table[block, position // shape.page_size]
            pool[page, position % shape.page_size] = generator.standard_normal((num_kv, row))
    queries = generator.standard_normal((*positions.shape, num_heads, width))
    wide = jnp.bfloat16 if shape.dtype == "float8_e4m3fn" else shape.dtype
    knobs: dict[str, Any] = {"config": shape.config, "latent_width": shape.latent_width}
    if not shape.latent_width:
        knobs["value_width"] = values
    if shape.has_sinks:
        knobs["sinks_H"] = jnp.asarray(generator.standard_normal(num_heads), jnp.float32)
    places = BlockPlaces(jnp.asarray(table, jnp.int32), jnp.asarray(positions))
    return jnp.asarray(queries, wide), jnp.asarray(pool, shape.dtype), places, knobs


def largest_difference(shape: Shape) -> float:
    queries, pool, places, knobs = arrays_of(shape)
    found = jax.jit(lambda *args: paged_attention.attend(*args, places, **knobs, interpret=True))(queries, pool)
    wanted = jax.jit(lambda *args: reference.attend(*args, places, **knobs))(queries, pool)
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    assert not np.any(np.asarray(found, np.float32)[np.asarray(places.positions_BQ) < 0])
    return float(np.abs(np.asarray(found, np.float32) - np.asarray(wanted, np.float32)).max())


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SHAPES]
)
def test_the_kernel_is_the_reference(name: str):
    assert largest_difference(SHAPES[name]) <= TOLERANCE[SHAPES[name].dtype]


def test_shares_of_the_keys_add_up(monkeypatch):
    shape = SHAPES["single tokens of ragged lengths"]
    for programs in (1, 8, 64):
        monkeypatch.setattr(paged_attention, "MAX_PROGRAMS", programs)
        assert largest_difference(shape) <= TOLERANCE["float32"]


def planted(name: str) -> tuple[str, Callable[..., Any]]:
    """A function of the kernel with a fault."""
    sum_of_shares, parts = paged_attention._sum_of_shares, parts_of
    return {
        "sinks forgotten": ("_sum_of_shares", lambda *found: sum_of_shares(*found[:3], None)),
        "a share forgotten": (
            "_sum_of_shares",
            lambda out, best, weight, sinks: sum_of_shares(out[:1], best[:1], weight[:1], sinks),
        ),
        "the last part of a width forgotten": ("parts_of", lambda width: parts(width)[:1]),
    }[name]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("sinks forgotten", "sinks"),
        ("a share forgotten", "single tokens of ragged lengths"),
        ("the last part of a width forgotten", "latents"),
    ],
)
def test_a_planted_fault_is_found(fault: str, name: str, monkeypatch):
    where, function = planted(fault)
    monkeypatch.setattr(paged_attention, where, function)
    assert not largest_difference(SHAPES[name]) <= 100 * TOLERANCE["float32"]


def test_a_window_that_is_ignored_reads_what_nobody_owns(monkeypatch):
    shape, real = SHAPES["a window"], paged_attention.attend

    def without_window(*args: Any, config: ScoreConfig, **named: Any) -> jax.Array:
        return real(*args, **named)

    monkeypatch.setattr(paged_attention, "attend", without_window)
    assert np.isnan(largest_difference(shape))


def test_heads_that_triton_does_not_multiply_are_named():
    pool = PoolFormat()
    reason = "keys of 24 with values of 24 elements are no multiples of 16"
    assert paged_attention.unsupported_reason(pool, head_dim=24, value_dim=24) == reason
    assert paged_attention.unsupported_reason(pool, head_dim=192, value_dim=128) == ""
    assert paged_attention.unsupported_latents(pool, row_width=576, latent_width=512) == ""
    reason = "rows of 40 with latents of 32 elements are no multiples of 16"
    assert paged_attention.unsupported_latents(pool, row_width=40, latent_width=32) == reason


def test_chosen_positions_are_attended_by_the_reference():
    queries, pool, places, knobs = arrays_of(SHAPES["blocks of a prompt"])
    chosen = places._replace(chosen_BQK=jnp.maximum(places.positions_BQ, 0)[..., None])
    found = paged_attention.attend_or_choose(queries, pool, chosen, **knobs, interpret=True)
    np.testing.assert_array_equal(found, reference.attend(queries, pool, chosen, **knobs))
