"""Control of a running engine by a trainer: pause, resume, and weight updates in one or two phases."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from rayserve_moe.config.given_files import is_url
from rayserve_moe.engine.adapters import AdapterTable, with_key
from rayserve_moe.engine.command_queue import CommandQueue, EngineStoppedError
from rayserve_moe.engine.cycle import NO_ROWS, StepCycle
from rayserve_moe.engine.eplb.steps import EplbSteps
from rayserve_moe.engine.executor import Executor, ExecutorFailure
from rayserve_moe.engine.extension import extension_of
from rayserve_moe.engine.host_pages import HostedPages
from rayserve_moe.engine.output_dispatch import OutputDispatch
from rayserve_moe.engine.page_watch import PageWatch
from rayserve_moe.engine.pushed_pages import PagePushes
from rayserve_moe.engine.recovery.hosts import Recovery
from rayserve_moe.engine.updates.adapters import AdapterLoads
from rayserve_moe.engine.updates.orders import (
    LOST_WHILE_CHANGING,
    LOST_WHILE_READING,
    NOTHING_STAGED,
    WeightOrder,
    WeightOutcome,
)
from rayserve_moe.engine.updates.tensors import BetweenSteps, TensorUpdates
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.records import GenerationRequest, ModelCard, RequestError, WeightsRefusedError
from rayserve_moe.scheduling.recovery import add_choices
from rayserve_moe.scheduling.scheduler import unfinished
from rayserve_moe.scheduling.sequence import Sequence

PAUSE_MODES = ("abort", "retract", "in_place")
ABORTED = FinishReason("abort")
"""The finish reason of an aborted choice."""


class EngineControl:
    """Commands for a running engine, which take effect between two steps. All may be called from any thread.

    Weight updates run one at a time. A pause lets the step in flight finish; new requests wait until `resume`. `card`
    describes the current model.
    """

    def __init__(
        self,
        cycle: StepCycle,
        executor: Executor,
        *,
        eplb: EplbSteps,
        outputs: OutputDispatch,
        commands: CommandQueue,
        card: ModelCard,
    ) -> None:
        self._cycle, self._outputs, self._commands = cycle, outputs, commands
        self._eplb = eplb
        self._updates = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
        self._mode: str | None = None
        self._held: list[list[Sequence]] | None = None
        self.num_updates = 0
        self.card = card
        self.base_path = card.path
        """Path of the configured checkpoint."""
        self.adapter: str | None = ""
        """Name of the merged adapter; empty: the configured checkpoint serves; None: other weights do."""
        between = BetweenSteps(
            self._hold_experts, eplb.resume, self._swap, self.record_loss, lambda: self.card.weight_version
        )
        self.tensors = TensorUpdates(executor, commands, between=between, updates=self._updates)
        self.staged = StagedUpdates(executor, commands, between, self.tensors, self._updates)
        table = extension_of(cycle.extensions, AdapterTable)
        self.adapters = None
        """Loads adapters beside the weights; None on a server without."""
        if table is not None:
            self.adapters = AdapterLoads(
                table,
                executor,
                commands,
                self._updates,
                version=lambda: self.card.weight_version,
                generation=lambda: self._generation,
                record_loss=self.record_loss,
            )
        self.pages = PageWatch(cycle, commands)
        self.pushes = None
        """Sends pages to other replicas and receives theirs; None on a server without pages in host memory."""
        if extension_of(cycle.extensions, HostedPages) is not None:
            self.pushes = PagePushes(
                cycle,
                executor.pages,
                commands=commands,
                outputs=outputs,
                version=lambda: self.card.weight_version,
                admit=self._queue,
            )

    @property
    def is_paused(self) -> bool:
        return self._cycle.is_paused

    @property
    def _generation(self) -> int:
        return self._cycle.losses.generation

    def pause(self, mode: str) -> Future[None]:
        """Run no steps until `resume`; the future is done once no step is in flight.

        Mode `abort` ends all requests. `retract` preempts them, so that they are recomputed. `in_place` keeps their
        pages. Repeating the current mode has no effect.

        Raises: RequestError for an unknown mode.
        """
        if mode not in PAUSE_MODES:
            raise RequestError(f"`mode` must be one of {', '.join(PAUSE_MODES)}", "mode")
        return self._commands.call(partial(self._pause, mode))

    def admit(self, choices: list[Sequence], *, resumes: bool = True) -> None:
        """Queue the choices of a request, or hold them until the next pause begins or ends. Call in the engine thread.

        Without `resumes`, no choice has outputs.
        """
        if resumes and self._held is None:
            add_choices(self._cycle.scheduler, choices)
        elif self._held is not None or self.pushes is None or not self.pushes.begin(choices):
            self._queue(choices)

    def hold_new(self) -> Future[None]:
        """Hold new requests until a pause begins or ends; running requests continue to their end."""
        return self._commands.call(partial(self._hold_new, True))

    @property
    def num_held(self) -> int:
        """Return the number of unfinished requests held by `hold_new`."""
        return len([choices for choices in self._held or () if any(each.finish is None for each in choices)])

    def resume(self) -> Future[None]:
        """End a pause, if any."""
        return self._commands.call(self._resume)

    def update_weights(self, order: WeightOrder) -> Future[WeightOutcome]:
        """Stage a checkpoint on every host while steps continue, then switch to it between two steps.

        The old weights stay if a host rejects the checkpoint or is lost before all hosts have switched; the outcome
        gives the reason. If hosts cannot be replaced, the loss fails the engine and the future.

        Raises: RequestError for a path that is neither absolute nor a URL.
        """
        if not (Path(order.model_path).is_absolute() or is_url(order.model_path)):
            raise RequestError("`model_path` must be an absolute path or a URL", "model_path")
        self._commands.check_open()
        return self.staged.run(order)

    def rename_weights(self, weight_version: str, *, aborts_requests: bool = False) -> Future[None]:
        """Change the version of the current weights; results of later steps report it."""
        return self._commands.call(partial(self._rename, weight_version, aborts_requests))

    def flush(self, *, retracts: bool = False) -> Future[bool]:
        """Flush the prefix cache unless requests run or are about to run; the future tells if it was flushed.

        Requests that wait for the end of a pause hold no pages. `retracts` preempts running requests first.
        """
        return self._commands.call(partial(self._flush, retracts))

    def end(self, sequences: Iterable[Sequence], reason: FinishReason) -> None:
        """End the choices that have not ended, in the engine thread."""
        for sequence in sequences:
            if sequence.finish is None:
                self._outputs.publish(NO_ROWS, [self._cycle.end(sequence, reason)], now=time.monotonic())

    def record_loss(self, failure: ExecutorFailure, *, generation: int | None = None) -> None:
        """Replace the hosts after a loss outside of a step. Call in the engine thread.

        Nothing happens if hosts of a `generation` other than the current are reported.
        """
        if generation in (None, self._generation):
            self._outputs.publish(*self._cycle.on_executor_failure(failure), now=time.monotonic())

    def close(self) -> None:
        """Start no further updates."""
        self.tensors.close()
        if self.pushes is not None:
            self.pushes.close()
        self._updates.shutdown(wait=False, cancel_futures=True)

    def _queue(self, choices: list[Sequence]) -> None:
        """Queue the choices of a new request, or hold them."""
        if self._held is not None:
            self._held.append(choices)
        else:
            self._cycle.scheduler.add(choices)

    def _unfinished(self) -> list[Sequence]:
        """Return all choices that have not ended, including those whose pages are on their way."""
        held = [] if self.pushes is None else [choice for choices in self.pushes.held.values() for choice in choices]
        return [*unfinished(self._cycle.scheduler), *(choice for choice in held if choice.finish is None)]

    def _pause(self, mode: str) -> None:
        self._drain()
        self._cycle.is_paused = True
        if mode == "abort" and self._mode != mode:
            self.end(self._unfinished(), ABORTED)
        if mode == "retract":
            self._cycle.retract()
        self._mode = mode
        self._hold_new(False)

    def _resume(self) -> None:
        self._cycle.is_paused, self._mode = False, None
        self._hold_new(False)

    def _hold_new(self, is_on: bool) -> None:
        held, self._held = self._held or [], None
        for choices in held:
            if any(each.finish is None for each in choices):
                self.admit(choices)
        self._held = [] if is_on else None

    def _rename(self, weight_version: str, aborts_requests: bool) -> None:
        self._drain()
        if aborts_requests:
            self.end(self._unfinished(), ABORTED)
        self._cycle.rename_weights(weight_version)
        self.card = replace(self.card, weight_version=weight_version)

    def _flush(self, retracts: bool) -> bool:
        scheduler = self._cycle.scheduler
        self._drain()
        if retracts:
            self._cycle.retract()
        if scheduler.running or (scheduler.waiting and not self.is_paused and not retracts):
            return False
        scheduler.flush()
        return True

    def _drain(self) -> None:
        self._outputs.publish(*self._cycle.drain(), now=time.monotonic())

    def _swap(self, order: WeightOrder, generation: int) -> WeightOutcome:
        started = time.perf_counter()
        self._drain()
        if self._generation != generation:
            return WeightOutcome(False, LOST_WHILE_READING, self.card.weight_version)
        there = self._unfinished()
        if order.aborts_requests:
            self.end(there, ABORTED)
        version = following_version(self) if order.weight_version is None else order.weight_version
        if not self._cycle.take_staged_weights(version, are_sent=not order.model_path):
            return WeightOutcome(False, LOST_WHILE_CHANGING, self.card.weight_version, gap_s=_since(started))
        self.num_updates += 1
        self.card = replace(self.card, weight_version=version, path=order.model_path or self.card.path)
        self.adapter = "" if order.model_path == self.base_path else order.adapter
        num_paused = len(there) if self._cycle.is_paused else 0
        return WeightOutcome(True, "the new weights serve", version, num_paused, _since(started))

    def _hold_experts(self) -> tuple[np.ndarray | None, int]:
        """Stop moving experts; return their placement (None if experts never move) and the generation of the hosts."""
        if not self._eplb.moves_experts:
            return None, self._generation
        self._drain()
        return self._eplb.hold().expert_of_slot, self._generation


def following_version(control: EngineControl) -> str:
    """Return the number after the last version, or the number of this update if the last version is no number."""
    last = control.card.weight_version
    return str(int(last) + 1 if last.isdecimal() else control.num_updates + 1)


def aborted(control: EngineControl, sequences: Iterable[Sequence]) -> Future[None]:
    """Abort choices, from any thread; the future is done once they have ended."""
    return control._commands.call(partial(control.end, sequences, ABORTED))


def keyed(control: EngineControl, request: GenerationRequest) -> GenerationRequest:
    """Return a request with the key of its adapter, from any thread.

    Raises: UnknownAdapterError if its adapter is not loaded.
    """
    loads = control.adapters
    with control._commands.lock:
        return with_key(request, loads.table if loads else None, merged=control.adapter)


def _since(started: float) -> float:
    return time.perf_counter() - started


def replace_lost(control: EngineControl, recovery: Recovery) -> None:
    """Replace hosts whose loss was noticed outside of a step, unless they are replaced already."""
    if (failure := recovery.loss) is not None:
        control.record_loss(failure)


@dataclass
class StagedUpdates:
    """Weight updates from a checkpoint, in two phases.

    Calls may come from any thread; the update thread runs them.
    """

    executor: Executor
    commands: CommandQueue
    between: BetweenSteps
    tensors: TensorUpdates
    updates: ThreadPoolExecutor
    _generation: int | None = None
    """Generation of the hosts that staged a checkpoint; None without a staged checkpoint."""

    def run(self, order: WeightOrder) -> Future[WeightOutcome]:
        """Stage a checkpoint, then serve it."""
        return self.updates.submit(self._run, order)

    def stage(self, model_path: str) -> Future[str]:
        """Have every host read and check a checkpoint; the result is empty on success, else the reason."""
        return self.updates.submit(self._stage, model_path)

    def swap(self, order: WeightOrder) -> Future[WeightOutcome]:
        """Serve the staged checkpoint."""
        return self.updates.submit(self._swap, order)

    def drop(self) -> Future[None]:
        """Drop the staged checkpoint."""
        return self.updates.submit(self._drop)

    def _run(self, order: WeightOrder) -> WeightOutcome:
        if refusal := self._stage(order.model_path):
            return WeightOutcome(False, refusal, self.between.version())
        return self._swap(order)

    def _stage(self, model_path: str) -> str:
        self._drop()
        self.tensors.end_open()
        with ExitStack() as undo:
            undo.callback(self._release)
            expert_of_slot, generation = self.commands.call(self.between.hold).result()
            try:
                self._reach(model_path, expert_of_slot, generation)
            except WeightsRefusedError as refusal:
                return str(refusal)
            self._generation = generation
            undo.pop_all()
        return ""

    def _reach(self, model_path: str, expert_of_slot: np.ndarray | None, generation: int) -> None:
        """Have every host read a checkpoint. Raises: WeightsRefusedError if a host refuses it or is lost."""
        try:
            self.executor.stage_weights(model_path, expert_of_slot)
        except ExecutorFailure as failure:
            self.commands.call(partial(self.between.record_loss, failure, generation=generation)).result()
            raise WeightsRefusedError(LOST_WHILE_READING) from failure

    def _swap(self, order: WeightOrder) -> WeightOutcome:
        generation, self._generation = self._generation, None
        if generation is None:
            return WeightOutcome(False, NOTHING_STAGED, self.between.version())
        try:
            return self.commands.call(partial(self.between.swap, order, generation)).result()
        finally:
            self._release()

    def _drop(self) -> None:
        if self._generation is not None:
            self._generation = None
            self.executor.tensors.drop()
            self._release()

    def _release(self) -> None:
        with suppress(EngineStoppedError):
            self.commands.call(self.between.release)
