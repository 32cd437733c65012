"""Sources of a group's weights: sent tensors, each host's share of them, and the copies that later hosts read."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, ObjectLostError, RayError, RayTaskError

from rayserve_moe.checkpoints.bucket import Heads, SentAdapter, SentShares, SentTensor, WantedTensor, pieces_for
from rayserve_moe.checkpoints.header import CheckpointError
from rayserve_moe.checkpoints.open_shares import SharePlace
from rayserve_moe.cluster.host_group import GroupWeights
from rayserve_moe.cluster.weight_keepers import KEEP_S, KeptShare, WeightKeepers, by_host
from rayserve_moe.cluster.worker_tensors import (
    ADD,
    ADD_ADAPTER,
    BEGIN,
    DROP_ADAPTERS,
    FINISH,
    KEEP,
    MERGE,
    ROUNDING,
    SHARE,
    WANTED,
)
from rayserve_moe.config.given_files import one_line
from rayserve_moe.config.settings import ClusterSettings
from rayserve_moe.engine.executor import ExecutorFailure
from rayserve_moe.execution.weights.staged import too_late
from rayserve_moe.observability.fault_points import reach
from rayserve_moe.requests.records import WeightsRefusedError


class WeightSources:
    """Tracks the serving weights and the weights that wait on all hosts for the swap.

    `workers` returns the current workers. `tensors` receives sent weights, with `timeout_s()` for each call of a host.
    `on_change` is called after a swap and after the serving weights are kept.
    """

    def __init__(
        self,
        workers: Callable[[], list[ActorHandle]],
        cluster: ClusterSettings,
        *,
        timeout_s: Callable[[], float],
        on_change: Callable[[], object],
    ) -> None:
        self._workers, self._keeps, self._on_change = workers, cluster.keep_sent_weights, on_change
        self.serving = self.waiting = GroupWeights()
        self.keepers = WeightKeepers(self._keep_again, keeps_next=cluster.keep_next_weights)
        shares = self._keeps in ("auto", "before_swap")
        self.tensors = GroupTensors(
            workers,
            timeout_s=timeout_s,
            on_finish=self.record_sent,
            on_keep=self.keep,
            on_drop=self.drop_waiting,
            shares=shares,
        )
        self.adapters = GroupAdapters(self.tensors)

    @property
    def offered(self) -> tuple[KeptShare, ...]:
        """Return the shares of the serving weights that other replicas can take; empty unless those were sent."""
        return self.keepers.shares(self.serving.token) if self.serving.token else ()

    def bring(self, nodes: Sequence[str]) -> GroupWeights:
        """Move the serving weights to the hosts' current nodes; return them.

        Sent weights are taken from live keepers of this replica, or of another replica that offers them. Shares of a
        group of another size are all offered to each host, until `settle`. Raises RayError or TimeoutError if no keeper
        has them.
        """
        serving = self.serving
        offered = [*self.keepers.shares(serving.token), *serving.offered]
        if serving.num_hosts not in (None, len(nodes)):
            serving = replace(serving, kept=(), offered=tuple(each[0] for each in by_host(offered)), placement=None)
        elif serving.offered:
            serving = replace(serving, kept=self.keepers.take(offered, nodes), offered=())
        elif serving.kept:
            serving = replace(serving, kept=self.keepers.move(serving.kept, nodes))
        self.serving = serving
        return serving

    def settle(self) -> None:
        """Make hosts that loaded shares of a group of another size share their own weights in place of them.

        If memory does not hold both, the old shares stay. Raises ExecutorFailure if a host is lost.
        """
        if self.serving.offered:
            with suppress(WeightsRefusedError):
                self._share_serving()

    def record_read(self, source: str) -> None:
        """Record that all hosts have staged a checkpoint."""
        self.waiting = GroupWeights(source)

    def record_sent(self, places: Sequence[SharePlace | None]) -> None:
        """Record that all hosts have staged sent weights, with the locations of their shares, if they share them."""
        self.waiting = GroupWeights(None, kept=self._kept(places))

    def drop_waiting(self) -> None:
        """Forget the waiting weights, and make keepers close their shares."""
        waiting, self.waiting = self.waiting, GroupWeights()
        if waiting.token not in ("", self.serving.token):
            self.keepers.keep_only(self.serving.token)

    def keep(self) -> None:
        """Make keepers open the hosts' shares of the serving weights, if those were sent and are not kept yet.

        Raises WeightsRefusedError if a host cannot do so in time, ExecutorFailure if a host is lost.
        """
        if self.serving.is_there or self._keeps not in ("auto", "after_swap"):
            return
        reach("keeping", self)
        for closing in self.keepers.keep_only(""):
            ray.wait([closing], timeout=KEEP_S)
        self._share_serving()
        self._on_change()

    def swap(self) -> None:
        """Record that the waiting weights serve now."""
        self.serving = replace(self.waiting, num_pages=self.serving.num_pages)
        self.keepers.keep_only(self.serving.token)
        self._on_change()

    def _share_serving(self) -> None:
        if kept := self._kept(self.tensors.share_serving(secrets.token_hex(8))):
            self.serving = replace(self.serving, kept=kept, offered=())
            self.keepers.keep_only(self.serving.token)

    def _kept(self, places: Sequence[SharePlace | None]) -> tuple[SharePlace, ...]:
        """Make keepers open the shares of the serving hosts; return their locations.

        Raises ExecutorFailure if a host is lost.
        """
        try:
            processes = ray.get([worker.process.remote() for worker in self._workers()]) if places else []
        except RayError as error:
            raise ExecutorFailure(f"a host was lost before its share was kept: {error}") from error
        return self.keepers.keep([process.node_id for process in processes], places)

    def _keep_again(self) -> None:
        """Make new keepers open the hosts' shares after a keeper has ended."""
        for token in {self.serving.token, self.waiting.token} - {""}:
            with suppress(RayError, WeightsRefusedError, ExecutorFailure):
                if kept := self._kept(self.tensors.places(token)):  # empty if hosts are being replaced
                    self.serving = self.serving.kept_at(kept, token)
                    self.waiting = self.waiting.kept_at(kept, token)


class GroupAdapters:
    """An `engine.executor.AdapterHosts` of the hosts that receive `tensors`."""

    def __init__(self, tensors: GroupTensors) -> None:
        self._tensors = tensors
        self._held: dict[str, SentAdapter] = {}
        """By key."""

    def add(self, key: str, adapter: SentAdapter) -> None:
        self._held[key] = adapter  # hosts that replace others meanwhile receive it too
        try:
            self._send(key, adapter)
        except (WeightsRefusedError, ExecutorFailure):
            self._held.pop(key, None)
            raise

    def drop(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._held.pop(key, None)
        if keys:
            self._tensors.ask(DROP_ADAPTERS, list(keys))

    def add_again(self) -> None:
        """Give new hosts the adapters that the former hosts held. Raises ExecutorFailure if a host is lost."""
        for key, adapter in list(self._held.items()):
            self._send(key, adapter)  # a failure keeps it in `_held` for the next hosts

    def _send(self, key: str, adapter: SentAdapter) -> None:
        body = ray.put(adapter.body)
        reach("sending adapter", self)
        self._tensors.check(self._tensors.ask(ADD_ADAPTER, key, body))


POLL_S = 0.005
"""Interval for asking the hosts whether they have staged a bucket."""
DROP_TIMEOUT_S = 10.0


class GroupTensors:
    """An `engine.executor.TensorReceiver` of the hosts that `workers` returns, with `timeout_s()` for each call.

    `sent_bytes` counts the bytes sent to each host by all updates. `on_finish` is called once all hosts have laid out
    their weights, with the locations of their shares if `shares` (None for a host without). `on_keep` shares the
    serving weights. `on_drop` is called once the hosts have dropped what they staged.
    """

    def __init__(
        self,
        workers: Callable[[], list[ActorHandle]],
        *,
        timeout_s: Callable[[], float],
        on_finish: Callable[[list[SharePlace | None]], None],
        on_keep: Callable[[], None],
        on_drop: Callable[[], None],
        shares: bool,
    ) -> None:
        self._workers, self._timeout_s, self._shares = workers, timeout_s, shares
        self._on_finish, self._on_keep, self._on_drop = on_finish, on_keep, on_drop
        self.sent_bytes: list[int] = []

    def begin(self, expert_of_slot: np.ndarray | None) -> None:
        self.check(self.ask(BEGIN, expert_of_slot))

    def stage(self, tensors: Sequence[SentTensor]) -> None:
        wanted = self.wanted([(tensor.name, tensor.shape) for tensor in tensors])
        objects, sizes = zip(*(_share_of(tensors, share) for share in wanted), strict=True)
        self.stage_shares(SentShares(objects, sizes))

    def wanted(self, heads: Heads) -> list[list[WantedTensor]]:
        shares = self.ask(WANTED, heads)
        self.check([share if isinstance(share, str) else "" for share in shares])
        return shares

    def stage_shares(self, shares: SentShares) -> None:
        """Make every host fetch its share, an object in its sender's store."""
        workers = self._workers()
        if len(shares.by_host) != len(workers):
            raise WeightsRefusedError(f"{len(shares.by_host)} shares were sent to {len(workers)} hosts")
        before = self.sent_bytes or [0] * len(workers)
        self.sent_bytes = [sent + more for sent, more in zip(before, shares.num_bytes, strict=True)]
        with self._failing():
            calls = [worker.answer.remote(ADD, share) for worker, share in zip(workers, shares.by_host, strict=True)]
            ray.get(calls, timeout=self._timeout_s())
        self._wait()

    def merge(self, adapter: SentAdapter) -> float:
        body = ray.put(adapter.body)
        self.ask(MERGE, body)
        reach("merging", self)
        self._wait()
        return max(self.ask(ROUNDING))

    def finish(self) -> None:
        token = secrets.token_hex(8) if self._shares else ""
        self.ask(FINISH, token)
        self._wait()
        self._on_finish(self.places(token) if token else [])

    def keep(self) -> None:
        self._on_keep()

    def share_serving(self, token: str) -> list[SharePlace | None]:
        """Make the hosts share the serving weights under a token; return the locations as `places` does."""
        self.ask(KEEP, token)
        self._wait()
        return self.places(token)

    def places(self, token: str) -> list[SharePlace | None]:
        """Return each host's open share of the weights `token`; None for a host that has none."""
        return self.ask(SHARE, token)

    def drop(self) -> None:
        with suppress(RayError):  # A lost host is noticed by its steps.
            ray.get([worker.drop_staged.remote() for worker in self._workers()], timeout=DROP_TIMEOUT_S)
        self._on_drop()

    def _wait(self) -> None:
        """Wait until every host has staged its part. Raises WeightsRefusedError if a host has refused it."""
        deadline = time.monotonic() + self._timeout_s()
        while None in (outcomes := self._outcomes()):
            if time.monotonic() > deadline:
                raise too_late(self._timeout_s())
            time.sleep(POLL_S)
        self.check(outcomes)

    def _outcomes(self) -> list[str | None]:
        with self._failing():
            return ray.get([worker.staging_outcome.remote() for worker in self._workers()], timeout=self._timeout_s())

    def ask(self, call: str, *arguments: Any) -> list[Any]:
        """Return the hosts' answers to a call. Raises ExecutorFailure if a host is lost."""
        with self._failing():
            calls = [worker.answer.remote(call, *arguments) for worker in self._workers()]
            return ray.get(calls, timeout=self._timeout_s())

    def check(self, refusals: Sequence[str | None]) -> None:
        """Raise WeightsRefusedError with the first host's refusal, if any."""
        for host_id, refusal in enumerate(refusals):
            if refusal:
                raise WeightsRefusedError(f"host {host_id}: {refusal}")

    @contextmanager
    def _failing(self) -> Generator[None]:
        """Turn Ray's errors into refusals or the loss of a host."""
        try:
            yield
        except GetTimeoutError as error:
            raise too_late(self._timeout_s()) from error
        except ObjectLostError as error:
            raise WeightsRefusedError("the weights were lost because their sender has ended") from error
        except RayTaskError as error:
            raise WeightsRefusedError("a host could not receive the weights") from error
        except RayError as error:
            raise ExecutorFailure(f"a host was lost while it received new weights: {error}") from error


def _share_of(tensors: Sequence[SentTensor], wanted: Sequence[WantedTensor]) -> tuple[ray.ObjectRef, int]:
    try:
        pieces = pieces_for(tensors, wanted)
    except CheckpointError as error:
        raise WeightsRefusedError(one_line(str(error))) from error
    return ray.put(pieces), sum(piece.num_bytes for piece in pieces)
