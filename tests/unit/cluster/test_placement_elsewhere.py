"""Hosts of a group of another size are asked for with the ranks that their nodes had."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rayserve_moe.balancing.placement import ExpertPlacement, identity_placement
from rayserve_moe.cluster.group_executor import GroupExecutor
from rayserve_moe.config.settings import ClusterSettings, ParallelSettings
from rayserve_moe.engine.executor import GroupLayout
from tests.unit.execution.test_remote_weights import described


@pytest.mark.parametrize(
    ("nodes", "former_ranks", "num_redundant"),
    [
        (["a", "c"], [0, 1, 4, 5], 0),
        (["c", "new", "a", "b"], [4, 5, None, None, 0, 1, 2, 3], 0),
        (["b", "b", "a", "c", "new"], [2, 3, None, None, 0, 1, 4, 5, None, None], 2),
    ],
)
def test_hosts_of_another_number_have_the_ranks_of_their_nodes(
    core_checkpoint: Path, nodes: list[str], former_ranks: list[int | None], num_redundant: int
) -> None:
    """Each host has two ranks; the second host of a node had none before."""
    runner, _ = described(str(core_checkpoint))
    executor = GroupExecutor(runner, parallel=ParallelSettings(), cluster=ClusterSettings())
    asked = []

    def place(former_ranks: Sequence[int | None], *, num_redundant: int) -> ExpertPlacement | None:
        asked.append((list(former_ranks), num_redundant))
        return None

    executor.place_experts = place
    assert executor._placement_on(["a", "b", "c"]) is None and not asked, "the first hosts take their own order"
    kept = identity_placement(2, 8, ep_size=6, num_redundant=4)
    executor._nodes = ["a", "b", "c"]
    executor.layout = GroupLayout(num_expert_ranks=6, num_redundant_experts=4, num_hosts=3, placement=kept)
    assert executor._placement_on(["c", "d", "a"]) is kept and not asked, "hosts of the same number load as before"
    assert executor._placement_on(nodes) is None
    assert asked == [(former_ranks, num_redundant)]


def test_a_placement_reaches_hosts_as_it_is() -> None:
    placement = identity_placement(2, 8, ep_size=3, num_redundant=1)
    found = pickle.loads(pickle.dumps(placement))
    for name in ("expert_of_slot", "share_of_slot", "slot_for"):
        np.testing.assert_array_equal(getattr(found, name), getattr(placement, name))
