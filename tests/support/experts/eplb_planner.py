"""Cases and laws that everything that places experts is held to: any planner, any step of one."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
from hypothesis import strategies as st

from rayserve_moe.balancing.placement import ExpertPlacement, PlacementError, lowered_redundancy
from rayserve_moe.balancing.planner import lower_bound

KINDS = ("lognormal", "hot", "half dead", "flat", "zero", "huge", "few")


@dataclass(frozen=True)
class PlannerCase:
    """A load [layers, experts] and what to place it on."""

    load: np.ndarray
    ep_size: int
    num_redundant: int

    @property
    def sizes(self) -> dict[str, int]:
        return {"ep_size": self.ep_size, "num_redundant": self.num_redundant}

    def with_load(self, load: np.ndarray) -> PlannerCase:
        return PlannerCase(load, self.ep_size, self.num_redundant)


def random_load(generator: np.random.Generator, kind: str, shape: tuple[int, int]) -> np.ndarray:
    """A load of some kind, in one of the number types that statistics come in."""
    spread = np.exp(generator.normal(0, 1, shape))
    if kind == "hot":
        spread[:, generator.integers(shape[1])] *= 50
    if kind == "half dead":
        spread[generator.random(shape) < 1 / 2] = 0
    if kind == "huge":
        return (spread * 1e17).astype(np.uint64)
    if kind == "few":
        return generator.integers(0, 4, shape).astype(np.uint8)
    whole = {"flat": np.ones(shape), "zero": np.zeros(shape)}.get(kind, spread)
    return whole.astype(np.float32) if generator.random() < 1 / 2 else (whole * 1000).astype(np.uint32)


@st.composite
def planner_cases(draw: st.DrawFn, max_experts: int = 24) -> PlannerCase:
    """Small cases of every kind; the slots need not divide by the ranks, but can be made to."""
    num_experts, ep_size = draw(st.integers(1, max_experts)), draw(st.integers(1, 9))
    num_redundant = draw(st.integers(0, 24))
    try:
        lowered_redundancy(num_experts, ep_size=ep_size, wanted=num_redundant)
    except PlacementError:
        num_redundant = -num_experts % ep_size
    generator = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    shape = draw(st.integers(1, 3)), num_experts
    return PlannerCase(random_load(generator, draw(st.sampled_from(KINDS)), shape), ep_size, num_redundant)


def rank_loads(placement: ExpertPlacement, load: np.ndarray) -> np.ndarray:
    """Load of every rank under the placement's shares: float64 [layers, ranks]."""
    amounts = placement.share_of_slot * np.take_along_axis(load.astype(np.float64), placement.expert_of_slot, axis=1)
    return amounts.reshape(placement.num_layers, placement.ep_size, -1).sum(axis=2)


def even_rank_loads(placement: ExpertPlacement, load: np.ndarray) -> np.ndarray:
    """Load of every rank if the replicas of an expert took equal parts."""
    counts = np.array([np.bincount(of_layer, minlength=load.shape[1]) for of_layer in placement.expert_of_slot])
    amounts = np.take_along_axis(load.astype(np.float64) / counts, placement.expert_of_slot, axis=1)
    return amounts.reshape(placement.num_layers, placement.ep_size, -1).sum(axis=2)


def incoming(new: ExpertPlacement, old: ExpertPlacement) -> np.ndarray:
    """Slots of each layer whose expert their rank does not hold in `old`; rank i of both is the same device."""
    new_ranks = new.expert_of_slot.reshape(new.num_layers, new.ep_size, -1).tolist()
    old_ranks = old.expert_of_slot.reshape(old.num_layers, old.ep_size, -1).tolist()
    return np.array(
        [
            sum(
                expert not in (old_layer[rank] if rank < old.ep_size else ())
                for rank, held in enumerate(new_layer)
                for expert in held
            )
            for new_layer, old_layer in zip(new_ranks, old_ranks, strict=True)
        ]
    )


def assert_fits(placement: ExpertPlacement, case: PlannerCase) -> None:
    """The placement is of the case's shape and beats no bound; what a placement checks of itself it has checked."""
    num_layers, num_experts = case.load.shape
    fitting = lowered_redundancy(num_experts, ep_size=case.ep_size, wanted=case.num_redundant)
    assert (placement.num_layers, placement.num_experts) == (num_layers, num_experts)
    assert (placement.ep_size, placement.num_redundant) == (case.ep_size, fitting)
    load = case.load.astype(np.float64)
    bound = lower_bound(load, ep_size=case.ep_size, num_redundant=fitting)
    for loads in (rank_loads(placement, load), even_rank_loads(placement, load)):
        assert (loads.max(axis=1) >= bound * (1 - 1e-5)).all()


def same(one: ExpertPlacement, other: ExpertPlacement) -> bool:
    """Both placements are equal to the last bit."""
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("expert_of_slot", "share_of_slot", "slot_for")
    )


def least_peak(ranks: list[tuple[int, ...]], load: np.ndarray) -> float:
    """Load of the hottest rank under the best shares, for the experts that each rank holds.

    By the marriage theorem it is the greatest load per rank of any set of experts: they lie on those ranks only.
    """
    experts = range(len(load))
    subsets = [subset for size in range(1, len(load) + 1) for subset in combinations(experts, size)]
    return max(load[list(subset)].sum() / sum(not set(held).isdisjoint(subset) for held in ranks) for subset in subsets)


def optimal_peak(load: np.ndarray, *, ep_size: int, slots_per_rank: int) -> float:
    """The least peak of all placements of one layer, found by trying them all; `load` is [experts], and few."""
    choices = list(combinations(range(len(load)), slots_per_rank))
    complete = (ranks for ranks in product(choices, repeat=ep_size) if len(set().union(*ranks)) == len(load))
    return min(least_peak(list(ranks), load) for ranks in complete)
