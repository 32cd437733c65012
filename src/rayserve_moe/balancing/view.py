"""What is shown of expert balancing: plain values, of which JSON is made as they are."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ProgressView:
    """How far the migration to placement `version` has come: layers that change, and slots that travel."""

    version: int
    layers: int
    layers_done: int
    slots: int
    slots_done: int
    is_done: bool


@dataclass(frozen=True)
class MigrationRecord:
    """A migration that was begun: at which step and when (unix seconds), what it moves, and what it promises.

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
    """The process that plans: whether it answers, how often it was started again, and plans refused by reason."""

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
    progress: ProgressView
    history: list[MigrationRecord]
    actor: ActorView

    def as_json(self) -> dict[str, Any]:
        """Dictionaries, lists and numbers, under these very names."""
        return asdict(self)
