"""Weights sent by a trainer in buckets: each bucket is staged beside the steps, the last bucket activates all."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np

from rayserve_moe.checkpoints.bucket import Heads, SentAdapter, SentBucket, SentShares, WantedTensor
from rayserve_moe.engine.command_queue import CommandQueue, EngineStoppedError
from rayserve_moe.engine.executor import Executor, ExecutorFailure
from rayserve_moe.engine.updates.orders import LOST_WHILE_READING, NOTHING_STAGED, WeightOrder, WeightOutcome
from rayserve_moe.requests.records import WeightsRefusedError

log = logging.getLogger(__name__)

Value = TypeVar("Value")
AnyBucket = SentBucket | SentShares | SentAdapter

IDLE_S = 600.0
"""Maximum seconds between two buckets of an update; then its staged weights are dropped."""
MAX_REMEMBERED = 256
"""Number of ended updates whose ids are remembered, so that a late bucket does not begin another update."""


class UpdateConflictError(ValueError):
    """Raised for a bucket out of order, or for a delta against weights other than the current."""


@dataclass(frozen=True)
class BucketOrder:
    """A bucket of an update."""

    update_id: str
    """Identifies the update."""
    order: WeightOrder
    """Change of the weights after the last bucket."""
    number: int | None = None
    """Index of the bucket, from 0; None if the sender does not number buckets."""
    is_last: bool = False
    waits: bool = False
    """True if the weights change by `TensorUpdates.swap` instead of with the last bucket."""


@dataclass(frozen=True)
class BetweenSteps:
    """Commands that run in the engine thread."""

    hold: Callable[[], tuple[np.ndarray | None, int]]
    """Stop moving experts; return their placement and the generation of the hosts."""
    release: Callable[[], None]
    """Let experts move again."""
    swap: Callable[[WeightOrder, int], WeightOutcome]
    """Activate the staged weights, as for a checkpoint."""
    record_loss: Callable[..., None]
    """Record the loss of a host."""
    version: Callable[[], str]
    """Return the current weight version."""


@dataclass
class _Open:
    """The update that is being sent."""

    update_id: str
    generation: int
    """Generation of the hosts that it is sent to."""
    num_buckets: int = 0


class TensorUpdates:
    """Updates by sent weights; at most a single update is open.

    Another id, an update from a checkpoint, or `idle_s` without a bucket ends the open update. So does a rejected
    bucket; the current weights then stay.
    """

    def __init__(
        self, executor: Executor, commands: CommandQueue, *, between: BetweenSteps, updates: ThreadPoolExecutor
    ) -> None:
        self._executor, self._commands, self._between, self._updates = executor, commands, between, updates
        self._open: _Open | None = None
        self._ended: deque[str] = deque(maxlen=MAX_REMEMBERED)
        self._timer: threading.Timer | None = None
        self.idle_s = IDLE_S

    def wanted(self, heads: Heads, order: BucketOrder, *, base_version: str | None) -> Future[list[list[WantedTensor]]]:
        """Return the parts that each host wants of a bucket's tensors, before it is cut.

        Begins the update if necessary.

        The future fails with UpdateConflictError as in `stage`, or with WeightsRefusedError.
        """
        self._commands.check_open()
        return self._updates.submit(self._wanted, heads, order, base_version)

    def stage(self, bucket: AnyBucket, order: BucketOrder) -> Future[WeightOutcome]:
        """Stage a bucket. The outcome tells if it is staged, or for the last bucket if the new weights are active.

        The future fails with UpdateConflictError for a bucket out of order.
        """
        self._commands.check_open()
        return self._updates.submit(self._stage, bucket, order)

    def swap(self, update_id: str, order: WeightOrder) -> Future[WeightOutcome]:
        """Activate an update whose last bucket `waits`."""
        return self._updates.submit(self._swap, update_id, order)

    def num_staged(self, update_id: str) -> int:
        """Return the number of staged buckets of an update."""
        opened = self._open
        return opened.num_buckets if opened is not None and opened.update_id == update_id else 0

    def drop(self, update_id: str) -> Future[bool]:
        """Drop an update, and reject its later buckets; the future tells if it was open."""
        self._commands.check_open()
        return self._updates.submit(self._drop, update_id)

    def end_open(self) -> None:
        """Drop the open update. Call in the update thread."""
        self.close()
        if self._open is not None:
            self._ended.append(self._open.update_id)
            self._open = None
            self._executor.tensors.drop()
            with suppress(EngineStoppedError):
                self._commands.call(self._between.release)

    def close(self) -> None:
        """Cancel the timer for the next bucket."""
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

    def _stage(self, bucket: AnyBucket, order: BucketOrder) -> WeightOutcome:
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
        """Have the current weights kept and end the update, once the caller has its answer; experts stay until then."""
        with suppress(RuntimeError):  # the update thread is shut down
            self._updates.submit(self._keep)

    def _keep(self) -> None:
        try:
            self._reach(self._executor.tensors.keep)
        except WeightsRefusedError as refusal:
            log.warning("the sent weights are not kept, and are lost with their hosts: %s", refusal)
        finally:
            self.end_open()

    def _check_order(self, order: BucketOrder) -> None:
        """Raise UpdateConflictError if a bucket neither continues the open update nor begins an update."""
        if order.update_id in self._ended:
            raise UpdateConflictError("this update has ended: begin another with a new update_id")
        opened = self._open
        if opened is not None and opened.update_id == order.update_id:
            if order.number not in (None, opened.num_buckets):
                self.end_open()
                raise UpdateConflictError(f"bucket {opened.num_buckets} is missing: the update has ended")
        elif order.number not in (None, 0):
            raise UpdateConflictError("the previous buckets of this update are missing here: begin with bucket 0")

    def _go_on(self, update_id: str, base_version: str | None) -> _Open:
        """Return the update of this id, opened if necessary.

        Raises: UpdateConflictError for a delta against other weights.
        """
        if base_version not in (None, self._between.version()):
            raise UpdateConflictError("`base_version` of the delta is not the current weight version")
        if self._open is None or self._open.update_id != update_id:
            self.end_open()
            expert_of_slot, generation = self._commands.call(self._between.hold).result()
            self._open = _Open(update_id, generation)
            self._reach(partial(self._executor.tensors.begin, expert_of_slot))
        return self._open

    def _taken(self, bucket: AnyBucket, order: BucketOrder) -> WeightOutcome:
        opened, tensors = self._go_on(order.update_id, bucket.base_version), self._executor.tensors
        max_rounding: float | None = None
        if isinstance(bucket, SentAdapter):
            if opened.num_buckets or not order.is_last:
                raise WeightsRefusedError("an adapter is an update of its own: send it as the only bucket, the last")
            max_rounding = self._reach(partial(tensors.merge, bucket))
        elif isinstance(bucket, SentShares):
            self._reach(partial(tensors.stage_shares, bucket))
        else:
            self._reach(partial(tensors.stage, bucket.tensors))
        opened.num_buckets += 1
        if not order.is_last:
            return WeightOutcome(True, "the bucket is staged", self._between.version())
        self._reach(tensors.finish)
        if order.waits:
            return WeightOutcome(True, "all buckets are staged", self._between.version(), max_rounding=max_rounding)
        outcome = self._commands.call(partial(self._between.swap, order.order, opened.generation)).result()
        return replace(outcome, max_rounding=max_rounding)

    def _reach(self, call: Callable[[], Value]) -> Value:
        """Call the hosts and return their answer.

        Raises: WeightsRefusedError if a host is lost.
        """
        assert self._open is not None, "an update is open"
        try:
            return call()
        except ExecutorFailure as failure:
            generation = self._open.generation
            self._commands.call(partial(self._between.record_loss, failure, generation=generation)).result()
            raise WeightsRefusedError(LOST_WHILE_READING) from failure

    def _end_idle(self, update_id: str) -> None:
        """Drop an update that has received no bucket for `idle_s`."""
        with suppress(RuntimeError):  # the update thread is shut down
            self._updates.submit(self._drop, update_id)
