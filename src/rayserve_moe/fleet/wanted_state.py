"""What all replicas of an application are to serve, and the one order at a time that may change their weights.

Kept by an actor of the deployment, which Serve ends with it. A replica that starts joins only with what is wanted, so
that an order reaches it, or it has the outcome. An actor that was lost begins empty: replicas restore what they have.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import ray

STATE_NAME = "fleet-state"
LEASE_S = 20.0
"""An order whose replica has not renewed it for so long has ended."""
RESTORE_S = 3.0
"""From the actor's start to the first replica that joins: those that run restore what they have before."""


@dataclass(frozen=True)
class ServedWeights:
    """Weights by the order that changed to them (empty: the configured ones), and where they lie; None: they were sent.

    `version` is None where the model's own counts. Where others were lost with all replicas that had them, `awaited` is
    the version of those: nothing is answered by these, until weights are sent or read.
    """

    order_id: str = ""
    path: str | None = ""
    version: str | None = None
    aborts_requests: bool = False
    awaited: str = ""


@dataclass(frozen=True)
class Wanted:
    """The state of the fleet after `number` changes: its weights, and the mode of its pause."""

    number: int = 0
    weights: ServedWeights = field(default_factory=ServedWeights)
    pause: str | None = None


@dataclass(frozen=True)
class FleetView:
    """What is wanted, the order that runs, and the replicas that have joined."""

    wanted: Wanted
    order_id: str | None
    members: frozenset[str]


class WantedState:
    """Every method takes effect at once and waits for nothing; `clock` counts seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started_at = clock()
        self._wanted = Wanted()
        self._members: set[str] = set()
        self._order: tuple[str, float] | None = None

    def view(self) -> FleetView:
        """Return the state as it is now."""
        return FleetView(self._wanted, self._order_id(), frozenset(self._members))

    def begin(self, order_id: str) -> FleetView | None:
        """Begin an order for weights; None while another one runs."""
        if self._order_id() not in (None, order_id):
            return None
        self._order = (order_id, self._clock() + LEASE_S)
        return self.view()

    def renew(self, order_id: str) -> bool:
        """Say that an order goes on; False where it has ended."""
        if self._order_id() != order_id:
            return False
        self._order = (order_id, self._clock() + LEASE_S)
        return True

    def commit(self, order_id: str, weights: ServedWeights) -> Wanted | None:
        """Decide an order: its weights are wanted from now on. None, and nothing changes, where it has ended."""
        if not self.renew(order_id):
            return None
        self._wanted = replace(self._wanted, number=self._wanted.number + 1, weights=weights)
        return self._wanted

    def end(self, order_id: str) -> None:
        """End an order, decided or not."""
        if self._order_id() == order_id:
            self._order = None

    def pause(self, mode: str | None) -> Wanted:
        """Want a pause, or none."""
        self._wanted = replace(self._wanted, number=self._wanted.number + 1, pause=mode)
        return self._wanted

    def join(self, member: str, number: int) -> bool:
        """Take in a replica that has what is wanted after `number` changes; False where that is not the state now.

        So too while an order runs, or as long as the actor may not know yet what others have.
        """
        is_known = self._clock() - self._started_at >= RESTORE_S or number > 0
        if member not in self._members and (self._order_id() is not None or number != self._wanted.number):
            return False
        if is_known:
            self._members.add(member)
        return is_known

    def restore(self, wanted: Wanted) -> Wanted:
        """Take over what a replica has, where this actor knows less; returns what is wanted."""
        if wanted.number > self._wanted.number:
            self._wanted = wanted
        return self._wanted

    def forget(self, members: Collection[str]) -> None:
        """Forget replicas that are gone."""
        self._members.difference_update(members)

    def abandon(self, number: int) -> Wanted:
        """Await the weights that are wanted after `number` changes, where they are lost with all replicas."""
        if self._wanted.number == number and not self._members:
            lost = ServedWeights(awaited=self._wanted.weights.version or "")
            self._wanted = replace(self._wanted, number=number + 1, weights=lost)
        return self._wanted

    def _order_id(self) -> str | None:
        if self._order is not None and self._clock() > self._order[1]:
            self._order = None
        return None if self._order is None else self._order[0]


WantedStateActor = ray.remote(WantedState)
