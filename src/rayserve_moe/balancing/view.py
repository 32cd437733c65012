"""The state of expert balancing for users: plain values, serialized to JSON as they are."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rayserve_moe.balancing.migration import MigrationProgress


@dataclass(frozen=True)
class MigrationRecord:
    """A migration: at which step and when (unix seconds) it began, what it moves, and the gain its plan expects.

    Imbalances are means over layers. `outcome` is `under way`, `finished`, `replaced` by a later one, or `failed`: then
    layers that were done stay so, and the others are as before.
    """

    version: int
    step: int
    time: float
    moved_slots: int
    layers: int
    imbalance_before: float
    imbalance_after: float
    plan_seconds: float
    outcome: str


@dataclass(frozen=True)
class ActorView:
    """The planner: whether it answers, how often it was lost and found again, and refused plans by reason."""

    alive: bool
    restarts: int
    refused: dict[str, int]


@dataclass(frozen=True)
class BalancingView:
    """Expert balancing as it is now; L layers, E experts, and `ep_size` ranks.

    `tokens` [L][E] are the sums of the window, and rank loads [L][ep_size] are its tokens per rank: where experts lay
    in their own order without replicas, under the placement in force, and under the one before the last migration.
    An imbalance [L] is the hottest rank's load over the mean; 1.0 where nothing was counted.
    """

    enabled: bool
    num_layers: int
    num_experts: int
    num_slots: int
    ep_size: int
    layer_ids: list[int]
    tokens: list[list[float]]
    rank_load_identity: list[list[float]]
    rank_load_now: list[list[float]]
    rank_load_before: list[list[float]]
    imbalance_before: list[float]
    imbalance_now: list[float]
    progress: MigrationProgress
    history: list[MigrationRecord]
    actor: ActorView

    def as_json(self) -> dict[str, Any]:
        """Dictionaries, lists and numbers, under these names."""
        return {**asdict(self), "progress": self.progress.as_json()}
