"""What had to move at least is counted per host, whichever rank it becomes."""

from __future__ import annotations

import numpy as np

from benchmarks.elastic_hosts import NodeExperts, least_slots, table_of
from rayserve_moe.balancing.placement import ExpertPlacement, identity_placement


def permuted(placement: ExpertPlacement, ranks: list[int]) -> ExpertPlacement:
    """The ranks in another order."""
    slots = np.arange(placement.num_slots).reshape(placement.ep_size, -1)[ranks].reshape(-1)
    experts, shares = placement.expert_of_slot[:, slots], placement.share_of_slot[:, slots]
    return ExpertPlacement(experts, shares, np.argsort(slots).astype(np.int32)[placement.slot_for])


def test_hosts_that_stay_need_nothing_that_they_had_as_another_rank() -> None:
    before = identity_placement(2, 8, ep_size=4, num_redundant=0)
    assert least_slots(before, before, stay=[0, 1, 2, 3]) == 0
    assert least_slots(before, permuted(before, [3, 1, 0, 2]), stay=[0, 1, 2, 3]) == 0
    assert least_slots(before, permuted(before, [3, 1, 0, 2]), stay=[0, 1, 2]) == 2 * 2, "those of the host that went"


def test_a_smaller_group_needs_the_experts_that_are_lost_at_least() -> None:
    before = identity_placement(1, 8, ep_size=4, num_redundant=0)
    after = identity_placement(1, 8, ep_size=2, num_redundant=0)
    assert least_slots(before, after, stay=[0, 2]) == 4, "each has a half of its experts"


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
