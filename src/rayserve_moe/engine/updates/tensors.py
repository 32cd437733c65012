"""Weights that a trainer sends in buckets: each is staged beside the steps, and the last one has all of them serve."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from rayserve_moe.checkpoints.bucket import Heads, SentBucket, SentShares, WantedTensor
from rayserve_moe.engine.command_queue import CommandQueue, EngineStoppedError
from rayserve_moe.engine.executor import Executor, ExecutorFailure
from rayserve_moe.engine.updates.orders import LOST_WHILE_READING, NOTHING_STAGED, WeightOrder, WeightOutcome
from rayserve_moe.requests.records import WeightsRefusedError

log = logging.getLogger(__name__)

IDLE_S = 600.0
"""Longest time between two buckets of an update; after it what has come is forgotten."""
MOST_REMEMBERED = 256
"""Ids of updates that have ended: what is left of one of them must not begin another."""


class UpdateConflictError(ValueError):
    """A bucket that does not follow what was sent before, or a delta of other weights than those that serve."""


@dataclass(frozen=True)
class BucketOrder:
    """One bucket of the update `update_id`; `number`, from 0, is its place among them, where the sender says it.

    With the last one the weights change as `order` says, unless it `waits` for `TensorUpdates.swap`.
    """

    update_id: str
    order: WeightOrder
    number: int | None = None
    is_last: bool = False
    waits: bool = False


@dataclass(frozen=True)
class BetweenSteps:
    """What happens in the engine thread: experts held and let go, weights swapped as for a checkpoint, losses noted."""

    hold: Callable[[], tuple[np.ndarray | None, int]]
    let_go: Callable[[], None]
    swap: Callable[[WeightOrder, int], WeightOutcome]
    note_loss: Callable[..., None]
    version: Callable[[], str]


@dataclass
class _Open:
    """The update that is being sent, and the generation of the hosts that it is sent to."""

    update_id: str
    generation: int
    num_buckets: int = 0


class TensorUpdates:
    """At most one update is open; another id, an update from disk, or `idle_s` without a bucket ends it.

    What is refused ends its update too: nothing has changed then.
    """

    def __init__(
        self, executor: Executor, commands: CommandQueue, *, between: BetweenSteps, updates: ThreadPoolExecutor
    ) -> None:
        self._executor, self._commands, self._between, self._updates = executor, commands, between, updates
        self._open: _Open | None = None
        self._ended: deque[str] = deque(maxlen=MOST_REMEMBERED)
        self._timer: threading.Timer | None = None
        self.idle_s = IDLE_S

    def wanted(self, heads: Heads, order: BucketOrder, *, base_version: str | None) -> Future[list[list[WantedTensor]]]:
        """What every host wants of the tensors of a bucket, before that is cut; begins its update if need be.

        The future fails with UpdateConflictError as in `stage`, and with WeightsRefusedError.
        """
        self._commands.check_open()
        return self._updates.submit(self._wanted, heads, order, base_version)

    def stage(self, bucket: SentBucket | SentShares, order: BucketOrder) -> Future[WeightOutcome]:
        """Stage a bucket; the outcome says whether that succeeded, and with the last one whether all of it serves.

        The future fails with UpdateConflictError for a bucket out of its order.
        """
        self._commands.check_open()
        return self._updates.submit(self._stage, bucket, order)

    def swap(self, update_id: str, order: WeightOrder) -> Future[WeightOutcome]:
        """Have an update serve whose last bucket `waits`."""
        return self._updates.submit(self._swap, update_id, order)

    def num_staged(self, update_id: str) -> int:
        """Buckets of an update that are staged."""
        opened = self._open
        return opened.num_buckets if opened is not None and opened.update_id == update_id else 0

    def drop(self, update_id: str) -> Future[bool]:
        """Forget an update; returns whether it was open. No bucket of it is taken any more."""
        self._commands.check_open()
        return self._updates.submit(self._drop, update_id)

    def end_open(self) -> None:
        """Forget the update that is open, in the thread of updates."""
        self.close()
        if self._open is not None:
            self._ended.append(self._open.update_id)
            self._open = None
            self._executor.tensors.drop()
            with suppress(EngineStoppedError):
                self._commands.call(self._between.let_go)

    def close(self) -> None:
        """Wait for no further bucket."""
        if self._timer is not None:
            self._timer.cancel()

    def _drop(self, update_id: str) -> bool:
        was_open = self._open is not None and self._open.update_id == update_id
        if was_open:
            self.end_open()
        elif update_id not in self._ended:
            self._ended.append(update_id)
        return was_open

    def _wanted(self, heads: Heads, order: BucketOrder, base_version: str | None) -> list[list[WantedTensor]]:
        self._check_order(order)
        self.close()
        found: list[list[WantedTensor]] = []
        with ExitStack() as ending:
            ending.callback(self._drop, order.update_id)
            self._go_on(order.update_id, base_version)
            self._reach(lambda: found.extend(self._executor.tensors.wanted(heads)))
            ending.pop_all()
            self._await_next(order.update_id)
        return found

    def _stage(self, bucket: SentBucket | SentShares, order: BucketOrder) -> WeightOutcome:
        self._check_order(order)
        self.close()
        with ExitStack() as ending:
            ending.callback(self._drop, order.update_id)
            try:
                outcome = self._taken(bucket, order)
            except WeightsRefusedError as refusal:
                return WeightOutcome(False, str(refusal), self._between.version())
            ending.pop_all()
            if not order.is_last or order.waits:
                self._await_next(order.update_id)
            else:
                self._keep_soon()
        return outcome

    def _await_next(self, update_id: str) -> None:
        self._timer = threading.Timer(self.idle_s, self._end_idle, [update_id])
        self._timer.daemon = True
        self._timer.start()

    def _swap(self, update_id: str, order: WeightOrder) -> WeightOutcome:
        opened = self._open
        if opened is None or opened.update_id != update_id:
            return WeightOutcome(False, NOTHING_STAGED, self._between.version())
        try:
            return self._commands.call(partial(self._between.swap, order, opened.generation)).result()
        finally:
            self._keep_soon()

    def _keep_soon(self) -> None:
        """Have what serves now kept, and end the update, after the answer to it; experts are held until then."""
        with suppress(RuntimeError):  # no further update is taken
            self._updates.submit(self._keep)

    def _keep(self) -> None:
        try:
            self._reach(self._executor.tensors.keep)
        except WeightsRefusedError as refusal:
            log.warning("sent weights are not kept, and end with their hosts: %s", refusal)
        finally:
            self.end_open()

    def _check_order(self, order: BucketOrder) -> None:
        """UpdateConflictError where a bucket neither goes on with the open update nor begins one."""
        if order.update_id in self._ended:
            raise UpdateConflictError("this update has ended: begin one with another update_id")
        opened = self._open
        if opened is not None and opened.update_id == order.update_id:
            if order.number not in (None, opened.num_buckets):
                self.end_open()
                raise UpdateConflictError(f"bucket {opened.num_buckets} is missing: the update has ended")
        elif order.number not in (None, 0):
            raise UpdateConflictError("this update has no bucket before this one here: begin with bucket 0")

    def _go_on(self, update_id: str, base_version: str | None) -> _Open:
        """Return the update that is open by now. UpdateConflictError for a delta of other weights."""
        if base_version not in (None, self._between.version()):
            raise UpdateConflictError("`base_version` of the delta is not the version that serves")
        if self._open is None or self._open.update_id != update_id:
            self.end_open()
            expert_of_slot, generation = self._commands.call(self._between.hold).result()
            self._open = _Open(update_id, generation)
            self._reach(partial(self._executor.tensors.begin, expert_of_slot))
        return self._open

    def _taken(self, bucket: SentBucket | SentShares, order: BucketOrder) -> WeightOutcome:
        opened, tensors = self._go_on(order.update_id, bucket.base_version), self._executor.tensors
        if isinstance(bucket, SentShares):
            self._reach(partial(tensors.stage_shares, bucket))
        else:
            self._reach(partial(tensors.stage, bucket.tensors))
        opened.num_buckets += 1
        if not order.is_last:
            return WeightOutcome(True, "the bucket is staged", self._between.version())
        self._reach(tensors.finish)
        if order.waits:
            return WeightOutcome(True, "all buckets are staged", self._between.version())
        return self._commands.call(partial(self._between.swap, order.order, opened.generation)).result()

    def _reach(self, call: Callable[[], None]) -> None:
        """Call hosts; WeightsRefusedError where one is lost."""
        assert self._open is not None, "an update is open"
        try:
            call()
        except ExecutorFailure as failure:
            generation = self._open.generation
            self._commands.call(partial(self._between.note_loss, failure, generation=generation)).result()
            raise WeightsRefusedError(LOST_WHILE_READING) from failure

    def _end_idle(self, update_id: str) -> None:
        with suppress(RuntimeError):  # no further update is taken
            self._updates.submit(self._drop, update_id)
