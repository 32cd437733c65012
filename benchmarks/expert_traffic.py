"""Distinct ranks per token, bytes between devices and hottest ranks of placements, planned from rows and from counts.

    python -m benchmarks.expert_traffic [--tokens 4096] [--layers 8] [--loads-layers 1] [--out FILE.json]

Rows are those of the calculator, and of two random routers: a skewed one, and one whose tokens come in 16 topics.
Placements are planned from the first half of the rows and judged by the second half. The peers: DeepSeek's greedy
packing, which vLLM and sglang-jax place alike, with an even split, SGLang's static map, and sglang-jax's first replica;
and `peer_planners` after FlashLB and Swift, with an even split.

Bytes are rows of 2,048 bfloat16 out and back, without those that stay. As devices on two slices exchange them, a row
goes out for each rank and comes back for each expert; under the first planner of each group one goes out for each
expert. No device takes part: the slots are those that devices choose.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.calculator import ENGINE, PROBLEMS, SAMPLING
from benchmarks.conditions import RESULTS, load_before_start, machine_facts, note, save
from benchmarks.peer_planners import swaps, variance_aware, window_loads
from benchmarks.planner import MODELS, quality
from benchmarks.planner_loads import greedy_experts
from benchmarks.table import tables
from examples.calculator.accuracy import TASKS
from rayserve_moe import extract_routed_experts_from_meta_info
from rayserve_moe.balancing.coactivation import ServedGroup, loads_of, plan_from_rows
from rayserve_moe.balancing.planner import plan
from rayserve_moe.balancing.traffic import Batches, CostRates, Traffic, count_traffic, traffic_of
from rayserve_moe.checkpoints.model_path import TRAINED_PREFIX
from rayserve_moe.inprocess.engine import Engine

BATCHES = (8, 32, 128, 1024)
EXPERTS, TOP_K, WIDTH, STATE = 128, 8, 2048, 64
GROUPS, CALCULATOR_GROUP = ((8, 32), (32, 32)), (4, 4)
"""Ranks and redundant slots of the random routers, and of the calculator."""
SLICES = 2
"""Slices that the ranks are divided over: within a slice links decide little."""
ROW_BYTES = WIDTH * 2
"""A row of bfloat16."""
LINKS_FIRST = CostRates(slot_s=0.0, row_s=1e-9, ici_s=1e-6, dcn_s=1e-5)
"""Rates with which ranks per token decide wherever they differ."""
TIMED = (94, 128, 32, 32)
TIMED_REPEATS = 3


def topic_rows(num_tokens: int, *, layers: int, topics: int, spread: float, seed: int) -> np.ndarray:
    """Return rows of random linear routers for hidden states around one of `topics` centres: uint8 [tokens, layers, k].

    A `spread` of 1 is as wide as the centres are apart; without topics the states are normal and the router is skewed.
    """
    generator = np.random.default_rng(seed)
    rows = np.empty((num_tokens, layers, TOP_K), np.uint8)
    for layer in range(layers):
        router = generator.normal(size=(STATE, EXPERTS)) / np.sqrt(STATE)
        bias = generator.normal(0, 0.3 if topics else 0.7, EXPERTS)
        states = generator.normal(size=(num_tokens, STATE))
        if topics:
            odds = generator.lognormal(sigma=0.5, size=topics)
            centre = generator.normal(size=(topics, STATE))[generator.choice(topics, num_tokens, p=odds / odds.sum())]
            states = centre + spread * states
        scores = states @ router + bias
        rows[:, layer] = np.argsort(-scores, axis=1, kind="stable")[:, :TOP_K]
    return rows


def calculator_rows(num_tokens: int) -> tuple[np.ndarray, int]:
    """Return rows of the trained calculator on held-out problems in random order, and its number of experts."""
    prompts = [problem.prompt for problems in PROBLEMS.values() for problem in problems]
    order = np.random.default_rng(0).permutation(len(prompts))
    with Engine(TRAINED_PREFIX + "calculator", enable_return_routed_experts=True, **ENGINE) as engine:
        layout = engine.loop.card.routing
        answers = engine.generate(
            [prompts[place] for place in order], sampling_params=SAMPLING, return_routed_experts=True
        )
    raw = [np.asarray(extract_routed_experts_from_meta_info(answer)) for answer in answers]
    shaped = [each.reshape(-1, layout.num_hidden_layers, layout.top_k)[:, list(layout.layer_ids)] for each in raw]
    rows = np.concatenate(shaped)
    order = np.random.default_rng(1).permutation(len(rows))[:num_tokens]
    return rows[order].astype(np.uint8), layout.num_experts


def judged(rows: np.ndarray, *, experts: int, ranks: int, redundant: int, slices: int) -> Iterator[dict[str, Any]]:
    """Yield what every planner's placement costs at every batch."""
    half = len(rows) // 2
    first, later = rows[:half], rows[half:]
    load = loads_of(first, experts)
    sizes = {"ep_size": ranks, "num_redundant": redundant}
    by_counts, greedy = plan(load, **sizes), greedy_experts(load, **sizes)
    flash, swift = variance_aware(window_loads(first, experts), **sizes), swaps(load, **sizes)
    for batch in BATCHES:
        group, batches = ServedGroup(ranks, redundant, batch, slices), Batches(len(later), batch, ranks, slices)
        by_rows = plan_from_rows(first, group, num_experts=experts)
        links_first = plan_from_rows(first, group, num_experts=experts, rates=LINKS_FIRST)
        served = partial(traffic_of, rows=later, batch=batch, num_slices=slices)
        shared = served(by_counts, near=False)
        found = {
            "counts, shares, a row per expert": shared._replace(
                rows_out=shared.remote_rows, far_rows_out=shared.far_rows
            ),
            "counts, shares": shared,
            "greedy, even": _of_peer(greedy, later, batches=batches, choice=_even),
            "greedy, static map": _of_peer(greedy, later, batches=batches, choice=_static),
            "greedy, first": _of_peer(greedy, later, batches=batches, choice=_first),
            "FlashLB, even": _of_peer(flash, later, batches=batches, choice=_even),
            "Swift, even": _of_peer(swift, later, batches=batches, choice=_even),
            "counts": served(by_counts),
            "rows": served(by_rows),
            "rows, links first": served(links_first),
        }
        for name, traffic in found.items():
            mean_rows = batch * rows.shape[2] / ranks
            yield {"planner": name, "batch": batch, **_figures(traffic, batch=batch, mean_rows=mean_rows)}


def _figures(traffic: Traffic, *, batch: int, mean_rows: float) -> dict[str, float]:
    ranks = traffic.loads.shape[1]
    return {
        "distinct_ranks": float(traffic.distinct_ranks.mean()),
        "bytes_by_rank": float(traffic.remote_ranks.mean()) * 2 * ROW_BYTES,
        "bytes_by_expert": float(traffic.remote_rows.mean()) * 2 * ROW_BYTES,
        "bytes": float((traffic.rows_out + traffic.remote_rows).mean()) * ROW_BYTES,
        "bytes_between_slices": float((traffic.far_rows_out + traffic.far_rows).mean()) * ROW_BYTES,
        "hottest": float((traffic.loads.max(axis=1) / traffic.loads.mean(axis=1)).mean()),
        "hottest_of_batch": float(traffic.hottest_rows.mean() / mean_rows),
        "microseconds": 1e6 * float(traffic.seconds(CostRates(), batch=batch, num_ranks=ranks).mean()),
    }


def _of_peer(experts: np.ndarray, rows: np.ndarray, *, batches: Batches, choice: Callable[..., np.ndarray]) -> Traffic:
    """Count the traffic under a peer's placement [layers, ranks, slots], which may hold an expert twice on a rank."""
    slots_per_rank, sources = experts.shape[2], batches.ranks

    def slots_of(layer: int, ids: np.ndarray) -> np.ndarray:
        flat = experts[layer].reshape(-1)
        order = np.argsort(flat, kind="stable")
        counts = np.bincount(flat)
        begins = np.cumsum(counts) - counts
        replica = choice(
            ids, sources, counts=counts, ranks_of=lambda i: order[begins[ids] + i % counts[ids]] // slots_per_rank
        )
        return order[begins[ids] + replica % counts[ids]]

    return count_traffic(slots_of, rows, batches=batches, slots_per_rank=slots_per_rank)


def _even(ids: np.ndarray, sources: np.ndarray, *, counts: np.ndarray, ranks_of: Any) -> np.ndarray:
    """Take a replica at random, each as often."""
    del sources, ranks_of
    return np.random.default_rng(0).integers(1 << 30, size=ids.shape) % counts[ids]


def _first(ids: np.ndarray, sources: np.ndarray, *, counts: np.ndarray, ranks_of: Any) -> np.ndarray:
    """Take the first replica."""
    del sources, counts, ranks_of
    return np.zeros_like(ids)


def _static(ids: np.ndarray, sources: np.ndarray, *, counts: np.ndarray, ranks_of: Any) -> np.ndarray:
    """Take the own rank's replica; otherwise the one that the rank has drawn for the expert, each as often."""
    chosen = (sources[:, None] + ids * 7919) % counts[ids]
    for replica in range(int(counts.max())):
        is_own = (ranks_of(np.full_like(ids, replica)) == sources[:, None]) & (replica < counts[ids])
        chosen = np.where(is_own, replica, chosen)
    return chosen


def timed() -> dict[str, Any]:
    """Return seconds of a plan from rows for a large model, all layers."""
    layers, experts, ranks, redundant = TIMED
    rows = topic_rows(2048, layers=layers, topics=16, spread=0.7, seed=9)
    found = []
    for _ in range(TIMED_REPEATS):
        started = time.process_time()
        plan_from_rows(rows, ServedGroup(ranks, redundant, 32), num_experts=experts)
        found.append(time.process_time() - started)
    return {"shape": list(TIMED), "seconds": found}


def main() -> None:
    """Measure, write the result file, print its tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096, help="rows of each router, half of them to plan from")
    parser.add_argument("--layers", type=int, default=8, help="of the random routers")
    parser.add_argument("--loads-layers", type=int, default=1, help="of each of the 285 loads; 0: leave them out")
    parser.add_argument("--out", type=Path, default=RESULTS / "expert_traffic.json")
    arguments = parser.parse_args()
    load_before = load_before_start()
    sizes = {"num_tokens": arguments.tokens, "layers": arguments.layers}
    traces: dict[str, tuple[np.ndarray, int]] = {
        "calculator": calculator_rows(arguments.tokens),
        "skewed router": (topic_rows(**sizes, topics=0, spread=1.0, seed=1), EXPERTS),
        "correlated router": (topic_rows(**sizes, topics=16, spread=0.5, seed=3), EXPERTS),
    }
    cases = []
    for name, (rows, experts) in traces.items():
        groups = GROUPS if experts == EXPERTS else (CALCULATOR_GROUP,)
        for ranks, redundant in groups:
            found = list(judged(rows, experts=experts, ranks=ranks, redundant=redundant, slices=SLICES))
            cases.append({"trace": name, "ranks": ranks, "redundant": redundant, "slices": SLICES, "found": found})
            note(f"{name}, {ranks} ranks: done")
    measured: dict[str, Any] = {"tasks": len(TASKS), **sizes, "cases": cases, "plan": timed()}
    if arguments.loads_layers:
        measured["loads"] = quality(list(MODELS), layers=arguments.loads_layers)["groups"]
    result = {"facts": machine_facts(load_before), "expert_traffic": measured}
    save(result, arguments.out)
    print(tables(result))


if __name__ == "__main__":
    main()
