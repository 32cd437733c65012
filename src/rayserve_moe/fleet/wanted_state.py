"""The wanted state of all replicas of an application, and the running order that may change their weights.

An actor of the deployment keeps it; Serve ends both together. A starting replica joins only once it has reached the
wanted state, so each order either reaches it or is already included. A restarted actor is empty: replicas restore its
state from theirs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import ray

STATE_NAME = "fleet-state"
LEASE_S = 20.0
"""An order ends if its replica has not renewed it for this time."""
RESTORE_S = 3.0
"""Time from the actor's start to the first join, so that running replicas restore the state before."""


@dataclass(frozen=True)
class ServedWeights:
    """Weights that the fleet serves."""

    order_id: str = ""
    """Order that changed to them; empty: the configured weights."""
    path: str | None = ""
    """Checkpoint; empty: the configured one; None: they were sent."""
    version: str | None = None
    """Weight version; None: the model's own."""
    aborts_requests: bool = False
    """True if the change aborts running requests."""
    adapter: str | None = None
    """Name of the adapter that is merged into them; empty: the configured checkpoint; None: other weights."""
    awaited: str = ""
    """Version of weights lost with all replicas that had them; requests are rejected until weights are updated."""


@dataclass(frozen=True)
class Wanted:
    """The state that all replicas are to reach."""

    number: int = 0
    """Number of changes that led to it."""
    weights: ServedWeights = field(default_factory=ServedWeights)
    pause: str | None = None
    """Mode of the pause; None: running."""


@dataclass(frozen=True)
class FleetView:
    """The wanted state, the running order, and the replicas that have joined."""

    wanted: Wanted
    order_id: str | None
    members: frozenset[str]
    prefill: frozenset[str] = frozenset()
    """Members that compute prompts for the others."""


class WantedState:
    """The wanted state and its changes. Every method returns at once; `clock` counts seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started_at = clock()
        self._wanted = Wanted()
        self._members: set[str] = set()
        self._prefill: set[str] = set()
        self._order: tuple[str, float] | None = None

    def view(self) -> FleetView:
        """Return the current state."""
        return FleetView(self._wanted, self._order_id(), frozenset(self._members), frozenset(self._prefill))

    def begin(self, order_id: str) -> FleetView | None:
        """Begin an order for weights. Return None while another order runs."""
        if self._order_id() not in (None, order_id):
            return None
        self._order = (order_id, self._clock() + LEASE_S)
        return self.view()

    def renew(self, order_id: str) -> bool:
        """Renew an order's lease. Return False if the order has ended."""
        if self._order_id() != order_id:
            return False
        self._order = (order_id, self._clock() + LEASE_S)
        return True

    def commit(self, order_id: str, weights: ServedWeights) -> Wanted | None:
        """Commit an order: its weights are wanted from now on. Return None, without a change, if it has ended."""
        if not self.renew(order_id):
            return None
        self._wanted = replace(self._wanted, number=self._wanted.number + 1, weights=weights)
        return self._wanted

    def end(self, order_id: str) -> None:
        """End an order, committed or not."""
        if self._order_id() == order_id:
            self._order = None

    def pause(self, mode: str | None) -> Wanted:
        """Set the wanted pause mode; None: no pause."""
        self._wanted = replace(self._wanted, number=self._wanted.number + 1, pause=mode)
        return self._wanted

    def join(self, member: str, number: int, *, num_prefill: int = 0) -> bool:
        """Add a replica that has reached the state after `number` changes. Return False if it may not join yet.

        A new member computes prompts for the others if fewer than `num_prefill` do.

        It may not join if `number` is not the current state, while an order runs, or while the restarted actor may
        still miss the state of others.
        """
        is_known = self._clock() - self._started_at >= RESTORE_S or number > 0
        if member not in self._members and (self._order_id() is not None or number != self._wanted.number):
            return False
        if is_known and member not in self._members:
            self._members.add(member)
            if len(self._prefill) < num_prefill:
                self._prefill.add(member)
        return is_known

    def restore(self, wanted: Wanted) -> Wanted:
        """Take over a replica's state if it is later than this actor's; return the wanted state."""
        if wanted.number > self._wanted.number:
            self._wanted = wanted
        return self._wanted

    def forget(self, members: Collection[str]) -> None:
        """Forget replicas that are gone."""
        self._members.difference_update(members)
        self._prefill.difference_update(members)

    def abandon(self, number: int) -> Wanted:
        """Mark the weights wanted after `number` changes as lost and awaited, if no replica is left."""
        if self._wanted.number == number and not self._members:
            lost = ServedWeights(awaited=self._wanted.weights.version or "")
            self._wanted = replace(self._wanted, number=number + 1, weights=lost)
        return self._wanted

    def _order_id(self) -> str | None:
        if self._order is not None and self._clock() > self._order[1]:
            self._order = None
        return None if self._order is None else self._order[0]


WantedStateActor = ray.remote(WantedState)
