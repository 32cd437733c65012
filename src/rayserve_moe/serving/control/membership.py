"""Membership of a replica in its fleet: its own state, calls to the others, and the fleet state actor."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rayserve_moe.checkpoints.bucket import SentAdapter, read_bucket
from rayserve_moe.cluster.replica_engine import FirstWeights
from rayserve_moe.engine.updates.adapters import AdapterLoads
from rayserve_moe.engine.updates.orders import WeightOutcome
from rayserve_moe.fleet.broadcast import FleetCalls
from rayserve_moe.fleet.member import FleetMember
from rayserve_moe.fleet.remote_state import RemoteState

log = logging.getLogger(__name__)

OFFER_S = 10.0
"""Timeout for a replica to answer with its offer."""


@dataclass
class Membership:
    """Membership of a replica in its fleet."""

    member: FleetMember
    calls: FleetCalls
    state: RemoteState
    staging_timeout_s: float
    staging: asyncio.Lock = field(default_factory=asyncio.Lock)
    last_bucket: tuple[str, int, WeightOutcome] | None = None
    """Last bucket staged here for the fleet: update id, number and outcome."""
    offered_weights: Callable[[], FirstWeights | None] = lambda: None
    """Return the serving sent weights for replicas that start, or None."""


class OffersOfOthers:
    """Requests for weights and adapters to other replicas, on a separate event loop."""

    def __init__(self, calls: FleetCalls) -> None:
        self._calls = calls
        self._loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, order_id: str) -> FirstWeights | None:
        """Return the first offer, or None if no replica offers the weights now."""
        return next((offer for offer in self._ask("offered_weights", order_id) if offer is not None), None)

    def take_adapters(self, loads: AdapterLoads) -> None:
        """Load the adapters that another replica holds beside its weights, the least recently used first."""
        for name, path, sent in next((offer for offer in self._ask("offered_adapters") if offer), ()):
            adapter = read_bucket(self._calls.get(sent))
            assert isinstance(adapter, SentAdapter), "replicas offer adapters"
            if not (outcome := loads.load(adapter, name, path=path).result()).success:
                log.warning("the adapter %s of other replicas is not loaded: %s", name, outcome.message)

    def _ask(self, call: str, *arguments: str) -> list[Any]:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            # Serve binds the handle to this loop for all later calls, so the loop keeps running.
            threading.Thread(target=self._loop.run_forever, name="offers", daemon=True).start()
        asked = self._calls.ask(call, *arguments, timeout_s=OFFER_S, members=tuple)
        return asyncio.run_coroutine_threadsafe(asked, self._loop).result().values
