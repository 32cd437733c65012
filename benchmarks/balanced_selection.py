"""Balanced expert selection: its time beside the sequential definition in numpy, and what its limits buy and cost.

    python -m benchmarks.balanced_selection [--repeats 9] [--draws 5] [--out FILE.json]

512 tokens, 256 experts, top 8, 384 slots, of an expert 16 at most. Popularities fall with a power of the expert's place
in their order. Rank loads are those of 32 ranks under a placement that was planned for the same popularities.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.conditions import RESULTS, load_before_start, note, num_cores, save
from benchmarks.sections import SECTIONS
from benchmarks.selection_table import MODES
from rayserve_moe.balancing.placement import ExpertPlacement
from rayserve_moe.balancing.planner import plan
from rayserve_moe.balancing.planning import imbalance
from rayserve_moe.experts.balanced_layer import (
    balanced_expert_selection,
    capacity_of,
    order_of_table,
    spread_over_replicas,
)
from rayserve_moe.experts.config import ExpertConfig
from rayserve_moe.experts.router_spec import RouterSpec
from rayserve_moe.experts.slot_mapping import choose_slots, placement_arrays
from rayserve_moe.kernels.table import CPU
from rayserve_moe.parallel.mesh import plan_for
from tests.support.experts.balanced_reference import balanced_oracle, oracle_capacity, oracle_slots, ranked

TOKENS, EXPERTS, TOP_K, SLOTS, MOST, RANKS = 512, 256, 8, 384, 16, 32
SKEWS = {"even": 0.0, "zipf 1": 1.0, "zipf 3": 3.0}
TIMED_FACTORS, FACTORS = (1.0, 1.25, 2.0), (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
DRAWN_SKEW = "zipf 1"
SIZES = {"k": TOP_K, "num_slots": SLOTS}


def draw_scores(skew: float, generator: np.random.Generator) -> np.ndarray:
    """Return scores [tokens, experts] whose top 1 falls on expert i in proportion to (i + 1) ** -skew."""
    popularity = -skew * np.log(np.arange(1, EXPERTS + 1))
    return (generator.gumbel(size=(TOKENS, EXPERTS)) + popularity).astype(np.float32)


def replicated_table() -> np.ndarray:
    """Return slots of each expert [experts, 16]: one for each, and 4 more for each of the 32 most popular ones."""
    table = np.full((EXPERTS, MOST), -1, np.int32)
    table[:, 0] = np.arange(EXPERTS)
    table[: (SLOTS - EXPERTS) // 4, 1:5] = np.arange(EXPERTS, SLOTS).reshape(-1, 4)
    return table


def timed(skew: float, factor: float, *, repeats: int) -> dict[str, Any]:
    """Return milliseconds of neighbouring runs of the definition and of the compiled selection, which must agree."""
    select = jax.jit(partial(balanced_expert_selection, **SIZES))
    scores, table = draw_scores(skew, np.random.default_rng(0)), replicated_table()
    arguments = jax.device_put((scores, table, np.float32(factor)))
    found: dict[str, Any] = {"oracle_ms": [], "device_ms": []}
    slots = jax.block_until_ready(select(*arguments))[0]
    for _ in range(repeats):
        found["oracle_ms"].append(_milliseconds(lambda: _sequentially(scores, table, factor)))
        found["device_ms"].append(min(_milliseconds(lambda: jax.block_until_ready(select(*arguments))) for _ in "123"))
    expected = balanced_oracle(scores, table, factor, **SIZES)
    assert (np.asarray(slots) == expected.slots).all(), "the selection is not what is defined"
    return {**found, "kept_share": float(expected.kept_share), "unfilled": int((expected.slots < 0).sum())}


def balance(skew: float, *, draws: int) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Return hottest over mean rank load and share of assignments kept, of every draw, by mode and factor."""
    placement = planned(skew)
    table = priorities(placement)
    device_index = np.arange(TOKENS, dtype=np.int32) * RANKS // TOKENS
    select = jax.jit(partial(balanced_expert_selection, device_index=device_index, **SIZES))
    by_capacity = jax.jit(partial(_slots_by_capacity, table, device_index))
    lowest = np.array([np.flatnonzero(placement.expert_of_slot[0] == expert)[0] for expert in range(EXPERTS)])
    by_shares = jax.jit(partial(_slots_by_shares, placement))
    modes: dict[str, dict[str, list[dict[str, float]]]] = {}
    for seed in range(draws):
        scores = draw_scores(skew, np.random.default_rng([seed, 1]))
        ids = np.argsort(-scores, axis=1, kind="stable")[:, :TOP_K]
        shares = np.asarray(by_shares(ids))
        for factor in FACTORS:
            slots, _, kept = (np.asarray(array) for array in select(scores, table, np.float32(factor)))
            capacity = np.asarray(by_capacity(ids, np.float32(factor)))
            of_modes = dict(
                zip(MODES, ((lowest[ids], 1.0), (shares, 1.0), (capacity, 1.0), (slots, float(kept))), strict=True)
            )
            for mode, (chosen, share) in of_modes.items():
                point = {
                    "imbalance": slot_imbalance(chosen),
                    "kept_share": share,
                    "unfilled": float((chosen < 0).mean()),
                }
                modes.setdefault(mode, {}).setdefault(str(factor), []).append(point)
    return modes


def planned(skew: float) -> ExpertPlacement:
    """Return a placement of 384 slots on 32 ranks for the popularities of a skew."""
    load = np.zeros(EXPERTS)
    for seed in range(20):
        scores = draw_scores(skew, np.random.default_rng([seed, 0]))
        load += np.bincount(np.argsort(-scores, axis=1)[:, :TOP_K].reshape(-1), minlength=EXPERTS)
    return plan(load[None], ep_size=RANKS, num_redundant=SLOTS - EXPERTS)


def priorities(placement: ExpertPlacement) -> np.ndarray:
    """Return slots of each expert for each rank [ranks, experts, slots]: its own first, then by number."""
    held, per_rank = placement.expert_of_slot[0], placement.slots_per_rank
    most = int(np.bincount(held).max())
    table = np.full((RANKS, EXPERTS, most), -1, np.int32)
    for expert in range(EXPERTS):
        slots = np.flatnonzero(held == expert)
        for rank in range(RANKS):
            table[rank, expert, : len(slots)] = slots[np.argsort(slots // per_rank != rank, kind="stable")]
    return table


def slot_imbalance(slots: np.ndarray) -> float:
    """Return imbalance of the ranks that the chosen slots lie on."""
    loads = np.bincount(slots[slots >= 0] // (SLOTS // RANKS), minlength=RANKS)
    return float(imbalance(loads[None])[0])


def _sequentially(scores: np.ndarray, table: np.ndarray, factor: float) -> np.ndarray:
    """Compute the definition without its weights and shares: sort, then the loop."""
    capacity = oracle_capacity(factor, TOKENS, **SIZES)
    return oracle_slots(ranked(scores), [table] * TOKENS, capacity=capacity, **SIZES)[0]


def _slots_by_shares(placement: ExpertPlacement, ids: jax.Array) -> jax.Array:
    """Split what each rank dispatches by shares."""
    router, plan = RouterSpec(EXPERTS, TOP_K, True), plan_for(jax.devices()[:1])
    config = ExpertConfig(router, CPU, plan, num_redundant=SLOTS - EXPERTS)
    maps, valid = placement_arrays(placement), jax.numpy.ones(TOKENS // RANKS, bool)

    def choose(ids_TK: jax.Array, rank: jax.Array) -> jax.Array:
        return choose_slots(ids_TK, valid, maps, layer=jax.numpy.int32(0), rank=rank, config=config)

    by_rank = ids.astype(jax.numpy.int32).reshape(RANKS, -1, TOP_K)
    return jax.vmap(choose)(by_rank, jax.numpy.arange(RANKS)).reshape(TOKENS, TOP_K)


def _slots_by_capacity(table: np.ndarray, device_index: np.ndarray, ids: jax.Array, factor: jax.Array) -> jax.Array:
    valid = jax.numpy.ones(TOKENS, bool)
    order = order_of_table(jax.numpy.asarray(table), device_index, num_experts=EXPERTS, num_slots=SLOTS)
    capacity = capacity_of(factor, valid, **SIZES)
    return spread_over_replicas(ids.T.astype(jax.numpy.int32), valid, order, capacity=capacity)[0].T


def _milliseconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - started)


def main() -> None:
    """Measure, write the result file, print its tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9, help="of what is timed")
    parser.add_argument("--draws", type=int, default=5, help="of scores, for the balance")
    parser.add_argument("--out", type=Path, default=RESULTS / "balanced_selection.json")
    arguments = parser.parse_args()
    load_before, times = load_before_start(), {}
    for skew, exponent in SKEWS.items():
        times[skew] = {str(f): timed(exponent, f, repeats=arguments.repeats) for f in TIMED_FACTORS}
        note(f"{skew}: timed")
    measured = {
        "load_before": round(load_before, 2),
        "cores": num_cores(),
        "times": times,
        "drawn_skew": DRAWN_SKEW,
        "balance": {skew: balance(exponent, draws=arguments.draws) for skew, exponent in SKEWS.items() if exponent},
    }
    save({"balanced_selection": measured}, arguments.out)
    print(SECTIONS["balanced_selection"](measured))


if __name__ == "__main__":
    main()
