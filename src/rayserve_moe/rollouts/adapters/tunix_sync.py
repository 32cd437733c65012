"""Phases of tunix' weight syncs, as staged updates of a server. Read at google/tunix c7d8950f, as the sampler."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rayserve_moe.rollouts.client import RolloutClient, WeightStaging
from rayserve_moe.rollouts.weights import StagedWeights


class Phase(StrEnum):
    """Progress of a weight sync."""

    IDLE = "idle"
    PREPARED = "prepared"
    STAGED = "h2d_done"
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass
class _Round:
    """A weight sync, named by the `req_id` and `uuid` of its requests."""

    key: tuple[str, str]
    weight_version: str
    served_version: str
    """Version that served when the round began."""
    phase: Phase = Phase.PREPARED
    staged: StagedWeights | None = None
    model_path: str | None = None
    """Checkpoint to read in place of sent weights."""
    is_tried: bool = False
    """A switch was requested."""
    is_switched: bool = False
    """The server confirmed it."""


class WeightSync:
    """The part of tunix' `Sampler` that changes weights.

    A sync pauses the server, stages the new weights beside those that serve, and switches to all of them at once. Each
    phase may be repeated; a round other than the current one is refused.
    """

    def __init__(self, client: RolloutClient) -> None:
        self._client, self._staging = client, WeightStaging(client)
        self._round: _Round | None = None
        self._lock = asyncio.Lock()

    async def bind_weight_sync(self, **_: Any) -> dict[str, Any]:
        """Return the transport: weights arrive in the request of `weight_sync`."""
        return {"transport": "http"}

    async def get_weight_sync_metadata(self, **_: Any) -> dict[str, Any]:
        """Return the server's dtypes, which sent weights are rounded to, and its weight version."""
        info = await self._client.model_info()
        return {name: info[name] for name in ("dtype", "float32_tensors", "weight_version")}

    async def pre_weight_sync(self, sync_request: Any = None, **_: Any) -> str:
        """Begin a round: pause the server. Raises ValueError if another round is open, or this one has ended."""
        async with self._lock:
            key, current = _key_of(sync_request), self._round
            if current is not None and current.key == key:
                return current.phase
            if current is not None and current.phase in (Phase.PREPARED, Phase.STAGED):
                raise ValueError(f"round {current.key} is {current.phase}; end it before round {key}")
            await self._client.pause("retract")
            self._round = _Round(key, str(sync_request.policy_version), await self._client.weight_version())
            return self._round.phase

    async def weight_sync(self, sync_request: Any = None, **_: Any) -> str:
        """Stage the request's `weights`, by their names in the checkpoint; or take note of a checkpoint to read.

        The checkpoint is `model_path` of `extra_config`. The old weights still serve.
        """
        async with self._lock:
            current = self._current(sync_request, Phase.PREPARED, Phase.STAGED)
            if current.phase == Phase.PREPARED:
                weights = getattr(sync_request, "weights", None)
                current.model_path = (sync_request.extra_config or {}).get("model_path")
                if (weights is None) == (current.model_path is None):
                    raise ValueError("a sync has either `weights` or `model_path` in `extra_config`")
                if weights is not None:
                    version = current.weight_version
                    current.staged = await self._staging.stage(weights, weight_version=version)
                current.phase = Phase.STAGED
            return current.phase

    async def post_weight_sync(self, sync_request: Any = None, **_: Any) -> str:
        """Switch to the staged weights and resume; call it again if an answer was lost.

        Raises: Refused if the server keeps its old weights.
        """
        async with self._lock:
            current = self._current(sync_request, Phase.STAGED, Phase.COMMITTED)
            if current.phase == Phase.STAGED:
                await self._switch(current)
                await self._client.resume()
                current.phase = Phase.COMMITTED
            return current.phase

    async def abort_weight_sync(self, sync_request: Any = None, **_: Any) -> str:
        """Drop what the round has staged, and resume with the old weights. Raises ValueError after a switch."""
        async with self._lock:
            current = self._current(sync_request, Phase.PREPARED, Phase.STAGED, Phase.ABORTED)
            if current.phase != Phase.ABORTED:
                if await self._has_switched(current):
                    raise ValueError(f"round {current.key} has switched the weights: end it by post_weight_sync")
                if current.staged is not None:
                    await self._staging.drop(current.staged)
                await self._client.resume()
                current.phase = Phase.ABORTED
            return current.phase

    async def get_transfer_status(self, req_id: str, **_: Any) -> str:
        """Return the phase of the round of `req_id`, `idle` if it is not the current one."""
        current = self._round
        return current.phase if current is not None and current.key[0] == req_id else Phase.IDLE

    async def _switch(self, current: _Round) -> None:
        """Switch to the weights of a round, once."""
        if await self._has_switched(current):
            return
        current.is_tried = True
        if current.staged is not None:
            await self._staging.swap(current.staged)
        else:
            assert current.model_path is not None, "a staged round has weights or a path"
            await self._client.update_weights(current.model_path, weight_version=current.weight_version)
        current.is_switched = True

    async def _has_switched(self, current: _Round) -> bool:
        """Return True if the server has switched, even if its answer was lost.

        After a lost answer only the served version shows the switch. If the old weights have it too, return False.
        """
        if not current.is_tried or current.is_switched or current.served_version == current.weight_version:
            return current.is_switched
        return await self._client.weight_version() == current.weight_version

    def _current(self, sync_request: Any, *phases: Phase) -> _Round:
        """Return the round of a request. Raises ValueError if it is stale or in none of the `phases`."""
        key, current = _key_of(sync_request), self._round
        if current is None or current.key != key:
            raise ValueError(f"round {key} was not begun, or another has begun since")
        if current.phase not in phases:
            raise ValueError(f"round {key} is {current.phase}, not {' or '.join(phases)}")
        return current


def _key_of(sync_request: Any) -> tuple[str, str]:
    """Return the name of a round. Raises ValueError without a request."""
    if sync_request is None:
        raise ValueError("a weight sync needs its request: `policy_version`, and `req_id` and `uuid` in `extra_config`")
    config = getattr(sync_request, "extra_config", None) or {}
    return str(config.get("req_id", getattr(sync_request, "request_id", ""))), str(config.get("uuid", ""))
