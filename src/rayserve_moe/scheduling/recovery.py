"""Scheduling after a loss: dropped steps, trials of suspects, and requests that continue after known outputs."""

from __future__ import annotations

import numpy as np

from rayserve_moe.scheduling.forks import release_followers
from rayserve_moe.scheduling.scheduler import Scheduler
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.step_plan import AWAITED, StepPlan
from rayserve_moe.scheduling.waiting_queue import WaitingQueue


def give_up_step(scheduler: Scheduler, plan: StepPlan) -> list[Sequence]:
    """Undo a submitted step and return its sequences. All running sequences must be preempted afterwards.

    Awaited chunks follow chunks of another step, which is undone as well.
    """
    table, chunks = scheduler.table, plan.chunks
    is_known = chunks.starts > AWAITED
    starts = np.where(chunks.lengths > 0, chunks.starts, 0)
    np.minimum.at(table.num_computed, chunks.rows[is_known], starts[is_known])
    return [sequence for row in chunks.rows.tolist() if (sequence := table.sequences[row])]


def hold_back_all_but(scheduler: Scheduler, kept: list[Sequence]) -> None:
    """Admit only `kept` and new requests until `admit_all`. If `kept` is empty, admit all."""
    if kept:
        scheduler.held += [each for each in scheduler.waiting if each not in kept]
        scheduler.waiting = WaitingQueue(each for each in scheduler.waiting if each in kept)


def admit_all(scheduler: Scheduler) -> None:
    """Return held sequences to the front of the queue."""
    for sequence in reversed(scheduler.held):
        scheduler.waiting.insert(0, sequence)
    scheduler.held = []


def use_ranks(scheduler: Scheduler, num_ranks: int) -> None:
    """Admit only to the first `num_ranks` data ranks, after devices were lost or have returned.

    No sequence may be running.
    """
    assert not scheduler.running and 0 < num_ranks <= len(scheduler.ranks), f"{num_ranks} data ranks"
    scheduler.open_ranks = scheduler.ranks[:num_ranks]


def add_choices(scheduler: Scheduler, choices: list[Sequence]) -> None:
    """Queue the choices of a request.

    If some have outputs or have ended elsewhere, each of the others runs independently: it finds the prompt cached, or
    computes it.
    """
    left = [choice for choice in choices if choice.finish is None]
    scheduler.add(left)
    if len(left) < len(choices) or any(choice.num_outputs for choice in left):
        release_followers(left[0], scheduler.waiting)
