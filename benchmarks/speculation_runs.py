"""One run of requests, step by step over an engine's runner, with drafts or without."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from rayserve_moe.engine.speculation.policy import DraftTotals, Speculation
from rayserve_moe.inprocess.engine import Engine
from rayserve_moe.requests.records import GenerationRequest
from rayserve_moe.scheduling.row_table import RowTable
from rayserve_moe.scheduling.step_plan import StepPlan, StepResult
from tests.support.engine.run_requests import PreparedExecutor, Way, choices_of, cycle_for, speculation_of

PAGE_SIZE = 16
SpeculationFor = Callable[[RowTable], Speculation]


class Noting(PreparedExecutor):
    """Notes the plans of steps without prompts."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.runner, engine.loop.start_report.num_pages)
        self.decoding: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Execute a step, and keep the plan of a decode step."""
        if plan.num_chunks and not plan.has_blocks:
            self.decoding.append(plan)
        return super().execute(plan)


@dataclass
class Run:
    """What came out by request (its first choice, then the next), and of the time after the last step with prompts: its
    seconds, its tokens, seconds between commits, tokens computed and most drafts of a sequence by step."""

    ids: dict[str, list[int]] = field(default_factory=dict)
    seconds: float = 0.0
    num_tokens: int = 0
    step_seconds: list[float] = field(default_factory=list)
    step_tokens: list[int] = field(default_factory=list)
    step_drafts: list[int] = field(default_factory=list)
    totals: DraftTotals | None = None


def run(
    engine: Engine,
    requests: Iterable[GenerationRequest],
    speculation_for: SpeculationFor | None = None,
) -> Run:
    """Run all requests at once; each choice decodes from when all prompts are computed."""
    executor, found = Noting(engine), Run()
    way = Way(
        num_rows=engine.runner.served.num_rows,
        step_tokens=1024,
        chunk_tokens=1024,
        num_pages=engine.loop.start_report.num_pages,
    )
    way = replace(
        way,
        speculation=speculation_for,
        with_capture=False,
        caches_prefixes=False,
        executor=executor,
        page_size=PAGE_SIZE,
    )
    cycle = cycle_for(engine.runner, engine.card, way)
    for request in requests:
        cycle.scheduler.add(choices_of(request, engine.card))
    started, at, of_choices = None, time.perf_counter(), dict[tuple[str, int], list[int]]()
    while cycle.has_work:
        rows_of_tokens, ended = cycle.run()
        before, at = at, time.perf_counter()
        if started is not None:
            found.num_tokens += len(rows_of_tokens)
            found.step_seconds.append(at - before)
        elif executor.decoding:  # the step before them is committed
            started = at
        for sequence in ended:
            ids = sequence.token_ids[sequence.num_prompt_tokens : sequence.num_tokens].tolist()
            of_choices[sequence.request.request_id, sequence.choice_index] = ids
    for (name, _), ids in sorted(of_choices.items()):
        found.ids.setdefault(name, []).extend(ids)
    found.seconds = at - (at if started is None else started)
    found.step_tokens = [plan.num_tokens for plan in executor.decoding]
    found.step_drafts = [plan.chunks.max_drafts for plan in executor.decoding]
    found.totals = None if speculation_for is None else speculation_of(cycle).totals
    return found
