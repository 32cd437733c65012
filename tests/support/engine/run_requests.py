"""Running requests step by step over a runner that is compiled already, without an engine thread.

So one compilation serves many ways to schedule the same requests, and a test may step in between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

import numpy as np

from rayserve_moe.constraints.compiler import ConstraintCompiler
from rayserve_moe.engine.admission import ending_ids, processed_of
from rayserve_moe.engine.cycle import StepCycle
from rayserve_moe.engine.eplb.steps import EplbSteps
from rayserve_moe.engine.executor import Executor
from rayserve_moe.engine.extension import extension_of
from rayserve_moe.engine.guides import guides_of
from rayserve_moe.engine.host_pages import HostedPages
from rayserve_moe.engine.loop import capture_for, cycle_with
from rayserve_moe.engine.speculation.policy import Speculation
from rayserve_moe.engine.speculation.proposers import Proposer
from rayserve_moe.engine.speculation.steps import DraftedSteps
from rayserve_moe.execution.runner import HostRunner
from rayserve_moe.requests.records import GenerationRequest, ModelCard
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.scheduling.recovery import add_choices
from rayserve_moe.scheduling.row_table import RowTable
from rayserve_moe.scheduling.scheduler import Scheduler, StepLimits
from rayserve_moe.scheduling.sequence import Sequence, prompt_columns, restore
from rayserve_moe.scheduling.step_plan import HostSizes, StartReport, StepPlan, StepResult
from tests.support.engine.outputs import LOGPROB_TOLERANCE, RECURRENT_TOLERANCE, Outcome, Outcomes
from tests.support.engine.schedulers import some_reach
from tests.support.models.core import NUM_PAGES, PAGE_SIZE

Intervention = Callable[[StepCycle, int], Iterable[Sequence] | None]
"""What a test does after step number i; returns the endings of sequences that it ended, if any."""


class PreparedExecutor:
    """An executor over a runner that is loaded and compiled already."""

    def __init__(self, runner: HostRunner, num_pages: int) -> None:
        self._runner, self._num_pages = runner, num_pages

    def start(self) -> StartReport:
        return StartReport(self._num_pages)

    def execute(self, plan: StepPlan) -> StepResult | None:
        return self._runner.execute(plan)

    def stage_weights(self, model_path: str, expert_of_slot: np.ndarray | None) -> None:
        self._runner.staged.read(model_path, expert_of_slot)

    def release(self) -> None:
        """Nothing to give back."""

    def shutdown(self) -> None:
        """The runner belongs to whoever prepared it."""


@dataclass(frozen=True)
class Way:
    """How requests are scheduled: none of it may show in what comes out."""

    num_rows: int = 16
    step_tokens: int = 256
    chunk_tokens: int = 256
    page_size: int = PAGE_SIZE
    num_pages: int = NUM_PAGES
    with_capture: bool = True
    overlaps: bool = True
    caches_prefixes: bool = True
    intervene: Intervention | None = None
    eplb: EplbSteps | None = None
    speculation: Callable[[RowTable], Speculation] | None = None
    proposer: Proposer | None = None
    num_drafts: int = 1
    constraints: ConstraintCompiler | None = None
    executor: Executor | None = None
    hosted: HostSizes | None = None


def run_together(
    runner: HostRunner, card: ModelCard, requests: Iterable[GenerationRequest], *, way: Way | None = None
) -> Outcomes:
    """Run all requests at once until they end, with nothing cached; in the end all pages are free.

    They are computed in the runner's own pool, or by the executor of the `way`; whatever else was cached there has to
    be flushed.
    """
    way = way or Way()
    cycle = cycle_for(runner, card, way)
    outcomes = run_on(cycle, card, requests, intervene=way.intervene, constraints=way.constraints)
    cycle.scheduler.flush()
    for rank in cycle.scheduler.ranks:
        assert rank.allocator.num_free == rank.allocator.num_usable
    return outcomes


def run_on(
    cycle: StepCycle,
    card: ModelCard,
    requests: Iterable[GenerationRequest],
    *,
    intervene: Intervention | None = None,
    constraints: ConstraintCompiler | None = None,
    committed: Collection[ChoiceResult] = (),
) -> Outcomes:
    """Run requests on a cycle that may have served others; pages and rows must add up after every step.

    Requests with `committed` outputs of another engine go on after these.
    """
    outcomes: Outcomes = {}
    tolerance = RECURRENT_TOLERANCE if cycle.scheduler.ranks[0].entry_tokens else LOGPROB_TOLERANCE
    for request in requests:
        choices = choices_of(request, card, constraints=constraints)
        restore(choices, [outputs for outputs in committed if outputs.request_id == request.request_id])
        outcomes |= {(request.request_id, choice.choice_index): Outcome(tolerance=tolerance) for choice in choices}
        add_choices(cycle.scheduler, choices) if committed else cycle.scheduler.add(choices)
    _turn(cycle, intervene, outcomes)
    for rank in cycle.scheduler.ranks:
        assert rank.num_available == rank.allocator.num_usable
    assert all(outcome.finish is not None for outcome in outcomes.values())
    return outcomes


def cycle_for(runner: HostRunner, card: ModelCard, way: Way) -> StepCycle:
    """Return a cycle over the data ranks of a runner, each with the rows and pages of `way`."""
    num_data_ranks = runner.config.plan.data_size
    limits = StepLimits(
        way.num_rows,
        way.step_tokens,
        way.chunk_tokens,
        way.page_size,
        way.num_pages,
        card.max_model_len,
        num_data_ranks=num_data_ranks,
        caches_prefixes=way.caches_prefixes,
        page_groups=runner.served.pool.groups(way.num_pages),
        entry_groups=runner.served.pool.entry_groups(way.num_pages),
        verify_rows=max(shape.num_singles for shape in runner.served.shapes),
        evicts_by_session=True,
        protected_share=0.5,
        max_protected_s=3600.0,
    )
    scheduler = Scheduler(limits)
    speculation = None if way.speculation is None else way.speculation(scheduler.table)
    if way.proposer is not None:
        speculation = Speculation(
            scheduler.table, way.proposer, max_drafts=way.num_drafts, reach=some_reach(), is_fixed=True
        )
    capture = capture_for(scheduler, replace(card, weight_version="0"), num_pages=way.num_pages)
    return cycle_with(
        scheduler,
        way.executor or PreparedExecutor(runner, way.num_pages),
        capture=capture if way.with_capture else None,
        overlaps=way.overlaps,
        eplb=way.eplb,
        speculation=speculation,
        hosted=None if way.hosted is None else HostedPages(scheduler, way.hosted, rows=capture),
    )


def kept_tokens(runner: HostRunner) -> int:
    """Return the tokens from one place at which a cached prefix can end to the next."""
    cache = runner.served.settings.cache
    return max([cache.page_size, *(group.entry_tokens for group in runner.served.pool.entry_groups(cache.num_pages))])


def tolerance_of(runner: HostRunner) -> float:
    """Return the bound of differences of log-probs of a model that is computed in different ways."""
    return RECURRENT_TOLERANCE if runner.served.pool.entries else LOGPROB_TOLERANCE


def speculation_of(cycle: StepCycle) -> Speculation:
    """Return the speculation of a cycle that has it."""
    drafted = extension_of(cycle.extensions, DraftedSteps)
    assert drafted is not None, "the cycle has no drafts"
    return drafted.speculation


def run_alone(
    runner: HostRunner, card: ModelCard, requests: Iterable[GenerationRequest], *, way: Way | None = None
) -> Outcomes:
    """Run one request after the other."""
    outcomes: Outcomes = {}
    for request in requests:
        outcomes |= run_together(runner, card, [request], way=way)
    return outcomes


def choices_of(
    request: GenerationRequest, card: ModelCard, *, constraints: ConstraintCompiler | None = None
) -> list[Sequence]:
    """Return one sequence per choice, as the engine makes them for a request with a seed."""
    sampling = request.sampling
    assert sampling.seed is not None or sampling.temperature == 0, "a run that is compared needs a seed"
    stops = frozenset(sampling.stop_token_ids) | frozenset(() if sampling.ignore_eos else card.eos_token_ids)
    withheld = ending_ids(sampling, card) if sampling.min_new_tokens else frozenset()
    choices = [
        Sequence(request, i, seed=sampling.seed or 0, stop_token_ids=stops, withheld_ids=withheld, guide=guide)
        for i, guide in enumerate(guides_of(request, constraints, num_ids=card.vocab_size))
    ]
    for choice in choices:
        choice.rules.processed = processed_of(sampling, card)
    return choices


def preempt_every(num_steps: int, *, forgets: bool = False) -> Intervention:
    """Preempt a running sequence after every `num_steps` steps, in turn the oldest, the next, and so on.

    It comes back to its pages, unless `forgets`: then all that is cached is flushed.
    """

    def intervene(cycle: StepCycle, step: int) -> None:
        running = cycle.scheduler.running
        if running and step % num_steps == 0:
            cycle.scheduler.preempt(running[step // num_steps % len(running)])
            if forgets:
                cycle.scheduler.flush()

    return intervene


def _turn(cycle: StepCycle, intervene: Intervention | None, outcomes: Outcomes) -> None:
    step = 0
    while cycle.has_work:
        step += 1
        assert step < 5000, "the requests do not come to an end"
        _take_over(outcomes, cycle.run()[1])
        cycle.scheduler.check_integrity()
        if intervene is not None:
            _take_over(outcomes, intervene(cycle, step) or ())
            cycle.scheduler.check_integrity()


def _take_over(outcomes: Outcomes, ended: Iterable[Sequence]) -> None:
    for sequence in ended:
        outcome = outcomes[sequence.request.request_id, sequence.choice_index]
        first, last = sequence.num_prompt_tokens, sequence.num_tokens
        outcome.ids = sequence.token_ids[first:last].tolist()
        outcome.logprobs = sequence.state.logprobs[first:last].tolist()
        outcome.finish, outcome.routing = sequence.finish, sequence.routing.final
        outcome.num_cached = sequence.cache.num_cached
        outcome.columns = sequence.evidence.columns.slice(0, last - first)
        outcome.prompt = prompt_columns(sequence)


def without_routing(request: GenerationRequest) -> GenerationRequest:
    """Return the same request without routing."""
    return replace(request, return_routed_experts=False)
