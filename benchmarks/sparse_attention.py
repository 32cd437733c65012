"""Native sparse attention by context: index, gathered and dense attention of one layer against the processor's bounds.

    python -m benchmarks.sparse_attention [--contexts 8192,16384,32768] [--tokens 1,8] [--level auto] [--repeats 5]

Index and attention have the heads of DeepSeek-V3.2 (64 of 128, 2,048 tokens chosen; 128 over latents of 512 + 64);
other widths are tiny. It runs on one core. A bound is the larger of two times: of the products, at the rate of a large
product by the same kernels, and of reading the keys once, at the rate of reading memory. Rates are the better ones of
before and after.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.markdown import markdown_table
from rayserve_moe.execution.native_library import register_native_kernels
from rayserve_moe.kernels.attention_layer import AttentionInputs, TokenBatch
from rayserve_moe.kernels.cpu_native import calls, index_call
from rayserve_moe.kernels.cpu_native.layout import LAYOUTS
from rayserve_moe.kernels.latent_attention import LatentConfig
from rayserve_moe.kernels.reference.layers import rotation_of
from rayserve_moe.kernels.token_index import IndexConfig

HIDDEN, QUERY_LATENT, LATENT, ROPE, NOPE, VALUE, HEADS = 64, 64, 512, 64, 32, 32, 128
INDEX_HEADS, INDEX_WIDTH, TOP_K, PAGE = 64, 128, 2048, 64
PRODUCT_ROWS, PRODUCT_DEPTH = 384, 1024
READ_BYTES = 1 << 28
HEADER = ("context", "tokens", "part", "ms", "bound, ms", "of the bound")


@dataclass(frozen=True)
class Rates:
    """What the processor does in a second."""

    flops: float
    """Products by the kernels, two for each pair of numbers."""
    read_bytes: float
    """Bytes read from memory."""

    def bound_s(self, flops: float, read_bytes: float) -> float:
        """Return the smallest time of this work."""
        return max(flops / self.flops, read_bytes / self.read_bytes)


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
    multiply = jax.jit(calls.product)
    product_s = fastest_s(lambda: multiply(left, right), repeats=repeats)
    numbers = np.ones(READ_BYTES // 8)
    return Rates(2 * PRODUCT_ROWS * PRODUCT_DEPTH**2 / product_s, READ_BYTES / fastest_s(numbers.max, repeats=repeats))


def weights_of(generator: np.random.Generator) -> dict[str, jax.Array]:
    """Draw the weights of one layer, in the layout of the kernels."""
    shapes = {
        "q_a_LDR": (HIDDEN, QUERY_LATENT), "q_a_norm_LR": (QUERY_LATENT,), "kv_a_LDC": (HIDDEN, LATENT + ROPE),
        "kv_a_norm_LC": (LATENT,), "q_b_LRH": (QUERY_LATENT, HEADS * (NOPE + ROPE)), "k_b_LHC": (HEADS * NOPE, LATENT),
        "v_b_LHC": (HEADS * VALUE, LATENT), "o_LHD": (HEADS * VALUE, HIDDEN),
        "index_q_LRi": (QUERY_LATENT, INDEX_HEADS * INDEX_WIDTH), "index_k_LDd": (HIDDEN, INDEX_WIDTH),
        "index_k_norm_Ld": (INDEX_WIDTH,), "index_k_norm_bias_Ld": (INDEX_WIDTH,),
        "index_weights_LDA": (HIDDEN, INDEX_HEADS),
    }  # fmt: skip
    found = {}
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


def parts_of(context: int, num_tokens: int, *, repeats: int) -> list[Part]:
    """Measure index, gathered and dense attention of the last tokens of a context."""
    generator = np.random.default_rng(context)
    weights, batch = weights_of(generator), batch_of(context, num_tokens)
    pages = 1 + context // PAGE
    latents, keys = (
        jnp.asarray(generator.standard_normal((pages, PAGE, 1, width), np.float32), jnp.bfloat16)
        for width in (LATENT + ROPE, INDEX_WIDTH)
    )
    hidden = jnp.asarray(generator.standard_normal((num_tokens, HIDDEN)), jnp.bfloat16)
    frequencies = (1e4 ** (-np.arange(0, ROPE, 2) / ROPE)).astype(np.float32)
    inputs = AttentionInputs(weights, batch, rotation_of(batch.positions_T, frequencies), jnp.int32(0))
    of_index, of_latents = IndexConfig(INDEX_HEADS, TOP_K, 1e-6, 1e-6), LatentConfig(NOPE, 1e-6, 0.1)

    def choose(keys: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return index_call.choose_layer_tokens(hidden, keys, inputs._replace(weights=weights), config=of_index)

    def attend(pool: jax.Array, weights: dict[str, jax.Array], chosen: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        of_layer = inputs._replace(weights=weights, chosen_TK=chosen)
        return calls.attend_latent_layer(hidden, pool, of_layer, config=of_latents)

    choose, attend = jax.jit(choose, donate_argnums=0), jax.jit(attend, donate_argnums=0)
    pools = {"keys": keys, "latents": latents}

    def run_index() -> jax.Array:
        chosen, pools["keys"] = choose(pools["keys"], weights)
        return chosen

    def run_attention(chosen: jax.Array | None) -> jax.Array:
        out, pools["latents"] = attend(pools["latents"], weights, chosen)
        return out

    chosen = run_index()
    of_key, width = 2 * HEADS * (2 * LATENT + ROPE), 2 * (LATENT + ROPE)
    parts = {
        "index": (run_index, 2 * INDEX_HEADS * INDEX_WIDTH * context * num_tokens, 2 * INDEX_WIDTH * context),
        "gathered": (lambda: run_attention(chosen), of_key * TOP_K * num_tokens, width * TOP_K),
        "dense": (lambda: run_attention(None), of_key * context * num_tokens, width * context),
    }
    return [
        Part(context, num_tokens, name, fastest_s(call, repeats=repeats), flops, read)
        for name, (call, flops, read) in parts.items()
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
        for context in map(int, options.contexts.split(","))
        for num_tokens in map(int, options.tokens.split(","))
        for part in parts_of(context, num_tokens, repeats=options.repeats)
    ]
    after = measured_rates(repeats=options.repeats)
    rates = Rates(max(before.flops, after.flops), max(before.read_bytes, after.read_bytes))
    print(f"{level.name}, one core: {rates.flops / 1e9:,.0f} GFLOP/s, {rates.read_bytes / 1e9:.1f} GB/s\n")
    print(markdown_table(HEADER, [part.row(rates) for part in parts]))


if __name__ == "__main__":
    main()
