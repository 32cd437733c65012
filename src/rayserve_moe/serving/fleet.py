"""What a replica holds of its fleet: its own part, the way to the others, and the actor that knows what is wanted."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from rayserve_moe.engine.weight_orders import WeightOutcome
from rayserve_moe.fleet.broadcast import FleetCalls
from rayserve_moe.fleet.member import FleetMember
from rayserve_moe.fleet.remote_state import RemoteState


@dataclass
class Fleet:
    """`last_bucket` is the one that was staged last for the fleet here: update, number, and what came of it."""

    member: FleetMember
    calls: FleetCalls
    state: RemoteState
    staging_timeout_s: float
    staging: asyncio.Lock = field(default_factory=asyncio.Lock)
    last_bucket: tuple[str, int, WeightOutcome] | None = None
