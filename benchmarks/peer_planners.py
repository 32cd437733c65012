"""Planners of peers to compare with, written from descriptions of their algorithms; nothing of their code is here.

`variance_aware` follows FlashLB of vLLM-Ascend: a beam search over the replicas that four intervals of heat get, and a
packing by mean load plus a multiple of its deviation over windows, by covariance, without two replicas on a rank. Its
relabelling of ranks, which saves moves, is left out: it changes neither loads nor ranks per token.

`swaps` follows Swift of vLLM-Ascend: experts stay on their ranks, replicas are chosen anew, then the hottest rank swaps
replicas with others, at most 100 times and once for each pair of ranks, for a gain of at least 1 % of the mean. A layer
keeps its placement unless the peak falls by 5 %. It is called until nothing changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

WINDOWS, DEVIATIONS = 64, 1.0
"""Maximum number of windows, and deviations that are added to a mean load."""
INTERVALS, BEAM, CHANGES = 4, 8, (0, -1, 1, -2, 2)
"""Intervals of heat, budgets that are kept, and changes of an interval's budget that are tried."""
MAX_SWAPS, MIN_GAIN, MIN_DROP, MAX_CALLS = 100, 0.01, 0.05, 8


def window_loads(rows: np.ndarray, num_experts: int) -> np.ndarray:
    """Count the tokens of each expert by window: `rows` [tokens, layers, k] to float64 [layers, windows, experts]."""
    windows = np.array_split(rows, min(WINDOWS, max(1, len(rows) // 16)))
    counted = [
        [np.bincount(window[:, layer].reshape(-1), minlength=num_experts) for window in windows]
        for layer in range(rows.shape[1])
    ]
    return np.array(counted, np.float64)


def variance_aware(windows: np.ndarray, *, ep_size: int, num_redundant: int) -> np.ndarray:
    """Place by `windows` [layers, windows, experts]: int [layers, ranks, slots per rank]."""
    return np.stack([_variance_aware_layer(layer, ep_size, num_redundant) for layer in windows])


def _variance_aware_layer(windows: np.ndarray, ep_size: int, num_redundant: int) -> np.ndarray:
    mean = windows.mean(axis=0)
    covariance = np.atleast_2d(np.cov(windows, rowvar=False)) if len(windows) > 1 else np.zeros((len(mean),) * 2)
    by_heat = np.array_split(np.argsort(-mean, kind="stable"), INTERVALS)
    whole = _replicated(mean, np.arange(len(mean)), num_redundant, ep_size=ep_size)
    beam: list[tuple[int, ...]] = [tuple(int((whole[part] - 1).sum()) for part in by_heat)]
    packed = {beam[0]: _packed(mean, covariance, whole, ep_size=ep_size)}
    for depth in range(INTERVALS - 1):
        for budget in tuple(beam):
            for change in CHANGES:
                tried = _changed(budget, depth, change)
                most = [len(part) * (ep_size - 1) for part in by_heat]
                fits = all(0 <= number <= limit for number, limit in zip(tried, most, strict=True))
                if fits and tried not in packed:
                    counts = _counts_of(mean, by_heat, tried, ep_size=ep_size)
                    packed[tried] = _packed(mean, covariance, counts, ep_size=ep_size)
        beam = sorted(packed, key=lambda budget: packed[budget][0])[:BEAM]
    return packed[beam[0]][1]


def _changed(budget: tuple[int, ...], depth: int, change: int) -> tuple[int, ...]:
    """Return a budget with replicas moved between an interval and the following one."""
    return (*budget[:depth], budget[depth] + change, budget[depth + 1] - change, *budget[depth + 2 :])


def _counts_of(mean: np.ndarray, by_heat: Sequence[np.ndarray], budget: Sequence[int], *, ep_size: int) -> np.ndarray:
    counts = np.ones(len(mean), np.int64)
    for part, number in zip(by_heat, budget, strict=True):
        counts[part] = _replicated(mean, part, number, ep_size=ep_size)[part]
    return counts


def _replicated(mean: np.ndarray, experts: np.ndarray, number: int, *, ep_size: int) -> np.ndarray:
    """Count the replicas of all experts if `number` go to `experts`, each to the greatest load per replica."""
    counts = np.ones(len(mean), np.int64)
    for _ in range(number):
        per_replica = np.where(counts[experts] < ep_size, mean[experts] / counts[experts], -1.0)
        counts[experts[per_replica.argmax()]] += 1
    return counts


def _packed(mean: np.ndarray, covariance: np.ndarray, counts: np.ndarray, *, ep_size: int) -> tuple[float, np.ndarray]:
    """Pack replicas, heaviest first; return the maximum of mean plus deviation, and the experts [ranks, slots]."""
    slots_per_rank = int(counts.sum()) // ep_size
    each, order = mean / counts, np.argsort(-mean / counts, kind="stable")
    experts = np.full((ep_size, slots_per_rank), -1, np.int64)
    filled, load, variance = np.zeros(ep_size, np.int64), np.zeros(ep_size), np.zeros(ep_size)
    shared = np.zeros((ep_size, len(mean)))
    for expert in np.repeat(order, counts[order]):
        added = covariance[expert, expert] / counts[expert] ** 2 + 2 * shared[:, expert] / counts[expert]
        risk = load + each[expert] + DEVIATIONS * np.sqrt(np.maximum(variance + added, 0))
        is_free = filled < slots_per_rank
        alone = is_free & ~(experts == expert).any(axis=1)
        rank = int(np.where(alone if alone.any() else is_free, risk, np.inf).argmin())
        experts[rank, filled[rank]] = expert
        filled[rank] += 1
        load[rank] += each[expert]
        variance[rank] += added[rank]
        shared[rank] += covariance[expert] / counts[expert]
    peak = float((load + DEVIATIONS * np.sqrt(np.maximum(variance, 0))).max())
    return peak, _without_doubles(experts, each)


def _without_doubles(experts: np.ndarray, each: np.ndarray) -> np.ndarray:
    """Exchange the second replica of an expert on a rank for the nearest load of a rank that lacks it."""
    experts = experts.copy()
    for rank, held in enumerate(experts):
        for place in range(len(held)):
            if held[place] not in held[:place]:
                continue
            lacks = ~(experts == held[place]).any(axis=1)[:, None] & ~np.isin(experts, held)
            if not lacks.any():
                continue
            distance = np.where(lacks, abs(each[experts] - each[held[place]]), np.inf)
            other = np.unravel_index(distance.argmin(), lacks.shape)
            experts[rank, place], experts[other] = experts[other], experts[rank, place]
    return experts


def swaps(load: np.ndarray, *, ep_size: int, num_redundant: int) -> np.ndarray:
    """Place by `load` [layers, experts], from experts in their own order: int [layers, ranks, slots per rank]."""
    num_experts = load.shape[1]
    slots_per_rank = (num_experts + num_redundant) // ep_size
    start = (np.arange(ep_size * slots_per_rank) % num_experts).reshape(ep_size, slots_per_rank)
    found = []
    for of_layer in load.astype(np.float64):
        experts = start.copy()
        for _ in range(MAX_CALLS):
            changed = _swapped(_with_replicas(experts, of_layer), of_layer)
            if _rank_loads(changed, of_layer).max() > (1 - MIN_DROP) * _rank_loads(experts, of_layer).max():
                break
            experts = changed
        found.append(experts)
    return np.stack(found)


def _with_replicas(experts: np.ndarray, load: np.ndarray) -> np.ndarray:
    """Return the experts [ranks, slots] with the first slot of each expert kept and the others filled anew."""
    flat = experts.reshape(-1)
    kept = np.full(flat.shape, -1)
    _, first = np.unique(flat, return_index=True)
    kept[first] = flat[first]
    kept = kept.reshape(experts.shape)
    counts = _replicated(load, np.arange(len(load)), int((kept < 0).sum()), ep_size=len(experts))
    each = load / counts
    spare = np.repeat(np.arange(len(load)), counts - 1)
    for expert in spare[np.argsort(-each[spare], kind="stable")]:
        loads = np.where(kept >= 0, each[kept], 0).sum(axis=1)
        is_free = (kept < 0).any(axis=1)
        alone = is_free & ~(kept == expert).any(axis=1)
        rank = int(np.where(alone if alone.any() else is_free, loads, np.inf).argmin())
        kept[rank, int(np.flatnonzero(kept[rank] < 0)[0])] = expert
    return _without_doubles(kept, each)


def _rank_loads(experts: np.ndarray, load: np.ndarray) -> np.ndarray:
    return (load / np.maximum(np.bincount(experts.reshape(-1), minlength=len(load)), 1))[experts].sum(axis=1)


def _swapped(experts: np.ndarray, load: np.ndarray) -> np.ndarray:
    """Return the experts after swaps of the hottest rank with other ranks."""
    experts, met = experts.copy(), set()
    each = load / np.bincount(experts.reshape(-1), minlength=len(load))
    for _ in range(MAX_SWAPS):
        ranks = each[experts].sum(axis=1)
        hottest = int(ranks.argmax())
        swap = _best_swap(experts, each, ranks, hottest=hottest, met=met)
        if swap is None:
            break
        i, other, j = swap
        experts[hottest, i], experts[other, j] = experts[other, j], experts[hottest, i]
        met.add(frozenset((hottest, other)))
    return experts


def _best_swap(
    experts: np.ndarray, each: np.ndarray, ranks: np.ndarray, *, hottest: int, met: set[frozenset[int]]
) -> tuple[int, int, int] | None:
    """Return the slot of the hottest rank, the other rank and its slot; None without a swap that gains enough."""
    best, found = ranks[hottest] - MIN_GAIN * ranks.mean(), None
    for other in np.argsort(ranks, kind="stable").tolist():
        if other == hottest or frozenset((hottest, other)) in met:
            continue
        given = each[experts[hottest]][:, None] - each[experts[other]]
        after = np.maximum(ranks[hottest] - given, ranks[other] + given)
        after[np.isin(experts[hottest], experts[other])] = np.inf
        after[:, np.isin(experts[other], experts[hottest])] = np.inf
        place = int(after.argmin())
        if after.reshape(-1)[place] < best:
            best, found = after.reshape(-1)[place], (*divmod(place, after.shape[1]),)
            found = found[0], other, found[1]
    return found
