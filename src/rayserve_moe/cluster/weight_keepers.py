"""Processes that keep the shares of sent weights: one per node.

A keeper outlives the workers of its node and ends with the replica. Keepers of other nodes may copy its shares, for a
host that moves there or for another replica.
"""

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
"""Maximum wait for keepers: to start, to open a file, and for a part of a copied file."""
COPY_S = 600.0
"""Maximum wait for copies of all shares."""
COPIED_BYTES = 64 << 20
"""Bytes of a share copied per call from another node."""
NUM_CALLS = 8
"""Concurrent calls of a keeper: it is waited for, copies a share and is copied from."""


class SharesLostError(TimeoutError):
    """No live keeper has the share of a host."""


@dataclass(frozen=True)
class KeptShare:
    """A host's share of weights, open in a keeper."""

    host_id: int
    node_id: str
    """Node of the keeper."""
    keeper: ActorHandle
    place: SharePlace
    """Location on that node."""
    num_hosts: int
    """Number of hosts that the weights are divided over."""


def far_share(share: KeptShare) -> ShareBytes:
    """Return a share of another node's keeper, to be read part by part. Raises RayError if the keeper has ended."""
    keeper, whose = share.keeper, (share.place.token, share.host_id)

    def read(start: int, stop: int) -> np.ndarray:
        bounds = [(each, min(each + COPIED_BYTES, stop)) for each in range(start, stop, COPIED_BYTES)]
        parts = [ray.get(keeper.read.remote(*whose, start=at, stop=end), timeout=KEEP_S) for at, end in bounds]
        return np.concatenate([np.empty(0, np.uint8), *parts])

    return ShareBytes(share.place.token, ray.get(keeper.size.remote(*whose), timeout=KEEP_S), read)


def opened_here(shares: Sequence[KeptShare]) -> list[AnyShare]:
    """Return the shares as this process can read them, local ones first: they cost no transfer."""
    here = ray.get_runtime_context().get_node_id() if shares else ""
    near = [open_share(each.place) for each in shares if each.node_id == here]
    return [*near, *(far_share(each) for each in shares if each.node_id != here)]


class WeightKeeper:
    """Keeps shares open, by token and host, for the workers of its node."""

    def __init__(self) -> None:
        self._shares: dict[tuple[str, int], WeightShare] = {}
        self._lock = threading.Lock()

    def keep(self, host_id: int, place: SharePlace) -> SharePlace:
        """Open a share beside the kept ones; return its location here."""
        return self._add(host_id, open_share(place))

    def copy(self, share: KeptShare) -> SharePlace:
        """Copy a share from another node's keeper part by part; return its location here.

        Raises RayError if that keeper has ended or no longer has the share.
        """
        far = far_share(share)
        with written_share(far.token) as copied:
            for start in range(0, far.num_bytes, COPIED_BYTES):
                copied.write(far.read(start, min(start + COPIED_BYTES, far.num_bytes)), start)
        return self._add(share.host_id, copied)

    def size(self, token: str, host_id: int) -> int:
        """Return the bytes of a share. Raises KeyError if it is not kept."""
        return self._shares[token, host_id].num_bytes

    def read(self, token: str, host_id: int, *, start: int, stop: int) -> np.ndarray:
        """Return a part of a share, uint8 [stop - start]. Raises KeyError if it is not kept."""
        with self._lock:
            return self._shares[token, host_id].read(start, stop)

    def keep_only(self, token: str) -> None:
        """Close all shares with another token."""
        with self._lock:
            for each in [each for each in self._shares if each[0] != token]:
                self._shares.pop(each).close()

    def until_end(self) -> None:
        """Block for ever: a caller that waits for this gets an error once the process has ended."""
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
    """The keepers of a replica by node, started with the first sent weights.

    With `keeps_next`, each host's keeper also copies the share of another host. `on_end` is called from another thread
    when a keeper has ended by itself; `keep` then starts another.
    """

    def __init__(self, on_end: Callable[[], object], *, keeps_next: bool = False) -> None:
        self._on_end, self._keeps_next = on_end, keeps_next
        self._lock = threading.RLock()  # Protects the fields below; no remote call is awaited while it is held.
        self._nodes: list[str] = []
        self._shares: list[KeptShare] = []
        self.actors: dict[str, ActorHandle] = {}

    def keep(self, nodes: Sequence[str], places: Sequence[SharePlace | None]) -> tuple[SharePlace, ...]:
        """Make the keeper of each host open that host's share; return the locations.

        Nothing is kept or returned if a host has no share or a keeper cannot open it.
        """
        if not places or None in places:
            return ()
        try:
            calls = [self._actor_on(node).keep.remote(host, places[host]) for host, node in enumerate(nodes)]
            return self._record(nodes, ray.get(calls, timeout=KEEP_S))
        except (RayError, TimeoutError):
            log.exception("sent weights are not kept: they are lost with their hosts")
            return ()

    def move(self, kept: tuple[SharePlace, ...], nodes: Sequence[str]) -> tuple[SharePlace, ...]:
        """Make keepers on the hosts' current nodes hold the `kept` shares; return the locations.

        Each share is copied from any keeper that has it. Raises RayError or TimeoutError if none has.
        """
        return kept if list(nodes) == self._nodes else self.take(self.shares(kept[0].token), nodes)

    def take(self, offered: Sequence[KeptShare], nodes: Sequence[str]) -> tuple[SharePlace, ...]:
        """Make keepers on these nodes take each host's share from the offered ones; return the locations.

        A share on the same node is opened there, all others are copied. Raises RayError or TimeoutError if that fails.
        """
        calls = [self._taken(each, node) for each, node in zip(by_host(offered), nodes, strict=True)]
        return self._record(nodes, ray.get(calls, timeout=COPY_S))

    def shares(self, token: str) -> tuple[KeptShare, ...]:
        """Return the shares of a token that live keepers hold."""
        with self._lock:
            return tuple(each for each in self._shares if each.place.token == token)

    def keep_only(self, token: str) -> list[ray.ObjectRef]:
        """Close all shares with another token; return the refs of the keepers' calls."""
        with self._lock:
            self._shares, actors = list(self.shares(token)), list(self.actors.values())
        return [actor.keep_only.remote(token) for actor in actors]

    def end(self) -> None:
        """End all keepers."""
        with self._lock:
            actors, self.actors, self._nodes, self._shares = self.actors, {}, [], []
        for actor in actors.values():
            ray.kill(actor)

    def _record(self, nodes: Sequence[str], places: list[SharePlace]) -> tuple[SharePlace, ...]:
        """Record the shares of the hosts on these nodes and start copies of them on other hosts' nodes."""
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
        """Copy each share to the next host's node, so that the loss of a node loses no share."""
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
        """Start to place a share on a node: open an offer that is on the node, otherwise copy the first offer."""
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
        log.error("a weight keeper has ended")
        self._on_end()


def by_host(offered: Sequence[KeptShare]) -> list[list[KeptShare]]:
    """Return the offered shares on live nodes, by host. Raises SharesLostError if a host of their group has none."""
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
