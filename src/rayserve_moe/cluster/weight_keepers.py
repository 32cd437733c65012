"""A process per host that keeps its share of weights that were sent: it outlives workers, and ends with the replica."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayserve_moe.checkpoints.open_shares import SharePlace, WeightShare, open_share

log = logging.getLogger(__name__)

KEEP_S = 60.0
"""Longest wait for keepers: to start, and to open a file."""


class WeightKeeper:
    """Has shares open, by their token, for the workers of its host."""

    def __init__(self) -> None:
        self._shares: dict[str, WeightShare] = {}

    def keep(self, place: SharePlace) -> SharePlace:
        """Open a share beside those that are kept; returns where it is open here."""
        self._shares[place.token] = share = open_share(place)
        return share.place

    def keep_only(self, token: str) -> None:
        """Close all shares but those of one token."""
        for each in [each for each in self._shares if each != token]:
            self._shares.pop(each).close()

    def until_end(self) -> None:
        """Return never: who waits for it has an error once this process has ended."""
        threading.Event().wait()


RemoteWeightKeeper = ray.remote(WeightKeeper)


class WeightKeepers:
    """The keepers of the hosts of one replica, started with the first weights that are sent.

    `on_end` is called, from another thread, when one has ended by itself: `keep` starts others.
    """

    def __init__(self, on_end: Callable[[], object]) -> None:
        self._on_end = on_end
        self._nodes: list[str] = []
        self.actors: list[ActorHandle] = []

    def keep(self, nodes: Sequence[str], places: Sequence[SharePlace | None]) -> tuple[SharePlace, ...]:
        """Have the keeper of each host open the share in its place there; returns where they are open then.

        Nothing is kept where a host has no share, or a keeper cannot open it: then nothing is returned.
        """
        if not places or None in places:
            return ()
        try:
            if list(nodes) != self._nodes:
                self._start(nodes)
            calls = [actor.keep.remote(place) for actor, place in zip(self.actors, places, strict=True)]
            return tuple(ray.get(calls, timeout=KEEP_S))
        except (RayError, TimeoutError):
            log.exception("sent weights are not kept, and end with their hosts")
            return ()

    def keep_only(self, token: str) -> None:
        """Close all shares but those of one token, soon."""
        for actor in self.actors:
            actor.keep_only.remote(token)

    def end(self) -> None:
        """End all keepers."""
        actors, self.actors, self._nodes = self.actors, [], []
        for actor in actors:
            ray.kill(actor)

    def _start(self, nodes: Sequence[str]) -> None:
        self.end()
        self.actors = actors = [_keeper_on(node) for node in nodes]
        self._nodes = list(nodes)
        threading.Thread(target=self._watch, args=(actors,), name="keepers", daemon=True).start()

    def _watch(self, actors: list[ActorHandle]) -> None:
        ended, _ = ray.wait([actor.until_end.remote() for actor in actors])
        if ended and self.actors is actors:
            log.error("a keeper of weights has ended")
            self.end()
            self._on_end()


def _keeper_on(node_id: str) -> ActorHandle:
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    options = {"num_cpus": 0, "max_concurrency": 2, "scheduling_strategy": strategy}
    return cast(ActorHandle, RemoteWeightKeeper.options(**options).remote())
