"""What had to move at least is counted per host, whichever rank it becomes."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.elastic_hosts import NodeExperts, min_slots, table_of
from rayserve_moe.balancing.layout import num_incoming
from rayserve_moe.balancing.placement import ExpertPlacement, identity_placement
from rayserve_moe.balancing.planner import replan
from rayserve_moe.balancing.planning import TOLERANCE, carried_placement, chance


def permuted(placement: ExpertPlacement, ranks: list[int]) -> ExpertPlacement:
    """The ranks in another order."""
    slots = np.arange(placement.num_slots).reshape(placement.ep_size, -1)[ranks].reshape(-1)
    experts, shares = placement.expert_of_slot[:, slots], placement.share_of_slot[:, slots]
    return ExpertPlacement(experts, shares, np.argsort(slots).astype(np.int32)[placement.slot_for])


def test_hosts_that_stay_need_nothing_that_they_had_as_another_rank() -> None:
    before = identity_placement(2, 8, ep_size=4, num_redundant=0)
    assert min_slots(before, before, stay=[0, 1, 2, 3]) == 0
    assert min_slots(before, permuted(before, [3, 1, 0, 2]), stay=[0, 1, 2, 3]) == 0
    assert min_slots(before, permuted(before, [3, 1, 0, 2]), stay=[0, 1, 2]) == 2 * 2, "those of the host that went"


def test_a_smaller_group_needs_the_experts_that_are_lost_at_least() -> None:
    before = identity_placement(1, 8, ep_size=4, num_redundant=0)
    after = identity_placement(1, 8, ep_size=2, num_redundant=0)
    assert min_slots(before, after, stay=[0, 2]) == 4, "each has a half of its experts"


def test_a_node_loads_an_expert_once() -> None:
    held = NodeExperts()
    before = identity_placement(2, 8, ep_size=4, num_redundant=0)
    assert held.load(before, ["a", "b", "c", "d"]) == 16
    assert held.load(permuted(before, [1, 0, 2, 3]), ["b", "a", "c", "e"]) == 2 * 2, "only a new node loads any"
    after = identity_placement(2, 8, ep_size=2, num_redundant=0)
    assert held.load(after, ["a", "c"]) == 2 * (2 + 2)


def test_the_pause_is_without_the_wait_for_the_host() -> None:
    row = {"requests": 64, "lost": 0, "tokens": 0, "rows": 0, "logprob_gap": 0.0, "over_bound": 1.01, "outage_s": 9.0}
    moved = {"moved_bytes": 4e6, "planned_bytes": 1e6, "least_bytes": 2e6, "phases": {"compiling": 2.0}}
    rows = [{"change": f"{name} 1", **row, **moved} for name in ("shrink", "grow")]
    said = " ".join(table_of(rows, after_s=5.0).split())
    assert "| shrink 1 | 4.0 | 2.0 | 64 | 0 | 0 | 0 | 0e+00 | 1.010 | 4.00 | 1.00 | 2.00 |" in said
    assert "| grow 1 | 9.0 |" in said


def planned(loads: np.ndarray, before: ExpertPlacement) -> ExpertPlacement:
    """Return the placement that the planner makes from loads alone."""
    return replan(loads, before, tolerance=max(TOLERANCE, chance(loads, ep_size=before.ep_size)))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_ranks", [4, 8])
def test_changes_of_size_move_little_more_than_they_must(seed: int, num_ranks: int) -> None:
    """Lose a random host and add another, twice, with a plan from new counts after each change."""
    generator, held, nodes = np.random.default_rng(seed), NodeExperts(), list(range(num_ranks))
    chances = np.exp(0.5 * generator.normal(size=(2, 32)))
    chances /= chances.sum(axis=1, keepdims=True)
    loads, moved, least = generator.multinomial(12_800, chances), 0, 0
    first = identity_placement(2, 32, ep_size=num_ranks, num_redundant=num_ranks)
    held.load(first, [str(node) for node in nodes])
    now = planned(loads, first)
    for change in range(4):
        before, former = now, list(nodes)
        if change % 2 == 0:
            nodes.pop(int(generator.integers(len(nodes))))
        else:
            nodes.insert(int(generator.integers(len(nodes))), num_ranks + change)
        ranks = [former.index(node) if node in former else None for node in nodes]
        wanted = max(num_ranks, -32 % len(nodes))
        first = carried_placement(first, loads, former_ranks=ranks, num_redundant=wanted - (32 + wanted) % len(nodes))
        loads = generator.multinomial(12_800, chances)
        now = planned(loads, first)
        moved += held.load(first, [str(node) for node in nodes])
        moved += num_incoming(now.expert_of_slot.reshape(2, len(nodes), -1), first)
        least += min_slots(before, now, stay=[rank for rank, node in enumerate(former) if node in nodes])
    assert moved <= 1.3 * least
