"""Sources of the weights of a group: sent tensors, each host's share of them, and the copies that later hosts read."""

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

from rayserve_moe.checkpoints.bucket import Heads, SentShares, SentTensor, WantedTensor, pieces_for
from rayserve_moe.checkpoints.header import CheckpointError
from rayserve_moe.checkpoints.open_shares import SharePlace
from rayserve_moe.cluster.host_group import GroupWeights
from rayserve_moe.cluster.weight_keepers import KEEP_S, KeptShare, WeightKeepers, by_host
from rayserve_moe.cluster.worker_tensors import ADD, BEGIN, FINISH, KEEP, SHARE, WANTED
from rayserve_moe.config.given_files import one_line
from rayserve_moe.config.settings import ClusterSettings
from rayserve_moe.engine.executor import ExecutorFailure
from rayserve_moe.execution.weights.staged import too_late
from rayserve_moe.observability.fault_points import reach
from rayserve_moe.requests.records import WeightsRefusedError


class WeightSources:
    """Of the weights that serve, and of those that wait on all hosts for the swap. `workers` returns those of now.

    `tensors` takes what is sent, with `timeout_s()` for each call of a host. `on_change` is called once others serve,
    and once those are kept.
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
            workers, timeout_s=timeout_s, on_finish=self.note_sent, on_keep=self.keep, shares=shares
        )

    @property
    def offered(self) -> tuple[KeptShare, ...]:
        """What other replicas can take of weights that were sent, where they serve; empty otherwise."""
        return self.keepers.shares(self.serving.token) if self.serving.token else ()

    def bring(self, nodes: Sequence[str]) -> GroupWeights:
        """Have the weights that serve where hosts are now; returns them. RayError or TimeoutError where none has them.

        What was sent is taken from keepers that live, of this replica or of another that offers it. Where those are
        shares of more or fewer hosts, all of them are offered to each, until `settle`.
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
        """Have hosts that have read shares of more or fewer hosts share what they have in place of those.

        Where memory does not hold both, the others stay. ExecutorFailure where a host is lost.
        """
        if self.serving.offered:
            with suppress(WeightsRefusedError):
                self._share_serving()

    def note_read(self, source: str) -> None:
        """Note that all hosts have staged a checkpoint."""
        self.waiting = GroupWeights(source)

    def note_sent(self, places: Sequence[SharePlace | None]) -> None:
        """Note that all hosts have staged weights that were sent, and share them in these places, if they do."""
        self.waiting = GroupWeights(None, kept=self._kept(places))

    def keep(self) -> None:
        """Have keepers open what hosts share of the weights that serve, where those were sent and are not kept yet.

        WeightsRefusedError where a host cannot in time, ExecutorFailure where one is lost.
        """
        if self.serving.is_there or self._keeps not in ("auto", "after_swap"):
            return
        reach("keeping", self)
        for closing in self.keepers.keep_only(""):
            ray.wait([closing], timeout=KEEP_S)
        self._share_serving()
        self._on_change()

    def swap(self) -> None:
        """Note that what waited serves."""
        self.serving = replace(self.waiting, num_pages=self.serving.num_pages)
        self.keepers.keep_only(self.serving.token)
        self._on_change()

    def _share_serving(self) -> None:
        if kept := self._kept(self.tensors.share_serving(secrets.token_hex(8))):
            self.serving = replace(self.serving, kept=kept, offered=())
            self.keepers.keep_only(self.serving.token)

    def _kept(self, places: Sequence[SharePlace | None]) -> tuple[SharePlace, ...]:
        """Have keepers open the shares of the hosts that serve; returns where they are then.

        ExecutorFailure where one is lost.
        """
        try:
            processes = ray.get([worker.process.remote() for worker in self._workers()]) if places else []
        except RayError as error:
            raise ExecutorFailure(f"a host was lost before its share was kept: {error}") from error
        return self.keepers.keep([process.node_id for process in processes], places)

    def _keep_again(self) -> None:
        """A keeper has ended: others take over the shares that hosts have open."""
        for token in {self.serving.token, self.waiting.token} - {""}:
            with suppress(RayError, WeightsRefusedError, ExecutorFailure):
                if kept := self._kept(self.tensors.places(token)):  # else hosts are being replaced, or have none
                    self.serving = self.serving.kept_at(kept, token)
                    self.waiting = self.waiting.kept_at(kept, token)


POLL_S = 0.005
"""From asking the hosts whether they have staged a bucket to asking again."""
DROP_TIMEOUT_S = 10.0


class GroupTensors:
    """An `engine.executor.TensorReceiver` of the hosts that `workers` returns; each call of them has `timeout_s()`.

    `sent_bytes` counts, by host, what all updates have sent there. `on_finish` is called once all have laid out theirs,
    with where they share it, if `shares`: None of a host that does not. `on_keep` has those shared that serve.
    """

    def __init__(
        self,
        workers: Callable[[], list[ActorHandle]],
        *,
        timeout_s: Callable[[], float],
        on_finish: Callable[[list[SharePlace | None]], None],
        on_keep: Callable[[], None],
        shares: bool,
    ) -> None:
        self._workers, self._timeout_s, self._shares = workers, timeout_s, shares
        self._on_finish, self._on_keep = on_finish, on_keep
        self.sent_bytes: list[int] = []

    def begin(self, expert_of_slot: np.ndarray | None) -> None:
        self._check(self._ask(BEGIN, expert_of_slot))

    def stage(self, tensors: Sequence[SentTensor]) -> None:
        wanted = self.wanted([(tensor.name, tensor.shape) for tensor in tensors])
        objects, sizes = zip(*(_share_of(tensors, share) for share in wanted), strict=True)
        self.stage_shares(SentShares(objects, sizes))

    def wanted(self, heads: Heads) -> list[list[WantedTensor]]:
        shares = self._ask(WANTED, heads)
        self._check([share if isinstance(share, str) else "" for share in shares])
        return shares

    def stage_shares(self, shares: SentShares) -> None:
        """Have every host fetch the object that is its share, from where its sender has put it."""
        workers = self._workers()
        if len(shares.by_host) != len(workers):
            raise WeightsRefusedError(f"{len(shares.by_host)} shares were sent to {len(workers)} hosts")
        before = self.sent_bytes or [0] * len(workers)
        self.sent_bytes = [sent + more for sent, more in zip(before, shares.num_bytes, strict=True)]
        with self._failing():
            calls = [
                worker.take_tensors.remote(ADD, share) for worker, share in zip(workers, shares.by_host, strict=True)
            ]
            ray.get(calls, timeout=self._timeout_s())
        self._wait()

    def finish(self) -> None:
        token = secrets.token_hex(8) if self._shares else ""
        self._ask(FINISH, token)
        self._wait()
        self._on_finish(self.places(token) if token else [])

    def keep(self) -> None:
        self._on_keep()

    def share_serving(self, token: str) -> list[SharePlace | None]:
        """Have the hosts share the weights that serve under a token; returns where, as `places`."""
        self._ask(KEEP, token)
        self._wait()
        return self.places(token)

    def places(self, token: str) -> list[SharePlace | None]:
        """Where the hosts have their shares of the weights `token` open; None of one that has none."""
        return self._ask(SHARE, token)

    def drop(self) -> None:
        with suppress(RayError):  # who is lost is noticed by its steps
            ray.get([worker.drop_staged.remote() for worker in self._workers()], timeout=DROP_TIMEOUT_S)

    def _wait(self) -> None:
        """Wait until every host has staged what it was given. WeightsRefusedError where one has refused it."""
        deadline = time.monotonic() + self._timeout_s()
        while None in (outcomes := self._outcomes()):
            if time.monotonic() > deadline:
                raise too_late(self._timeout_s())
            time.sleep(POLL_S)
        self._check(outcomes)

    def _outcomes(self) -> list[str | None]:
        with self._failing():
            return ray.get([worker.staging_outcome.remote() for worker in self._workers()], timeout=self._timeout_s())

    def _ask(self, call: str, *arguments: Any) -> list[Any]:
        with self._failing():
            calls = [worker.take_tensors.remote(call, *arguments) for worker in self._workers()]
            return ray.get(calls, timeout=self._timeout_s())

    def _check(self, refusals: Sequence[str | None]) -> None:
        """WeightsRefusedError of the first host that has refused."""
        for host_id, refusal in enumerate(refusals):
            if refusal:
                raise WeightsRefusedError(f"host {host_id}: {refusal}")

    @contextmanager
    def _failing(self) -> Generator[None]:
        """Turn errors of Ray into refusals, or into the loss of a host."""
        try:
            yield
        except GetTimeoutError as error:
            raise too_late(self._timeout_s()) from error
        except ObjectLostError as error:
            raise WeightsRefusedError("the weights were lost with who sent them") from error
        except RayTaskError as error:
            raise WeightsRefusedError("a host could not take the weights") from error
        except RayError as error:
            raise ExecutorFailure(f"a host was lost while it took new weights: {error}") from error


def _share_of(tensors: Sequence[SentTensor], wanted: Sequence[WantedTensor]) -> tuple[ray.ObjectRef, int]:
    try:
        pieces = pieces_for(tensors, wanted)
    except CheckpointError as error:
        raise WeightsRefusedError(one_line(str(error))) from error
    return ray.put(pieces), sum(piece.num_bytes for piece in pieces)
