"""Synthetic loads of experts, and placements to compare with: one skew or one drift each, all from a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

TOKENS = 1 << 20  # tokens of a layer in one window
DRIFT_SIGMA, DRIFT_MEMORY, REGIME_STEPS = 0.7, 0.9, 7


def lognormal(generator: np.random.Generator, layers: int, experts: int) -> np.ndarray:
    """Return popularities spread evenly in the logarithm: most experts near the median, some several times as hot."""
    return np.exp(generator.normal(0, 1, (layers, experts)))


def zipf(generator: np.random.Generator, layers: int, experts: int) -> np.ndarray:
    """Return popularities where the i-th expert gets 1/i of the first, in an order of each layer's own."""
    ranked = 1 / np.arange(1, experts + 1) ** np.linspace(0.6, 1.2, layers)[:, None]
    return generator.permuted(ranked, axis=1)


def hot(generator: np.random.Generator, layers: int, experts: int) -> np.ndarray:
    """Return nearly even popularities, but for 3 % of the experts, which are 20 to 80 times as hot."""
    load = np.exp(generator.normal(0, 0.2, (layers, experts)))
    number = max(1, experts * 3 // 100)
    chosen = generator.permuted(np.broadcast_to(np.arange(experts), load.shape), axis=1)[:, :number]
    factors = generator.uniform(20, 80, (layers, number))
    np.put_along_axis(load, chosen, factors, axis=1)
    return load


def half_dead(generator: np.random.Generator, layers: int, experts: int) -> np.ndarray:
    """Return popularities where half of the experts get nothing, the others lognormal loads."""
    order = generator.permuted(np.broadcast_to(np.arange(experts), (layers, experts)), axis=1)
    return np.where(order < experts // 2, lognormal(generator, layers, experts), 0.0)


def drifting(generator: np.random.Generator, layers: int, experts: int) -> np.ndarray:
    """Return a window in the middle of a change of regime."""
    *_, last = (load for _, load in zip(range(REGIME_STEPS + 1), drift(generator, layers, experts), strict=False))
    return last


def drift(generator: np.random.Generator, layers: int, experts: int) -> Iterator[np.ndarray]:
    """Return loads window after window: log-popularities of an AR(1) process that starts anew every 7 windows."""
    state = generator.normal(0, 1, (layers, experts))
    step = 0
    while True:
        yield tokens_of(np.exp(DRIFT_SIGMA * state))
        step += 1
        memory = DRIFT_MEMORY if step % REGIME_STEPS else 0.0
        state = memory * state + np.sqrt(1 - memory**2) * generator.normal(0, 1, state.shape)


def tokens_of(popularity: np.ndarray) -> np.ndarray:
    """Return whole tokens per expert in proportion to its popularity, uint32 [layers, experts]."""
    return np.rint(popularity / popularity.sum(axis=1, keepdims=True) * TOKENS).astype(np.uint32)


SKEWS: dict[str, Callable[[np.random.Generator, int, int], np.ndarray]] = {
    "lognormal": lognormal,
    "zipf": zipf,
    "hot": hot,
    "half dead": half_dead,
    "drift": drifting,
}


def skewed(skew: str, *, layers: int, experts: int, seed: int = 0) -> np.ndarray:
    """Return tokens per expert of a skew, uint32 [layers, experts]."""
    generator = np.random.default_rng([seed, *skew.encode()])
    return tokens_of(SKEWS[skew](generator, layers, experts))


def greedy_experts(load: np.ndarray, *, ep_size: int, num_redundant: int) -> np.ndarray:
    """Replicate and pack greedily, layer by layer: int [layers, ranks, slots per rank].

    Each redundant slot goes to the expert with the greatest load per replica; then replicas, heaviest first, go to the
    least loaded rank that has a free slot, whether or not it holds the expert already.
    """
    num_layers, num_experts = load.shape
    slots_per_rank = (num_experts + num_redundant) // ep_size
    experts = np.empty((num_layers, ep_size, slots_per_rank), np.int64)
    for layer, of_layer in enumerate(load.astype(np.float64)):
        counts = np.ones(num_experts, np.int64)
        for _ in range(num_redundant):
            counts[(of_layer / counts).argmax()] += 1
        each = of_layer / counts
        rank_load, filled = np.zeros(ep_size), np.zeros(ep_size, np.int64)
        for expert in np.repeat(np.argsort(-each, kind="stable"), counts[np.argsort(-each, kind="stable")]):
            rank = np.where(filled < slots_per_rank, rank_load, np.inf).argmin()
            experts[layer, rank, filled[rank]] = expert
            rank_load[rank] += each[expert]
            filled[rank] += 1
    return experts
