"""What a replica holds of its fleet: its own part, the way to the others, and the actor that knows what is wanted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from rayserve_moe.cluster.replica_engine import FirstWeights
from rayserve_moe.engine.updates.orders import WeightOutcome
from rayserve_moe.fleet.broadcast import FleetCalls
from rayserve_moe.fleet.member import FleetMember
from rayserve_moe.fleet.remote_state import RemoteState

OFFER_S = 10.0
"""For a replica to say what it offers."""


@dataclass
class Fleet:
    """`last_bucket` is the one that was staged last for the fleet here: update, number, and what came of it.
    `offered_weights` returns what serves here of what was sent, for replicas that start."""

    member: FleetMember
    calls: FleetCalls
    state: RemoteState
    staging_timeout_s: float
    staging: asyncio.Lock = field(default_factory=asyncio.Lock)
    last_bucket: tuple[str, int, WeightOutcome] | None = None
    offered_weights: Callable[[], FirstWeights | None] = lambda: None


class OffersOfOthers:
    """Asks other replicas for the weights of an order, from a thread whose own loop, if it has one, is held up."""

    def __init__(self, calls: FleetCalls) -> None:
        self._calls = calls
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, order_id: str) -> FirstWeights | None:
        """Return the first offer; None where no replica offers them now."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            # Serve keeps the handle that is made there, for all later calls: the loop runs on.
            threading.Thread(target=self._loop.run_forever, name="offers", daemon=True).start()
        asked = self._calls.ask("offered_weights", order_id, timeout_s=OFFER_S, members=tuple)
        answers = asyncio.run_coroutine_threadsafe(asked, self._loop).result()
        return next((offer for offer in answers.values if offer is not None), None)
