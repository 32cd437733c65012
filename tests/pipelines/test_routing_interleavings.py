"""Whatever happens between their steps, requests get rows that are right, or told that they are missing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayserve_moe import Engine
from rayserve_moe.engine.cycle import StepCycle
from rayserve_moe.engine.extension import extension_of
from rayserve_moe.engine.routing.capture import RoutingCapture
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.scheduling.sequence import Sequence
from tests.pipelines.conftest import ReferenceFactory
from tests.support.engine.run_requests import Way, choices_of, cycle_for, run_on
from tests.support.engine.shared_settings import ONE_BUCKET
from tests.support.engine.workload import draw_prompt, request_for
from tests.support.models.core import PAGE_SIZE
from tests.support.routing.router_reference import RouterReference, Tally

ABORTED = FinishReason("abort")
FEW_PAGES = 16
"""Pages for two or three of the longest sequences."""
LONGEST = 5 * PAGE_SIZE
STEP_TOKENS = ONE_BUCKET["max_step_tokens"]
ROWS_OF_A_RANK = 16
"""What the runner was compiled for: where rows lie depends on it as soon as there is a second rank."""


def prompts() -> list[np.ndarray]:
    """Prompts that begin alike to different lengths, and one that does not."""
    generator = np.random.default_rng(21)
    first = draw_prompt(generator, LONGEST)
    starts = [LONGEST, LONGEST - 1, 3 * PAGE_SIZE + 5, 2 * PAGE_SIZE, PAGE_SIZE - 1]
    return [*(np.concatenate([first[:n], draw_prompt(generator, 7)]) for n in starts), draw_prompt(generator, 50)]


PROMPTS = prompts()
EVENTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("submit"),
            st.integers(0, len(PROMPTS) - 1),
            st.integers(0, 20),
            st.integers(1, 3),
        ),
        st.tuples(st.just("turn"), st.integers(1, 8)),
        st.tuples(st.sampled_from(["abort", "preempt"]), st.integers(0, 7)),
        st.just(("flush",)),
    ),
    min_size=6,
    max_size=40,
)

WAYS = st.builds(
    Way,
    num_rows=st.integers(2, 6),
    step_tokens=st.just(STEP_TOKENS),
    chunk_tokens=st.sampled_from([16, 40, STEP_TOKENS]),
    num_pages=st.just(FEW_PAGES),
    overlaps=st.booleans(),
    caches_prefixes=st.booleans(),
)


class Interleaving:
    """A cycle with its requests, driven event by event; every ending is held against the reference at once."""

    def __init__(self, cycle: StepCycle, engine: Engine, reference: RouterReference, tally: Tally) -> None:
        self._cycle, self._card, self._reference, self._tally = cycle, engine.card, reference, tally
        self._num_requests = 0

    def submit(self, prompt: int, max_new_tokens: int, n: int) -> None:
        self._num_requests += 1
        sampling = {"max_new_tokens": max_new_tokens, "n": n, "temperature": float(n > 1), "seed": self._num_requests}
        request = request_for(PROMPTS[prompt], f"i{self._num_requests}", **sampling)
        self._cycle.scheduler.add(choices_of(request, self._card))

    def turn(self, count: int) -> None:
        for _ in range(count):
            if not self._cycle.has_work:
                return
            for sequence in self._cycle.run()[1]:
                self._check(sequence)
            self._cycle.scheduler.check_integrity()

    def abort(self, index: int) -> None:
        scheduler = self._cycle.scheduler
        if live := [*scheduler.running, *scheduler.waiting]:
            self._check(self._cycle.end(live[index % len(live)], ABORTED))
            scheduler.check_integrity()

    def preempt(self, index: int) -> None:
        if running := self._cycle.scheduler.running:
            self._cycle.scheduler.preempt(running[index % len(running)])
            self._cycle.scheduler.check_integrity()

    def flush(self) -> None:
        self._cycle.scheduler.flush()

    def finish(self) -> None:
        while self._cycle.has_work:
            self.turn(1)
        self._cycle.scheduler.flush()

    def _check(self, sequence: Sequence) -> None:
        routing = sequence.routing.final
        assert routing is not None and routing.start == 0
        if sequence.finish != ABORTED or sequence.num_outputs:
            assert routing.missing == (), "a choice with outputs lacks rows, whatever state it ended in"
            assert len(routing.rows) == sequence.num_tokens - bool(sequence.num_outputs)
        self._reference.check(sequence.token_ids[: sequence.num_tokens].tolist(), routing, self._tally)


ENGINES = {1: "engine", 2: "two_ranks"}
"""Fixtures by the number of data ranks, of one device each."""


@pytest.fixture(scope="module")
def reference(core_checkpoint: Path, reference_for: ReferenceFactory) -> RouterReference:
    return reference_for(core_checkpoint)


@pytest.fixture(scope="module")
def tally() -> Tally:
    return Tally()


@pytest.mark.parametrize(
    ("num_data_ranks", "num_examples"),
    [
        (1, 6),
        pytest.param(2, 6, marks=pytest.mark.natively),
        *(pytest.param(ranks, 150, marks=pytest.mark.slow) for ranks in (1, 2)),
    ],
)
def test_every_row_is_that_of_an_isolated_run_or_reported_missing(
    request: pytest.FixtureRequest,
    reference: RouterReference,
    tally: Tally,
    num_data_ranks: int,
    num_examples: int,
):
    engine: Engine = request.getfixturevalue(ENGINES[num_data_ranks])

    @settings(max_examples=num_examples, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    @given(events=EVENTS, way=WAYS)
    def check(events: list[tuple], way: Way) -> None:
        if num_data_ranks > 1:
            way = replace(way, num_rows=ROWS_OF_A_RANK)
        interleaving = Interleaving(cycle_for(engine.runner, engine.card, way), engine, reference, tally)
        for name, *arguments in events:
            getattr(interleaving, name)(*arguments)
        interleaving.finish()

    check()


def test_ties_excuse_hardly_anything(tally: Tally):
    tally.check()


@pytest.mark.parametrize("flushes", [True, False])
def test_after_a_flush_no_old_row_comes_back(engine: Engine, reference: RouterReference, flushes: bool):
    """All rows in the store are spoilt where they lie, stamps and all; only who reads an old row will see it."""
    cycle = cycle_for(engine.runner, engine.card, Way())
    wanted = request_for(PROMPTS[0], max_new_tokens=6)
    before = run_on(cycle, engine.card, [wanted])["r", 0]
    if flushes:
        cycle.scheduler.flush()
    spoilt = engine.card.routing.num_experts - 1
    capture = extension_of(cycle.extensions, RoutingCapture)
    assert capture is not None
    capture._store._rows[:] = spoilt
    after = run_on(cycle, engine.card, [wanted])["r", 0]
    cycle.scheduler.flush()
    assert after.ids == before.ids
    is_old = (after.rows == spoilt).all(axis=(1, 2))
    if not flushes:
        assert is_old[:LONGEST].all(), "what is cached is read from where it was written"
        return
    assert not is_old.any() and after.num_cached == 0
    reference.check([*PROMPTS[0].tolist(), *after.ids], after.routing, Tally())
