"""Sequences and schedulers for tests of the core, and turns with one step in flight."""

from __future__ import annotations

import numpy as np

from rayserve_moe.engine.speculation.step_times import ExpertReach
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.records import GenerationRequest, SamplingParams
from rayserve_moe.scheduling.scheduler import Commit, Schedule, Scheduler, StepLimits
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.step_plan import StepResult

STOP_TOKEN_ID = 2
TOKEN = 9
ABORT = FinishReason("abort")


def choices(
    request_id: str,
    prompt: int | list[int] | np.ndarray,
    *,
    num_new: int = 8,
    n: int = 1,
    routing: bool = False,
    salt: str = "",
    first_row: int = 0,
) -> list[Sequence]:
    """Return the choices of a request; a number stands for a prompt of that length, which begins as all of them do."""
    ids = np.arange(10, 10 + prompt, dtype=np.int32) if isinstance(prompt, int) else np.asarray(prompt, np.int32)
    sampling = SamplingParams(max_new_tokens=num_new, n=n)
    request = GenerationRequest(request_id, ids, sampling, routing, salt, routed_experts_start=first_row)
    return [Sequence(request, i, seed=5, stop_token_ids=frozenset([STOP_TOKEN_ID])) for i in range(n)]


def some_reach() -> ExpertReach:
    """Of a model with 8 of 64 experts for a token."""
    return ExpertReach(64, 8)


def one(request_id: str, prompt: int | list[int], **kwargs: object) -> Sequence:
    """Return a request's only choice."""
    (sequence,) = choices(request_id, prompt, **kwargs)
    return sequence


def limits_of(**limits: object) -> StepLimits:
    """Return limits of four rows and pages of four tokens, unless `limits` say otherwise."""
    wanted = {
        "num_rows": 4,
        "step_tokens": 64,
        "chunk_tokens": 64,
        "page_size": 4,
        "num_pages": 64,
        "max_tokens": 120,
        **limits,
    }
    return StepLimits(**wanted)


def scheduler(**limits: object) -> Scheduler:
    """Return a scheduler within `limits_of`."""
    return Scheduler(limits_of(**limits))


def result_of(schedule: Schedule, token_id: int = TOKEN, *, not_finite: tuple[int, ...] = ()) -> StepResult:
    """Return the result of a step that samples `token_id` everywhere; `not_finite` are places among the samples."""
    count = len(schedule.sampling_rows)
    finite = np.isin(np.arange(count), not_finite, invert=True)
    ids, logprobs = np.full(count, token_id, np.int32), np.full(count, -0.5, np.float32)
    return StepResult(schedule.plan.step_id, ids, logprobs, finite)


def abort(target: Scheduler, sequence: Sequence) -> None:
    """End a sequence and give back its pages."""
    target.end(sequence, ABORT)
    target.release(sequence)
    target.check_integrity()


def all_pages_are_free(target: Scheduler) -> bool:
    """Return True if no page is held or cached."""
    return all(rank.allocator.num_free == rank.allocator.num_usable for rank in target.ranks)


class Turns:
    """Turns a scheduler with a step in flight, or, where not `overlaps`, one after the other."""

    def __init__(self, target: Scheduler, *, overlaps: bool = True) -> None:
        self.target = target
        self._overlaps = overlaps
        self._in_flight: Schedule | None = None

    def begin(self, sequence: Sequence, *, num_turns: int = 1) -> None:
        """Add one more sequence, and turn."""
        self.target.add([sequence])
        for _ in range(num_turns):
            self.turn()

    def turn(self, token_id: int = TOKEN) -> dict[str, int]:
        """Plan a step, then commit the one before as if it had sampled `token_id`; returns the lengths planned."""
        schedule = self.target.schedule()
        planned = self.lengths(schedule)
        before, self._in_flight = self._in_flight, schedule
        if before is not None:
            self.commit(before, token_id)
        if not self._overlaps:
            self.settle(token_id)
        self.target.check_integrity()
        return planned

    def settle(self, token_id: int = TOKEN) -> None:
        """Commit the step in flight."""
        before, self._in_flight = self._in_flight, None
        if before is not None:
            self.commit(before, token_id)
        self.target.check_integrity()

    def finish(self, token_id: int = TOKEN) -> None:
        """Turn until nothing is left to do."""
        for _ in range(1000):
            if not self.target.has_work:
                return self.settle(token_id)
            self.turn(token_id)
        raise AssertionError("the requests do not come to an end")

    def commit(self, schedule: Schedule, token_id: int = TOKEN) -> Commit:
        """Take over a result and release what it ended."""
        rows, ended = self.target.commit(schedule, result_of(schedule, token_id))
        for sequence in ended:
            self.target.release(sequence)
        return rows, ended

    def lengths(self, schedule: Schedule) -> dict[str, int]:
        """Lengths of the chunks of a schedule that was just planned, by `request/choice`."""
        owners = [self.target.table.sequences[row] for row in schedule.plan.chunks.rows.tolist()]
        names = [f"{s.request.request_id}/{s.choice_index}" for s in owners if s is not None]
        return dict(zip(names, schedule.plan.chunks.lengths.tolist(), strict=True))
