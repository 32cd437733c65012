"""How fast decode steps read experts: the native expert kernel over all layers, beside the machine's read bandwidth.

    python -m benchmarks.peers.expert_reading [--size mid] [--repeats 7] [--int8] [--out FILE.json]

Every step of a run picks other experts, so that what it reads lies in no cache; runs and reading take turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.conditions import RESULTS, load_before_start, machine_facts, note, save
from benchmarks.peers.bandwidth import BF16_BYTES, read_bytes_per_s
from benchmarks.peers.tables import expert_reading as as_table
from rayserve_moe.checkpoints.synthetic import PRESETS, SyntheticConfig
from rayserve_moe.execution.native_library import register_native_kernels
from rayserve_moe.kernels.cpu_native.calls import expert_sums
from rayserve_moe.kernels.reference.expert_products import ExpertWeights, LayerExperts, ProductConfig

STREAMS = (1, 2, 4, 8, 16)
STEPS = 20

# T tokens   K experts per token   L layers   E experts   X = L * E   D model width   F expert width   N steps


def expert_weights(config: SyntheticConfig, *, in_int8: bool = False) -> ExpertWeights:
    """Return normal weights of every expert of every layer, or any integers with one scale.

    The order of numbers in packed weights does not matter here.
    """
    num_experts = config.num_hidden_layers * config.num_experts
    width, inner = config.hidden_size, config.moe_intermediate_size
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(num_experts, width, inner)] * 2 + [(num_experts, inner, width)]
    if in_int8:
        integers = [jax.random.randint(key, each, -127, 128, jnp.int8) for key, each in zip(keys, shapes, strict=True)]
        scales = [jnp.full((num_experts, 1, shape[2]), 0.05 / 73, jnp.float32) for shape in shapes]
        return ExpertWeights(*integers, None, None, None, *scales)
    drawn = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))
    return ExpertWeights(*(0.05 * array for array in drawn))


def draw_picks(config: SyntheticConfig, num_streams: int) -> np.ndarray:
    """Return different experts of each token, evenly at random: [N, L, T, K]."""
    generator = np.random.default_rng(num_streams)
    scores = generator.random((STEPS, config.num_hidden_layers, num_streams, config.num_experts))
    return np.argsort(scores)[..., : config.num_experts_per_tok].astype(np.int32)


def bytes_read(config: SyntheticConfig, picks_NLTK: np.ndarray, *, itemsize: int = BF16_BYTES) -> int:
    """Return weights of the experts that are picked at all, layer by layer and step by step."""
    touched = sum(len(np.unique(layer)) for step in picks_NLTK for layer in step)
    return touched * 3 * config.hidden_size * config.moe_intermediate_size * itemsize


def steps_over(weights: ExpertWeights, config: SyntheticConfig) -> Callable[..., jax.Array]:
    """Run all steps, one after the other, each through the experts of all layers."""

    @jax.jit
    def run(weights: ExpertWeights, picks_NLTK: jax.Array, rows_TD: jax.Array) -> jax.Array:
        gates_TK = jnp.full(picks_NLTK.shape[2:], 1 / config.num_experts_per_tok, jnp.float32)
        layers = jnp.arange(config.num_hidden_layers)
        product = ProductConfig(config.num_experts, mean_rows=1.0)

        def through_layer(rows_TD: jax.Array, of_layer: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            layer, picks_TK = of_layer
            experts = LayerExperts(weights, layer * config.num_experts, product)
            sums_TD = expert_sums(rows_TD, picks_TK, gates_TK, experts)
            return (sums_TD / (1e-6 + jnp.std(sums_TD, axis=1, keepdims=True))).astype(jnp.bfloat16), None

        def step(rows_TD: jax.Array, picks_LTK: jax.Array) -> tuple[jax.Array, None]:
            return jax.lax.scan(through_layer, rows_TD, (layers, picks_LTK))

        return jax.lax.scan(step, rows_TD, picks_NLTK)[0]

    return partial(run, weights)


def measure(size: str, *, repeats: int, in_int8: bool = False) -> dict[str, Any]:
    """Return bytes and seconds of every number of streams, and the bandwidth measured before each round of them."""
    register_native_kernels()
    config = PRESETS[size]
    run = steps_over(expert_weights(config, in_int8=in_int8), config)
    itemsize = 1 if in_int8 else BF16_BYTES
    picks = {count: draw_picks(config, count) for count in STREAMS}
    rows = {count: jax.random.normal(jax.random.key(1), (count, config.hidden_size), jnp.bfloat16) for count in STREAMS}
    for count in STREAMS:
        assert np.isfinite(np.asarray(run(picks[count], rows[count]), np.float32)).all()
    found: dict[str, Any] = {
        str(count): {"bytes": bytes_read(config, picks[count], itemsize=itemsize), "seconds": []} for count in STREAMS
    }
    bandwidth = []
    for i in range(repeats):
        note(f"round {i + 1} of {repeats}")
        bandwidth.append(read_bytes_per_s())
        for count in STREAMS:
            started = time.perf_counter()
            run(picks[count], rows[count]).block_until_ready()
            found[str(count)]["seconds"].append(time.perf_counter() - started)
    return {"streams": found, "read_bytes_per_s": bandwidth, "steps": STEPS}


def main() -> None:
    """Measure, print the table, write the result file."""
    load_before = load_before_start()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=["small", "mid"], default="mid")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--int8", action="store_true", help="experts in int8, with scales")
    parser.add_argument("--out", type=Path, default=RESULTS / "expert_reading.json")
    chosen = parser.parse_args()
    measured = measure(chosen.size, repeats=chosen.repeats, in_int8=chosen.int8)
    measured |= {
        "in_int8": chosen.int8,
        "size": chosen.size,
        "repeats": chosen.repeats,
        "machine": machine_facts(load_before),
    }
    print(as_table(measured))
    save({"expert_reading": measured}, chosen.out)


if __name__ == "__main__":
    main()
