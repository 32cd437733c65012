"""The choice of sizes is the best there is, by the stated costs, and holds every step."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.execution.programs.buckets import (
    CPU,
    ROUND_BITS,
    SMALL_MODEL,
    TPUS,
    Seconds,
    StepCost,
    choose_sizes,
    round_sizes,
)

LARGEST = 9


@st.composite
def costs(draw: st.DrawFn) -> Seconds:
    """Seconds that grow with what is computed and with the size, as steps do: now and then not at all."""
    per_real = np.cumsum(draw(st.lists(st.integers(0, 5), min_size=LARGEST + 1, max_size=LARGEST + 1)))
    per_size = np.cumsum(draw(st.lists(st.integers(0, 5), min_size=LARGEST + 1, max_size=LARGEST + 1))) + 1
    return lambda real, size: (per_real[real] + per_size[size]).astype(float)


def total_cost(sizes: tuple[int, ...], seconds: Seconds, *, compile_s: float, horizon_s: float, largest: int) -> float:
    """What `choose_sizes` minimises, written down once more: in words, one number of items after the other."""
    chances = {n: np.log((n + 1) / n) / np.log(largest + 1) for n in range(1, largest + 1)}
    assert sum(chances.values()) == pytest.approx(1)

    def at(real: int, size: int) -> float:
        return float(seconds(np.asarray(real), np.asarray(size)))

    num_steps = horizon_s / sum(chance * at(n, n) for n, chance in chances.items())
    padding_s = sum(
        num_steps * chance * (at(n, min(s for s in sizes if s >= n)) - at(n, n)) for n, chance in chances.items()
    )
    return padding_s + compile_s * len(sizes)


@given(costs(), st.floats(0, 30), st.integers(1, LARGEST), st.sets(st.integers(1, LARGEST)))
def test_no_other_sizes_cost_less(seconds: Seconds, compile_s: float, largest: int, candidates: set[int]):
    terms = {"compile_s": compile_s, "horizon_s": 20.0, "largest": largest}
    allowed = [size for size in candidates if size < largest]
    chosen = choose_sizes(
        largest, seconds=seconds, compile_s=compile_s, horizon_s=20.0, candidates=sorted(candidates | {largest})
    )
    every_choice = (
        (*some, largest) for count in range(len(allowed) + 1) for some in combinations(sorted(allowed), count)
    )
    best = min(total_cost(sizes, seconds, **terms) for sizes in every_choice)
    assert total_cost(chosen, seconds, **terms) == pytest.approx(best)


@given(costs(), st.lists(st.integers(0, 40), min_size=2, max_size=5))
def test_dearer_compiling_never_gives_more_sizes(seconds: Seconds, prices: list[int]):
    counts = [len(choose_sizes(LARGEST, seconds=seconds, compile_s=price, horizon_s=100.0)) for price in sorted(prices)]
    assert counts == sorted(counts, reverse=True)


@given(costs(), st.lists(st.integers(1, 1000), min_size=2, max_size=5))
def test_longer_serving_never_gives_fewer_sizes(seconds: Seconds, horizons: list[int]):
    counts = [
        len(choose_sizes(LARGEST, seconds=seconds, compile_s=5.0, horizon_s=horizon)) for horizon in sorted(horizons)
    ]
    assert counts == sorted(counts)


def test_free_compiling_pads_to_the_next_candidate_and_free_padding_takes_one_size():
    def by_size(real: np.ndarray, size: np.ndarray) -> np.ndarray:
        return 1.0 * size + 0 * real

    def by_real(real: np.ndarray, size: np.ndarray) -> np.ndarray:
        return 1.0 * real + 0 * size

    terms = {"horizon_s": 100.0, "candidates": range(1, 20)}
    assert choose_sizes(19, seconds=by_size, compile_s=0.0, **terms) == tuple(range(1, 20))
    assert choose_sizes(19, seconds=by_real, compile_s=0.0, **terms) == (19,)
    assert choose_sizes(19, seconds=by_size, compile_s=1e9, **terms) == (19,)


@given(st.integers(1, 5000))
def test_round_sizes_reach_the_largest_and_are_a_quarter_apart_at_most(largest: int):
    sizes = round_sizes(largest)
    assert sizes[-1] == largest and sizes == sorted(set(sizes)) and sizes[0] == 1
    for below, above in pairwise(sizes):
        assert above - below == 1 or above <= below * (1 + 0.5 ** (ROUND_BITS - 1))


@st.composite
def step_costs(draw: st.DrawFn) -> StepCost:
    return replace(
        SMALL_MODEL,
        device=draw(st.sampled_from([CPU, *TPUS.values()])),
        top_k=draw(st.integers(1, 32)),
        itemsize=draw(st.sampled_from([2, 4])),
        expert_itemsize=draw(st.sampled_from([1, 2, 4])),
        tensor_size=draw(st.sampled_from([1, 2, 8])),
        data_size=draw(st.sampled_from([1, 4])),
    )


@given(step_costs(), st.integers(1, 300), st.integers(1, 300), st.integers(1, 300))
def test_neither_a_token_nor_padding_makes_a_step_faster(cost: StepCost, first: int, second: int, third: int):
    few, more, most = sorted((first, second, third))
    for seconds in (cost.decode_seconds, cost.prefill_seconds(num_singles=few, block_tokens=32)):
        fast, fuller, larger = seconds(np.array([few, more, few]), np.array([more, more, most]))
        assert 0 < fast <= fuller and fast <= larger


def test_padding_costs_little_where_reading_weights_takes_the_time_and_much_where_products_do():
    large = replace(SMALL_MODEL, device=TPUS["v6e"], dense_weights=1e9, head_weights=3e8, expert_weights=1e7)
    one, few = np.array(1), np.array(8)
    assert large.decode_seconds(one, few) < 1.02 * large.decode_seconds(one, one)
    prefill = large.prefill_seconds(num_singles=0, block_tokens=4096)
    assert prefill(one, few) > 4 * prefill(one, one)


def test_a_step_costs_what_bytes_and_products_take_by_hand():
    device = replace(CPU, bytes_per_s=100.0, flops=10.0, block_s=0.5, fills_blocks=False)
    cost = StepCost(device, 2, 300, 50, 10, num_experts=4, top_k=2, itemsize=4, expert_itemsize=2)
    touched = 4 * (1 - 0.5**3)
    reading_s = ((300 + 50) * 4 + touched * 10 * 2) / 100
    multiplying_s = 2 * (5 * 300 + 5 * 50 + 3 * 2 * 10) / 10
    assert reading_s < multiplying_s
    assert cost.decode_seconds(np.array(3), np.array(5)) == pytest.approx(multiplying_s + 5 * 2 * 0.5)
    shared = replace(cost, tensor_size=2)
    assert shared.decode_seconds(np.array(3), np.array(5)) == pytest.approx(multiplying_s / 2 + 5 * 2 * 0.5)
