"""Placements of experts: quality, moves and seconds of the planner on synthetic loads, beside a greedy baseline.

    python -m benchmarks.planner [--models 48x128,94x128,58x256] [--layers 16] [--windows 20] [--repeats 9] [--out FILE]

No devices take part. Quality and moves do not depend on the machine; times are of this process, on one core.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.conditions import RESULTS, note, save
from benchmarks.planner_loads import SKEWS, drift, greedy_experts, skewed
from benchmarks.sections import SECTIONS
from rayserve_moe.balancing.placement import ExpertPlacement
from rayserve_moe.balancing.planner import first_placement, lower_bound, plan

MODELS = ("48x128", "94x128", "58x256")
EP_SIZES, REDUNDANT = (8, 16, 32, 64, 128), (0, 16, 32, 64, 128)
README_LOAD = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
)
"""The weights of the example in the README of DeepSeek's EPLB: 2 layers of 12 experts, for 16 slots on 8 devices."""


class Shape(NamedTuple):
    """A model and how its experts are spread."""

    layers: int
    experts: int
    ep_size: int
    num_redundant: int


DRIFTS = {
    "30B ep8 R32": Shape(48, 128, 8, 32),
    "V3 ep32 R32": Shape(58, 256, 32, 32),
    "K2 ep64 R64": Shape(60, 384, 64, 64),
    "235B ep32 R32": Shape(94, 128, 32, 32),
}


def shapes_of(models: list[str], *, layers: int) -> Iterator[Shape]:
    """Return every model with every fitting number of ranks and redundant slots: 57 for the three models."""
    for model in models:
        num_layers, num_experts = map(int, model.split("x"))
        for ep_size in EP_SIZES:
            for num_redundant in REDUNDANT:
                if (num_experts + num_redundant) % ep_size == 0:
                    yield Shape(min(layers, num_layers), num_experts, ep_size, num_redundant)


def peaks(experts: np.ndarray, load: np.ndarray, shares: np.ndarray | None = None) -> np.ndarray:
    """Load of the hottest rank of each layer, for `experts` [layers, ranks, slots per rank]; None: equal shares."""
    flat = experts.reshape(len(load), -1)
    if shares is None:
        counts = np.array([np.bincount(of_layer, minlength=load.shape[1]) for of_layer in flat])
        shares = 1 / np.take_along_axis(counts, flat, axis=1)
    amounts = shares * np.take_along_axis(load.astype(np.float64), flat, axis=1)
    return amounts.reshape(experts.shape).sum(axis=2).max(axis=1)


def ranks_of(placement: ExpertPlacement) -> np.ndarray:
    """Return the experts of each rank: [layers, ranks, slots per rank]."""
    return placement.expert_of_slot.reshape(placement.num_layers, placement.ep_size, placement.slots_per_rank)


def num_duplicates(experts: np.ndarray) -> int:
    """Return replicas that lie on a rank which has another of the same expert."""
    ordered = np.sort(experts, axis=2)
    return int(np.count_nonzero(ordered[..., 1:] == ordered[..., :-1]))


def judged(shape: Shape, skew: str, *, seed: int) -> dict[str, Any]:
    """Plan one case in every way; peaks as parts of the bound, and of the mean rank load for what shares realise."""
    load = skewed(skew, layers=shape.layers, experts=shape.experts, seed=seed)
    sizes = {"ep_size": shape.ep_size, "num_redundant": shape.num_redundant}
    bound = lower_bound(load.astype(np.float64), **sizes)
    greedy, first, planned = greedy_experts(load, **sizes), first_placement(load, **sizes), plan(load, **sizes)
    with_shares = peaks(ranks_of(planned), load, planned.share_of_slot)
    return {
        "shape": shape,
        "skew": skew,
        "greedy": float(np.mean(peaks(greedy, load) / bound)),
        "first": float(np.mean(peaks(ranks_of(first), load) / bound)),
        "even": float(np.mean(peaks(ranks_of(planned), load) / bound)),
        "shares": float(np.mean(with_shares / bound)),
        "realised": [float(peak) for peak in with_shares / load.mean(axis=1) * shape.ep_size / shape.experts],
        "duplicates": {"greedy": num_duplicates(greedy), "planned": num_duplicates(ranks_of(planned))},
    }


def quality(models: list[str], *, layers: int) -> dict[str, Any]:
    """Return all cases by skew, without redundant slots, and together; and realised shares if R >= ranks < experts."""
    cases = []
    for number, shape in enumerate(shapes_of(models, layers=layers)):
        cases += [judged(shape, skew, seed=number) for skew in SKEWS]
        note(f"{shape}: {cases[-len(SKEWS)]['even']:.4f} of the bound")
    groups = {skew: [case for case in cases if case["skew"] == skew] for skew in SKEWS}
    groups |= {"R = 0": [case for case in cases if not case["shape"].num_redundant], "all": cases}
    realised = {
        skew: [case["realised"] for case in cases if case["skew"] == skew and _has_replicas(case["shape"])]
        for skew in SKEWS
    }
    return {
        "groups": {name: _summary(of_group) for name, of_group in groups.items()},
        "realised": {
            skew: {"cases": len(found), "mean": _mean(map(_mean, found)), "worst_layer": max(map(max, found))}
            for skew, found in realised.items()
            if found
        },
    }


def readme_example() -> dict[str, float]:
    """Return the greatest over the mean rank load, the mean of two layers, with equal and with planned shares."""
    placement = plan(README_LOAD, ep_size=8, num_redundant=4)
    mean = README_LOAD.sum(axis=1) / 8
    greedy = greedy_experts(README_LOAD, ep_size=8, num_redundant=4)
    return {
        "greedy": float(np.mean(peaks(greedy, README_LOAD) / mean)),
        "even": float(np.mean(peaks(ranks_of(placement), README_LOAD) / mean)),
        "shares": float(np.mean(peaks(ranks_of(placement), README_LOAD, placement.share_of_slot) / mean)),
    }


def followed(shape: Shape, *, windows: int) -> dict[str, Any]:
    """Plan for a drifting load window after window, each from the placement before; the first plan is not counted."""
    sizes = {"ep_size": shape.ep_size, "num_redundant": shape.num_redundant}
    placement, stale, after, even, moved, milliseconds = None, [], [], [], [], []
    for window, load in zip(range(windows), drift(np.random.default_rng(3), shape.layers, shape.experts), strict=False):
        before = placement
        started = time.process_time()
        placement = plan(load, **sizes, previous=before)
        milliseconds.append(1e3 * (time.process_time() - started))
        if before is not None:
            bound = lower_bound(load.astype(np.float64), **sizes)
            stale.append(_mean(peaks(ranks_of(before), load, before.share_of_slot) / bound))
            after.append(peaks(ranks_of(placement), load, placement.share_of_slot) / bound)
            even.append(_mean(peaks(ranks_of(placement), load) / bound))
            moved.append(_moved(before, placement))
        note(f"window {window} of {shape}: {milliseconds[-1]:.0f} ms, moved {moved[-1] if moved else 1:.4f}")
    worst, mean = float(np.max(after)), _mean(map(_mean, after))
    return {
        "stale": _mean(stale), "after": mean, "even": _mean(even), "worst_layer": worst,
        "moved": _mean(moved), "most_moved": max(moved), "ms": milliseconds[1:],
    }  # fmt: skip


def timed(shape: Shape, *, repeats: int) -> dict[str, Any]:
    """Return milliseconds of one call for all layers, of the fast pass and of the search, and what the pass leaves."""
    load = skewed("lognormal", layers=shape.layers, experts=shape.experts)
    sizes = {"ep_size": shape.ep_size, "num_redundant": shape.num_redundant}
    first = first_placement(load, **sizes)
    ratio = _mean(peaks(ranks_of(first), load) / lower_bound(load.astype(np.float64), **sizes))
    return {
        "ratio": ratio,
        "first_ms": _milliseconds(lambda: first_placement(load, **sizes), repeats),
        "plan_ms": _milliseconds(lambda: plan(load, **sizes), repeats),
        "greedy_ms": _milliseconds(lambda: greedy_experts(load, **sizes), 1),
    }


def _milliseconds(call: Callable[[], object], repeats: int) -> list[float]:
    found = []
    for _ in range(repeats):
        started = time.process_time()
        call()
        found.append(1e3 * (time.process_time() - started))
    return found


def _moved(before: ExpertPlacement, after: ExpertPlacement) -> float:
    """Return slots whose expert their rank did not hold, of all slots."""
    held = (ranks_of(before)[..., None, :] == ranks_of(after)[..., None]).any(axis=-1)
    return float(np.mean(~held))


def _has_replicas(shape: Shape) -> bool:
    return shape.ep_size <= shape.num_redundant and shape.ep_size < shape.experts


def _summary(cases: list[dict[str, Any]]) -> dict[str, Any]:
    ratios = {name: _mean(case[name] for case in cases) for name in ("greedy", "first", "even", "shares")}
    duplicates = {who: sum(case["duplicates"][who] for case in cases) for who in ("greedy", "planned")}
    return {"cases": len(cases), **ratios, "worst_even": max(case["even"] for case in cases), "duplicates": duplicates}


def _mean(values: Any) -> float:
    return float(statistics.fmean(values))


def main() -> None:
    """Measure, write the result file, print its tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated, layers x experts")
    parser.add_argument("--layers", type=int, default=16, help="at most, of each model, for quality")
    parser.add_argument("--windows", type=int, default=20, help="of the drifting loads")
    parser.add_argument("--repeats", type=int, default=9, help="of what is timed")
    parser.add_argument("--out", type=Path, default=RESULTS / "planner.json")
    arguments = parser.parse_args()
    measured = {
        "load_before": round(os.getloadavg()[0], 2),
        "seconds": {name: timed(shape, repeats=arguments.repeats) for name, shape in DRIFTS.items()},
        "drift": {name: followed(shape, windows=arguments.windows) for name, shape in DRIFTS.items()},
        "readme": readme_example(),
        "quality": quality(arguments.models.split(","), layers=arguments.layers),
    }
    save({"planner": measured}, arguments.out)
    print(SECTIONS["planner"](measured))


if __name__ == "__main__":
    main()
