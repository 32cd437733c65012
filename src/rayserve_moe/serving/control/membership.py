"""Membership of a replica in its fleet: its own state, calls to the others, and the fleet state actor."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rayserve_moe.checkpoints.bucket import SentAdapter, read_bucket
from rayserve_moe.cluster.replica_engine import FirstWeights
from rayserve_moe.engine.updates.adapters import LOST_WHILE_LOADING, AdapterLoads
from rayserve_moe.engine.updates.orders import WeightOutcome
from rayserve_moe.fleet.broadcast import Answers, FleetCalls
from rayserve_moe.fleet.member import FleetMember
from rayserve_moe.fleet.remote_state import RemoteState

log = logging.getLogger(__name__)

OFFER_S = 10.0
"""Timeout for a replica to answer with its offer."""
RETRY_S = 1.0
NO_ADAPTERS = "adapters_unsupported"
"""Error code of a replica that holds no adapters beside its weights."""


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
        return next((offer for offer in self._ask("offered_weights", order_id).values if offer is not None), None)

    def take_adapters(self, loads: AdapterLoads) -> None:
        """Load the adapters that another replica holds beside its weights, the least recently used first.

        Waits until a running replica offers its adapters or no running replica holds any.

        Raises: RuntimeError if an adapter cannot be loaded: this replica would reject its requests.
        """
        while not (offers := (asked := self._ask("offered_adapters")).values) and not _has_no_adapters(asked):
            log.warning("no replica has offered its adapters yet: asking again")
            time.sleep(RETRY_S)
        for name, path, sent in next(filter(None, offers), ()):
            adapter = read_bucket(self._calls.get(sent))
            assert isinstance(adapter, SentAdapter), "replicas offer adapters"
            while (outcome := loads.load(adapter, name, path=path).result()).message == LOST_WHILE_LOADING:
                log.warning("%s: loading %s again", outcome.message, name)
            if not outcome.success:
                raise RuntimeError(f"the adapter {name} of other replicas is not loaded: {outcome.message}")

    def _ask(self, call: str, *arguments: str) -> Answers:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            # The handle of these calls belongs to this loop, so the loop keeps running.
            threading.Thread(target=self._loop.run_forever, name="offers", daemon=True).start()
        asked = self._calls.ask(call, *arguments, timeout_s=OFFER_S, members=tuple)
        return asyncio.run_coroutine_threadsafe(asked, self._loop).result()


def _has_no_adapters(asked: Answers) -> bool:
    """Return True if no replica runs, or all running replicas answer that they hold no adapters."""
    refusals = [answer.refusal for answer in asked.by_replica.values() if answer.refusal is not None]
    return not asked.missing and all(refusal.code == NO_ADAPTERS for refusal in refusals)
