"""A process per node that keeps its hosts' shares of weights that were sent: it outlives workers, and ends with the
replica. What a keeper has, keepers of other nodes may copy: for a host that moves there, or for another replica."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rayserve_moe.checkpoints.open_shares import (
    AnyShare,
    ShareBytes,
    SharePlace,
    WeightShare,
    open_share,
    written_share,
)

log = logging.getLogger(__name__)

KEEP_S = 60.0
"""Longest wait for keepers: to start, to open a file, and for a part of one that is copied."""
COPY_S = 600.0
"""Longest wait for copies of all shares."""
COPIED_BYTES = 64 << 20
"""Of a share with one call to another node."""
NUM_CALLS = 8
"""That a keeper answers at once: it is waited for, copies a share and is copied from."""


class SharesLostError(TimeoutError):
    """No keeper that lives has the share of a host."""


@dataclass(frozen=True)
class KeptShare:
    """The share of a host of `num_hosts`, open in the `keeper` of a node at a `place`."""

    host_id: int
    node_id: str
    keeper: ActorHandle
    place: SharePlace
    num_hosts: int


def far_share(share: KeptShare) -> ShareBytes:
    """A share that the keeper of another node has, to be read part by part. RayError where that has ended."""
    keeper, whose = share.keeper, (share.place.token, share.host_id)

    def read(start: int, stop: int) -> np.ndarray:
        bounds = [(each, min(each + COPIED_BYTES, stop)) for each in range(start, stop, COPIED_BYTES)]
        parts = [ray.get(keeper.read.remote(*whose, start=at, stop=end), timeout=KEEP_S) for at, end in bounds]
        return np.concatenate([np.empty(0, np.uint8), *parts])

    return ShareBytes(share.place.token, ray.get(keeper.size.remote(*whose), timeout=KEEP_S), read)


def opened_here(shares: Sequence[KeptShare]) -> list[AnyShare]:
    """Shares as this process can read them, those of its node first: they cost no transfer."""
    here = ray.get_runtime_context().get_node_id() if shares else ""
    near = [open_share(each.place) for each in shares if each.node_id == here]
    return [*near, *(far_share(each) for each in shares if each.node_id != here)]


class WeightKeeper:
    """Has shares open, by their token and host, for the workers of its node."""

    def __init__(self) -> None:
        self._shares: dict[tuple[str, int], WeightShare] = {}
        self._lock = threading.Lock()

    def keep(self, host_id: int, place: SharePlace) -> SharePlace:
        """Open a share beside those that are kept; returns where it is open here."""
        return self._add(host_id, open_share(place))

    def copy(self, share: KeptShare) -> SharePlace:
        """Copy a share that the keeper of another node has, part by part; returns where it is open here.

        RayError where that keeper has ended, or has the share no longer.
        """
        far = far_share(share)
        with written_share(far.token) as copied:
            for start in range(0, far.num_bytes, COPIED_BYTES):
                copied.write(far.read(start, min(start + COPIED_BYTES, far.num_bytes)), start)
        return self._add(share.host_id, copied)

    def size(self, token: str, host_id: int) -> int:
        """Bytes of a share. KeyError where it is not kept."""
        return self._shares[token, host_id].num_bytes

    def read(self, token: str, host_id: int, *, start: int, stop: int) -> np.ndarray:
        """A part of a share, uint8. KeyError where it is not kept."""
        with self._lock:
            return self._shares[token, host_id].read(start, stop)

    def keep_only(self, token: str) -> None:
        """Close all shares but those of one token."""
        with self._lock:
            for each in [each for each in self._shares if each[0] != token]:
                self._shares.pop(each).close()

    def until_end(self) -> None:
        """Return never: who waits for it has an error once this process has ended."""
        threading.Event().wait()

    def _add(self, host_id: int, share: WeightShare) -> SharePlace:
        with self._lock:
            replaced = self._shares.pop((share.token, host_id), None)
            self._shares[share.token, host_id] = share
        if replaced is not None:
            replaced.close()
        return share.place


RemoteWeightKeeper = ray.remote(WeightKeeper)


class WeightKeepers:
    """The keepers of one replica by node, started with the first weights that are sent.

    With `keeps_next` that of each host copies the share of the next one on another node too. `on_end` is called, from
    another thread, when one has ended by itself: `keep` starts others.
    """

    def __init__(self, on_end: Callable[[], object], *, keeps_next: bool = False) -> None:
        self._on_end, self._keeps_next = on_end, keeps_next
        self._lock = threading.RLock()  # of what is noted below; nothing is waited for under it
        self._nodes: list[str] = []
        self._shares: list[KeptShare] = []
        self.actors: dict[str, ActorHandle] = {}

    def keep(self, nodes: Sequence[str], places: Sequence[SharePlace | None]) -> tuple[SharePlace, ...]:
        """Have the keeper of each host, on these nodes, open the share in its place; returns where they are open then.

        Nothing is kept where a host has no share, or a keeper cannot open it: then nothing is returned.
        """
        if not places or None in places:
            return ()
        try:
            calls = [self._actor_on(node).keep.remote(host, places[host]) for host, node in enumerate(nodes)]
            return self._note(nodes, ray.get(calls, timeout=KEEP_S))
        except (RayError, TimeoutError):
            log.exception("sent weights are not kept, and end with their hosts")
            return ()

    def move(self, kept: tuple[SharePlace, ...], nodes: Sequence[str]) -> tuple[SharePlace, ...]:
        """Have keepers on these nodes, where hosts are now, have what is `kept`; returns where.

        Copies come from whichever keeper has the share of a host. RayError or TimeoutError where none has.
        """
        return kept if list(nodes) == self._nodes else self.take(self.shares(kept[0].token), nodes)

    def take(self, offered: Sequence[KeptShare], nodes: Sequence[str]) -> tuple[SharePlace, ...]:
        """Have keepers on these nodes take the share of each host out of those that are offered; returns where.

        What is on the same node is opened there, all else copied. RayError or TimeoutError where that cannot be.
        """
        calls = [self._taken(each, node) for each, node in zip(by_host(offered), nodes, strict=True)]
        return self._note(nodes, ray.get(calls, timeout=COPY_S))

    def shares(self, token: str) -> tuple[KeptShare, ...]:
        """What keepers that live have of some weights."""
        with self._lock:
            return tuple(each for each in self._shares if each.place.token == token)

    def keep_only(self, token: str) -> list[ray.ObjectRef]:
        """Close all shares but those of one token; returns what is done once they are."""
        with self._lock:
            self._shares, actors = list(self.shares(token)), list(self.actors.values())
        return [actor.keep_only.remote(token) for actor in actors]

    def end(self) -> None:
        """End all keepers."""
        with self._lock:
            actors, self.actors, self._nodes, self._shares = self.actors, {}, [], []
        for actor in actors.values():
            ray.kill(actor)

    def _note(self, nodes: Sequence[str], places: list[SharePlace]) -> tuple[SharePlace, ...]:
        """The shares of hosts on these nodes are kept there; the next hosts copy them."""
        with self._lock:
            hosts = enumerate(zip(nodes, places, strict=True))
            found = [
                KeptShare(host_id, node, self.actors[node], place, len(places)) for host_id, (node, place) in hosts
            ]
            replaced = {(each.place.token, each.host_id, each.node_id) for each in found}
            others = [each for each in self._shares if (each.place.token, each.host_id, each.node_id) not in replaced]
            self._nodes, self._shares = list(nodes), [*found, *others]
        if self._keeps_next:
            threading.Thread(target=self._copy_to_next, args=(found,), name="copies", daemon=True).start()
        return tuple(places)

    def _copy_to_next(self, shares: list[KeptShare]) -> None:
        """Where a node is lost, another one has its shares."""
        nodes = [each.node_id for each in shares]
        for share in shares:
            later = nodes[share.host_id + 1 :] + nodes[: share.host_id]
            node = next((each for each in later if each != share.node_id), "")
            actor = self.actors.get(node)
            if actor is None:
                continue
            try:
                place = ray.get(actor.copy.remote(share), timeout=COPY_S)
            except (RayError, TimeoutError) as error:
                log.warning("no other node has the share of host %d: %s", share.host_id, type(error).__name__)
                continue
            with self._lock:
                if share in self._shares:
                    self._shares.append(replace(share, node_id=node, keeper=actor, place=place))

    def _taken(self, offered: list[KeptShare], node: str) -> ray.ObjectRef:
        """Begin to have a share on a node, of which the first offer is taken that is there already."""
        actor, here = self._actor_on(node), [each for each in offered if each.node_id == node]
        if here:
            return actor.keep.remote(here[0].host_id, here[0].place)
        return actor.copy.remote(offered[0])

    def _actor_on(self, node_id: str) -> ActorHandle:
        with self._lock:
            if node_id not in self.actors:
                self.actors[node_id] = actor = _keeper_on(node_id)
                threading.Thread(target=self._watch, args=(node_id, actor), name="keeper", daemon=True).start()
            return self.actors[node_id]

    def _watch(self, node_id: str, actor: ActorHandle) -> None:
        ray.wait([actor.until_end.remote()])
        with self._lock:
            if self.actors.get(node_id) is not actor:
                return
            del self.actors[node_id]
            self._shares = [each for each in self._shares if each.keeper is not actor]
            self._nodes = []
        log.error("a keeper of weights has ended")
        self._on_end()


def by_host(offered: Sequence[KeptShare]) -> list[list[KeptShare]]:
    """Those on nodes that live, by host. SharesLostError where a host of the group that they are of has none."""
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    num_hosts = max((each.num_hosts for each in offered), default=1)
    found = [[each for each in offered if each.host_id == host and each.node_id in alive] for host in range(num_hosts)]
    if [] in found:
        raise SharesLostError(f"no keeper has the share of host {found.index([])}")
    return found


def _keeper_on(node_id: str) -> ActorHandle:
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    remote = RemoteWeightKeeper.options(num_cpus=0, max_concurrency=NUM_CALLS, scheduling_strategy=strategy)
    return cast(ActorHandle, remote.remote())
