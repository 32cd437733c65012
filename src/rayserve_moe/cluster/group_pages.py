"""Read pages from the host memory of a group's hosts, and write pages that another group has read.

Shares pass from worker to worker through Ray's object store; the replicas hold references alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError

from rayserve_moe.engine.executor import ExecutorFailure
from rayserve_moe.execution.page_store import PageStore
from rayserve_moe.scheduling.host_slots import PageSlots

COPY_PAGES = "copy_pages"
"""Name of the worker's method that copies pages."""
TRANSFER_S = 60.0
"""Maximum time of a read or a write."""


class GroupPages:
    """Implements `engine.executor.PageHosts` over the workers of a group."""

    def __init__(self, workers: Callable[[], Sequence[ActorHandle]]) -> None:
        self._workers = workers

    def read(self, pages: PageSlots) -> Mapping[int, Any]:
        shares: dict[int, Any] = {}
        for of_host in self._ask(lambda worker: worker.answer.remote(COPY_PAGES, pages)):
            shares |= of_host
        return shares

    def write(self, pages: PageSlots, shares: Mapping[int, Any]) -> Sequence[str]:
        faults = self._ask(lambda worker: worker.answer.remote(COPY_PAGES, pages, shares))
        return [next(filter(None, of_page), "") for of_page in zip(*faults, strict=True)]

    def _ask(self, call: Callable[[ActorHandle], ray.ObjectRef]) -> list[Any]:
        try:
            return ray.get([call(worker) for worker in self._workers()], timeout=TRANSFER_S)
        except GetTimeoutError as error:
            raise TimeoutError(f"pages were not copied within {TRANSFER_S} s") from error
        except RayError as error:
            raise ExecutorFailure(f"a host was lost while pages were copied: {error}") from error


def copy_shares(
    store: PageStore | None, pages: PageSlots, *, shares: Mapping[int, ray.ObjectRef] | None
) -> dict[int, ray.ObjectRef] | list[str]:
    """Read pages of a host, and return references to its shares.

    With the `shares` of others, fetch and write those of this host instead, and return the fault of each page.
    """
    assert store is not None, "a server with host_cache_mib keeps pages"
    if shares is None:
        return {place: ray.put(share) for place, share in store.read(pages).items()}
    own = {place: shares[place] for place in store.places(pages.data_rank).values() if place in shares}
    values: Any = ray.get(list(own.values()), timeout=TRANSFER_S)
    return store.write(pages, dict(zip(own, values, strict=True)))
