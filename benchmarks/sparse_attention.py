"""Native sparse attention by context: index, sparse and dense attention of one layer against the processor's bounds.

    python -m benchmarks.sparse_attention [--contexts 8192,16384,32768] [--tokens 1,8] [--level auto] [--repeats 5]

Index and attention have the heads of DeepSeek-V3.2 (64 of 128, 2,048 tokens chosen; 128 over latents of 512 + 64), then
of MiniMax-M3 (4 of 128, 16 blocks of 128 chosen; 64 of 128 with 4 KV heads). Other widths are tiny. One core runs it.
A bound is the larger of two times: of the products, at the rate of a large product by the same kernels, and of reading
the keys once, at the rate of reading memory. Rates are the better ones of before and after.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.markdown import markdown_table
from rayserve_moe.execution.native_library import register_native_kernels
from rayserve_moe.kernels.attention_config import AttentionConfig
from rayserve_moe.kernels.attention_layer import AttentionInputs, TokenBatch
from rayserve_moe.kernels.block_index import BlockIndexConfig
from rayserve_moe.kernels.cpu_native import calls, index_call
from rayserve_moe.kernels.cpu_native.layout import LAYOUTS
from rayserve_moe.kernels.latent_attention import LatentConfig
from rayserve_moe.kernels.reference.block_index import BlockChoice
from rayserve_moe.kernels.reference.layers import rotation_of
from rayserve_moe.kernels.token_index import IndexConfig

HIDDEN, QUERY_LATENT, LATENT, ROPE, NOPE, VALUE, HEADS = 64, 64, 512, 64, 32, 32, 128
INDEX_HEADS, INDEX_WIDTH, TOP_K, PAGE = 64, 128, 2048, 64
BLOCK_INDEX_HEADS, BLOCK_SIZE, NUM_BLOCKS, GROUPED_HEADS, KV_HEADS, HEAD = 4, 128, 16, 64, 4, 128
PRODUCT_ROWS, PRODUCT_DEPTH = 384, 1024
READ_BYTES = 1 << 28
HEADER = ("context", "tokens", "part", "ms", "bound, ms", "of the bound")
LATENT_SHAPES = {
    "q_a_LDR": (HIDDEN, QUERY_LATENT), "q_a_norm_LR": (QUERY_LATENT,), "kv_a_LDC": (HIDDEN, LATENT + ROPE),
    "kv_a_norm_LC": (LATENT,), "q_b_LRH": (QUERY_LATENT, HEADS * (NOPE + ROPE)), "k_b_LHC": (HEADS * NOPE, LATENT),
    "v_b_LHC": (HEADS * VALUE, LATENT), "o_LHD": (HEADS * VALUE, HIDDEN),
    "index_q_LRi": (QUERY_LATENT, INDEX_HEADS * INDEX_WIDTH), "index_k_LDd": (HIDDEN, INDEX_WIDTH),
    "index_k_norm_Ld": (INDEX_WIDTH,), "index_k_norm_bias_Ld": (INDEX_WIDTH,),
    "index_weights_LDA": (HIDDEN, INDEX_HEADS),
}  # fmt: skip
GROUPED_SHAPES = {
    "q_LDH": (HIDDEN, GROUPED_HEADS * HEAD), "k_LDG": (HIDDEN, KV_HEADS * HEAD), "v_LDG": (HIDDEN, KV_HEADS * HEAD),
    "o_LHD": (GROUPED_HEADS * HEAD, HIDDEN), "index_q_LDi": (HIDDEN, BLOCK_INDEX_HEADS * INDEX_WIDTH),
    "index_k_LDd": (HIDDEN, INDEX_WIDTH), "index_q_norm_Ld": (INDEX_WIDTH,), "index_k_norm_Ld": (INDEX_WIDTH,),
}  # fmt: skip


@dataclass(frozen=True)
class Rates:
    """The work of a core in a second."""

    flops: float
    """Products by the kernels, two for each pair of numbers."""
    read_bytes: float
    """Bytes read from memory."""

    def bound_s(self, flops: float, read_bytes: float) -> float:
        """Return the smallest time of this work."""
        return max(flops / self.flops, read_bytes / self.read_bytes)


class Part(NamedTuple):
    """A measured part of a layer, and its work."""

    context: int
    num_tokens: int
    name: str
    seconds: float
    flops: float
    read_bytes: float

    def row(self, rates: Rates) -> tuple[str, ...]:
        """Return the cells of the table."""
        bound_s = rates.bound_s(self.flops, self.read_bytes)
        figures = (f"{self.seconds * 1e3:.2f}", f"{bound_s * 1e3:.2f}", f"{self.seconds / bound_s:.1f}")
        return (f"{self.context:,}", str(self.num_tokens), self.name, *figures)


@dataclass(frozen=True)
class Layer:
    """A layer with an index: its kernels, and the work of a key."""

    names: tuple[str, str, str]
    """Names of the index, of sparse and of dense attention."""
    shapes: Mapping[str, tuple[int, ...]]
    """Weights by name."""
    row: tuple[int, ...]
    """Row of the pool of attention."""
    choose: Callable[..., tuple[jax.Array, jax.Array]]
    attend: Callable[..., tuple[jax.Array, jax.Array]]
    index_flops: int
    """Products of the index, two for each pair of numbers."""
    attention_flops: int
    """The same of attention."""


LAYERS = (
    Layer(
        ("token index", "gathered", "dense, latent"),
        LATENT_SHAPES,
        (1, LATENT + ROPE),
        partial(index_call.choose_layer_tokens, config=IndexConfig(INDEX_HEADS, TOP_K, 1e-6, 1e-6)),
        partial(calls.attend_latent_layer, config=LatentConfig(NOPE, 1e-6, 0.1)),
        2 * INDEX_HEADS * INDEX_WIDTH,
        2 * HEADS * (2 * LATENT + ROPE),
    ),
    Layer(
        ("block index", "blocks", "dense, grouped"),
        GROUPED_SHAPES,
        (KV_HEADS, 2 * HEAD),
        partial(
            index_call.choose_layer_blocks,
            config=BlockIndexConfig(BLOCK_INDEX_HEADS, BlockChoice(BLOCK_SIZE, NUM_BLOCKS), 1e-6),
        ),
        partial(calls.attend_layer, config=AttentionConfig(HEAD, 1e-6, block_size=BLOCK_SIZE)),
        2 * BLOCK_INDEX_HEADS * INDEX_WIDTH,
        4 * GROUPED_HEADS * HEAD,
    ),
)


def fastest_s(call: Callable[[], object], *, repeats: int) -> float:
    """Return the smallest time of a call, after two that are not counted."""
    times = []
    for _ in range(2 + repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return min(times[2:])


def measured_rates(*, repeats: int) -> Rates:
    """Measure the rates of one core."""
    left = jnp.ones((PRODUCT_ROWS, PRODUCT_DEPTH), jnp.bfloat16)
    right = LAYOUTS["packed"](jnp.ones((PRODUCT_DEPTH, PRODUCT_DEPTH), jnp.bfloat16))
    multiply, numbers = jax.jit(calls.product), np.ones(READ_BYTES // 8)
    product_s = fastest_s(lambda: multiply(left, right), repeats=repeats)
    read_s = fastest_s(numbers.max, repeats=repeats)
    return Rates(2 * PRODUCT_ROWS * PRODUCT_DEPTH**2 / product_s, READ_BYTES / read_s)


def weights_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, jax.Array]:
    """Draw the weights of one layer, in the layout of the kernels."""
    generator, found = np.random.default_rng(1), {}
    for name, shape in shapes.items():
        dtype = jnp.float32 if name == "index_weights_LDA" else jnp.bfloat16
        drawn = jnp.asarray(generator.standard_normal((1, *shape)) * 0.1, dtype)
        found[name] = LAYOUTS[calls.LAYOUT_OF.get(name, "")](drawn)
    return found


def batch_of(context: int, num_tokens: int) -> TokenBatch:
    """Return the last tokens of a sequence: a single token, or a block."""
    num_pages = context // PAGE
    pages = np.random.default_rng(1).permutation(np.arange(1, 1 + num_pages)).astype(np.int32)
    positions = np.arange(context - num_tokens, context, dtype=np.int32)
    slots = pages[positions // PAGE] * PAGE + positions % PAGE
    arrays = (jnp.asarray(array) for array in (np.zeros_like(slots), positions, slots, pages[None]))
    return TokenBatch(*arrays, num_singles=1 if num_tokens == 1 else 0)


def parts_of(layer: Layer, context: int, num_tokens: int, *, repeats: int) -> list[Part]:
    """Measure index, sparse and dense attention of the last tokens of a context."""
    generator = np.random.default_rng(context)
    weights, batch, num_pages = weights_of(layer.shapes), batch_of(context, num_tokens), 1 + context // PAGE
    pools = {
        name: jnp.asarray(generator.standard_normal((num_pages, PAGE, *row), np.float32), jnp.bfloat16)
        for name, row in {"keys": (1, INDEX_WIDTH), "rows": layer.row}.items()
    }
    hidden = jnp.asarray(generator.standard_normal((num_tokens, HIDDEN)), jnp.bfloat16)
    frequencies = (1e4 ** (-np.arange(0, ROPE, 2) / ROPE)).astype(np.float32)
    inputs = AttentionInputs(weights, batch, rotation_of(batch.positions_T, frequencies), jnp.int32(0))

    def run(pool: jax.Array, weights: dict[str, jax.Array], chosen: jax.Array | None, call: Callable[..., Any]) -> Any:
        return call(hidden, pool, inputs._replace(weights=weights, chosen_TK=chosen))

    compiled = jax.jit(run, donate_argnums=0, static_argnums=3)

    def run_on(name: str, call: Callable[..., Any], chosen: jax.Array | None = None) -> jax.Array:
        found, pools[name] = compiled(pools[name], weights, chosen, call)
        return found

    chosen, row_bytes, work = run_on("keys", layer.choose), 2 * math.prod(layer.row), layer.attention_flops * num_tokens
    index_work, index_bytes = layer.index_flops * context * num_tokens, 2 * INDEX_WIDTH * context
    index, sparse, dense = layer.names
    timed = {
        index: (lambda: run_on("keys", layer.choose), index_work, index_bytes),
        sparse: (lambda: run_on("rows", layer.attend, chosen), work * TOP_K, row_bytes * TOP_K),
        dense: (lambda: run_on("rows", layer.attend), work * context, row_bytes * context),
    }
    return [
        Part(context, num_tokens, name, fastest_s(call, repeats=repeats), flops, read)
        for name, (call, flops, read) in timed.items()
    ]


def main() -> None:
    """Print a table of all contexts and numbers of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default="8192,16384,32768")
    parser.add_argument("--tokens", default="1,8")
    parser.add_argument("--level", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    level = register_native_kernels(options.level)
    before = measured_rates(repeats=options.repeats)
    parts = [
        part
        for layer in LAYERS
        for context in map(int, options.contexts.split(","))
        for num_tokens in map(int, options.tokens.split(","))
        for part in parts_of(layer, context, num_tokens, repeats=options.repeats)
    ]
    after = measured_rates(repeats=options.repeats)
    rates = Rates(max(before.flops, after.flops), max(before.read_bytes, after.read_bytes))
    print(f"{level.name}, one core: {rates.flops / 1e9:,.0f} GFLOP/s, {rates.read_bytes / 1e9:.1f} GB/s\n")
    print(markdown_table(HEADER, [part.row(rates) for part in parts]))


if __name__ == "__main__":
    main()
