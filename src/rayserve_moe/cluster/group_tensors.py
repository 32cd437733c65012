"""Weights that are sent, to the hosts of a group: each of them is given its share, as one object per bucket."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, ObjectLostError, RayError, RayTaskError

from rayserve_moe.checkpoints.bucket import Heads, SentShares, SentTensor, WantedTensor, pieces_for
from rayserve_moe.checkpoints.header import CheckpointError
from rayserve_moe.checkpoints.open_shares import SharePlace
from rayserve_moe.cluster.worker_tensors import ADD, BEGIN, FINISH, KEEP, SHARE, WANTED
from rayserve_moe.config.given_files import one_line
from rayserve_moe.engine.executor import ExecutorFailure
from rayserve_moe.execution.weights.staged import too_late
from rayserve_moe.requests.records import WeightsRefusedError

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
