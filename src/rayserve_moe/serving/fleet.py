"""What a replica holds of its fleet: its own part, the way to the others, and the actor that knows what is wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from rayserve_moe.cluster.replica_engine import FirstWeights
from rayserve_moe.engine.weight_orders import WeightOutcome
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


def offered_by_others(calls: FleetCalls, order_id: str) -> FirstWeights | None:
    """Ask other replicas for the weights of an order, from whatever thread; None where none offers them now."""

    def ask() -> list[FirstWeights | None]:
        call = calls.ask("offered_weights", order_id, timeout_s=OFFER_S, members=tuple)
        return asyncio.run(call).values

    with ThreadPoolExecutor(1) as own:  # the thread of a replica that starts has an event loop
        return next((offer for offer in own.submit(ask).result() if offer is not None), None)
