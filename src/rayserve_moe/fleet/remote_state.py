"""Client of the actor that holds a fleet's wanted state, for threads and for the event loop of a replica."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError
from ray.serve.exceptions import RayServeException

from rayserve_moe.fleet.member import StateUnavailableError
from rayserve_moe.fleet.wanted_state import FleetView, Wanted

ANSWER_S = 5.0


@dataclass
class RemoteState:
    """A `member.FleetState` backed by the actor."""

    find: Callable[[], ActorHandle]
    """Finds the actor, also after a loss. Raises ValueError if it does not exist now."""
    _actor: ActorHandle | None = None

    def view(self) -> FleetView:
        return self._ask("view")

    def join(self, member: str, number: int, *, num_prefill: int = 0) -> bool:
        return self._ask("join", member, number, num_prefill=num_prefill)

    def restore(self, wanted: Wanted) -> Wanted:
        return self._ask("restore", wanted)

    def forget(self, members: list[str]) -> None:
        self._ask("forget", members)

    def abandon(self, number: int) -> Wanted:
        return self._ask("abandon", number)

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Call the actor without blocking the event loop. Raises StateUnavailableError if it does not answer."""
        return await asyncio.to_thread(self._ask, method, *arguments)

    def _ask(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        try:
            actor = self._actor = self._actor or self.find()
            return ray.get(getattr(actor, method).remote(*arguments, **keywords), timeout=ANSWER_S)
        except (ValueError, RayError, RayServeException, GetTimeoutError) as error:
            self._actor = None
            raise StateUnavailableError(f"{type(error).__name__}: {error}") from error
