"""Whatever happens before, between and after changes of weights, answers are of the weights that they name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rayserve_moe import Engine
from rayserve_moe.answers.native import labelled_ranges
from rayserve_moe.balancing.migration import Migration
from rayserve_moe.balancing.placement import ExpertPlacement
from rayserve_moe.checkpoints.files import open_checkpoint
from rayserve_moe.engine.cycle import StepCycle
from rayserve_moe.engine.eplb.steps import EplbSteps
from rayserve_moe.engine.extension import extension_of
from rayserve_moe.execution.runner import HostRunner
from rayserve_moe.execution.weights.placing import load_weights
from rayserve_moe.model.layers.moe import slot_specs
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.scheduling.scheduler import unfinished
from rayserve_moe.scheduling.sequence import Sequence
from tests.pipelines.conftest import ReferenceFactory
from tests.pipelines.test_routing_interleavings import FEW_PAGES, PROMPTS, STEP_TOKENS
from tests.pipelines.test_weight_updates import CHANGING
from tests.support.checkpoints.weight_versions import Labelled, VersionedReference
from tests.support.engine.engine_store import EngineStore
from tests.support.engine.run_requests import Way, choices_of, cycle_for
from tests.support.engine.schedulers import one, scheduler
from tests.support.engine.shared_settings import MOVING, ONE_BUCKET
from tests.support.engine.workload import request_for
from tests.support.experts.placements import random_placement

ABORTED = FinishReason("abort")

LONGEST_FOLLOWED = 150

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(0, len(PROMPTS) - 1), st.integers(1, 30), st.integers(1, 3)),
        st.tuples(st.just("follow"), st.integers(0, 7), st.integers(1, 30)),
        st.tuples(st.just("turn"), st.integers(1, 9)),
        st.tuples(st.sampled_from(["abort", "preempt"]), st.integers(0, 7)),
        st.tuples(st.just("flush")),
        st.tuples(st.just("stage"), st.integers(0, 1)),
        st.tuples(st.just("swap"), st.booleans()),
        st.tuples(st.just("move"), st.integers(0, 99)),
    ),
    min_size=8,
    max_size=40,
)
WAYS = st.builds(
    Way,
    num_rows=st.integers(2, 4),
    step_tokens=st.just(STEP_TOKENS),
    chunk_tokens=st.sampled_from([16, STEP_TOKENS]),
    num_pages=st.just(FEW_PAGES),
    overlaps=st.booleans(),
    caches_prefixes=st.booleans(),
)


class Interleaving:
    """A cycle whose weights change between its steps; every ending is held against the checkpoints at once."""

    def __init__(self, cycle: StepCycle, engine: Engine, reference: VersionedReference, paths: list[Path]) -> None:
        self._cycle, self._engine, self._reference, self._paths = cycle, engine, reference, paths
        self._eplb = extension_of(cycle.extensions, EplbSteps)
        self._num_requests = 0
        self._versions = ["0"]
        self._born: dict[str, int] = {}
        self._said: list[np.ndarray] = []
        self._staged: Path | None = None
        reference.note("0", paths[0], is_recomputed=True)

    def submit(self, prompt: int, max_new_tokens: int, n: int) -> None:
        self._submit(PROMPTS[prompt], max_new_tokens, n)

    def follow(self, which: int, max_new_tokens: int) -> None:
        """Have somebody go on from what another choice has come to."""
        if self._said and len(said := self._said[which % len(self._said)]) <= LONGEST_FOLLOWED:
            self._submit(said, max_new_tokens, 1)

    def _submit(self, prompt: np.ndarray, max_new_tokens: int, n: int) -> None:
        self._num_requests += 1
        sampling = {"max_new_tokens": max_new_tokens, "n": n, "temperature": float(n > 1), "seed": self._num_requests}
        request = request_for(prompt, f"i{self._num_requests}", **sampling)
        self._born[request.request_id] = len(self._versions) - 1
        self._cycle.scheduler.add(choices_of(request, self._engine.card))

    def turn(self, num_turns: int) -> None:
        for _ in range(num_turns):
            if self._cycle.has_work:
                self._check_all(self._cycle.run()[1])

    def abort(self, index: int) -> None:
        if there := unfinished(self._cycle.scheduler):
            self._check_all([self._cycle.end(there[index % len(there)], ABORTED)])

    def preempt(self, index: int) -> None:
        if running := self._cycle.scheduler.running:
            self._cycle.scheduler.preempt(running[index % len(running)])

    def flush(self) -> None:
        self._cycle.scheduler.flush()

    def stage(self, which: int) -> None:
        """Read weights now; steps may follow before they are put to use, and experts stay where they are."""
        self._check_all(self._cycle.drain()[1])
        self._staged = self._paths[which]
        placement = self._eplb.hold() if self._eplb is not None else self._engine.runner.placement
        self._engine.runner.staged.read(str(self._staged), placement.expert_of_slot)

    def swap(self, retracts: bool) -> None:
        if self._staged is None:
            return
        version, path, self._staged = f"swap {len(self._versions)}", self._staged, None
        self._versions.append(version)
        self._check_all(self._cycle.drain()[1])
        if retracts:
            self._cycle.retract()
        self._cycle.take_staged_weights(version)
        self._reference.note(version, path, is_recomputed=retracts)
        if self._eplb is not None:
            self._eplb.resume()
        self._cycle.scheduler.check_integrity()

    def move(self, seed: int) -> None:
        if self._eplb is not None:
            placement = self._eplb.migration.placement
            self._eplb.set_target(random_placement(placement, seed=seed))

    def finish(self) -> None:
        while self._cycle.has_work:
            self.turn(1)
        self._cycle.scheduler.flush()

    def _check_all(self, ended: list[Sequence]) -> None:
        self._cycle.scheduler.check_integrity()
        for sequence in ended:
            first, last = sequence.num_prompt_tokens, sequence.num_tokens
            ids, logprobs = (values[first:last].tolist() for values in (sequence.token_ids, sequence.state.logprobs))
            ranges = list(labelled_ranges(sequence.evidence.weight_versions, last))
            routing = sequence.routing.final
            assert routing is not None
            assert not routing.missing or (sequence.finish == ABORTED and not sequence.num_outputs)
            oldest = self._versions[self._born[sequence.request.request_id] :]
            assert {version for *_, version in routing.weight_version} <= set(oldest), "rows of weights before its time"
            self._said.append(sequence.token_ids[:last].copy())
            self._reference.check_outputs(sequence.token_ids[:first].tolist(), Labelled(ids, logprobs, ranges, routing))


def serve_first_weights(runner: HostRunner, path: Path, eplb: EplbSteps | None) -> None:
    """Have the runner begin with the weights of `path`, whatever it had before."""
    placement = runner.placement if eplb is None else eplb.migration.placement
    runner.staged.read(str(path), placement.expert_of_slot)
    runner.weights = runner.staged.take(runner.weights)
    if eplb is not None:
        eplb.change_weights()
        eplb.resume()


@pytest.fixture(scope="module")
def paths(core_checkpoint: Path, other_checkpoint: Path) -> list[Path]:
    return [core_checkpoint, other_checkpoint]


@pytest.fixture(scope="module")
def reference(paths: list[Path], engines: dict[str, Engine], reference_for: ReferenceFactory) -> VersionedReference:
    return VersionedReference({path: reference_for(path) for path in paths}, engines["alone"].card.routing)


@pytest.fixture(scope="module")
def engines(engine_with: EngineStore) -> Iterator[dict[str, Engine]]:
    held = engine_with.held
    with held(**ONE_BUCKET, **CHANGING) as alone, held(**ONE_BUCKET, **MOVING) as balanced:
        yield {"alone": alone, "balanced": balanced}


@pytest.fixture(scope="module")
def eplb(engines: dict[str, Engine]) -> EplbSteps:
    """Knows where the experts of the balanced runner are, from one example to the next."""
    return EplbSteps(Migration(engines["balanced"].runner.placement, hosts=1, slots_per_step=1))


def assert_slots_hold(runner: HostRunner, placement: ExpertPlacement, path: Path) -> None:
    """Every slot has the weights that a checkpoint has for the expert that the placement names."""
    wanted = load_weights(open_checkpoint(path), runner.config, dtype=runner.served.dtype, placement=placement)
    for name in slot_specs(runner.config.spec):
        held, expected = (np.asarray(weights.params["experts"][name]) for weights in (runner.weights, wanted))
        np.testing.assert_array_equal(held, expected)


@pytest.mark.slow
def test_experts_that_were_fetched_before_a_change_are_fetched_anew(engines, paths):
    """The change comes between a fetch of a layer and its swap, while its slots wait in the staging area."""
    runner, waiting = engines["balanced"].runner, scheduler()
    eplb = EplbSteps(Migration(runner.placement, hosts=1, slots_per_step=1))
    migration = eplb.migration
    migration.begin(random_placement(migration.placement, seed=8))
    piece = migration.next_piece()
    assert piece is not None and piece.swap is None, "the first layer takes several fetches"
    runner.move_experts(piece)
    assert_slots_hold(runner, migration.placement, paths[0])
    runner.staged.read(str(paths[1]), eplb.hold().expert_of_slot)
    waiting.add([one("a", [7], num_new=3)])
    assert eplb.plan(waiting.schedule(), None).plan.migration is None, "experts stay while weights wait"
    runner.weights = runner.staged.take(runner.weights)
    eplb.change_weights()
    for placement in (migration.target, runner.placement):
        if placement is runner.placement:
            migration.begin(placement)
        while (piece := migration.next_piece()) is not None:
            runner.move_experts(piece)
        assert migration.placement is placement and migration.progress.num_slots > 0
        assert_slots_hold(runner, placement, paths[1])


@pytest.mark.slow
@pytest.mark.parametrize("num_turns", [1, 2])
def test_a_prompt_is_not_recomputed_under_two_weights(engines, reference, paths, num_turns):
    """The change comes when a preempted choice, which has outputs, has computed a part of its prompt once more."""
    engine, way = engines["alone"], Way(step_tokens=STEP_TOKENS, chunk_tokens=16)
    serve_first_weights(engine.runner, paths[0], None)
    cycle = cycle_for(engine.runner, engine.card, way)
    interleaving = Interleaving(cycle, engine, reference, paths)
    interleaving.submit(int(np.argmax([len(prompt) for prompt in PROMPTS])), 30, 1)
    (choice,) = unfinished(cycle.scheduler)
    while choice.num_outputs < 5:
        interleaving.turn(1)
    interleaving.preempt(0)
    interleaving.flush()
    interleaving.turn(num_turns)
    assert 0 < choice.num_computed < choice.num_prompt_tokens and choice.num_outputs
    interleaving.stage(1)
    interleaving.swap(False)
    interleaving.finish()
    assert choice.finish is not None and len(choice.routing.final.weight_version) == 3, "prompt, outputs, outputs"


SUMMED_APART = pytest.mark.float32("its devices add up parts of sums, and the reference has one device")


@pytest.mark.sampled(2)
@pytest.mark.natively
@pytest.mark.parametrize(
    ("name", "num_examples"),
    [
        ("alone", 6),
        pytest.param("balanced", 6, marks=SUMMED_APART),
        pytest.param("alone", 300, marks=pytest.mark.slow),
        pytest.param("balanced", 300, marks=[SUMMED_APART, pytest.mark.slow]),
    ],
)
def test_answers_are_of_the_weights_that_they_name(engines, eplb, reference, paths, name, num_examples):
    engine, moves = engines[name], eplb if name == "balanced" else None

    @settings(
        max_examples=num_examples,
        phases=(Phase.explicit, Phase.reuse, Phase.generate),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(events=EVENTS, way=WAYS)
    def check(events: list[tuple], way: Way) -> None:
        serve_first_weights(engine.runner, paths[0], moves)
        cycle = cycle_for(engine.runner, engine.card, replace(way, eplb=moves))
        interleaving = Interleaving(cycle, engine, reference, paths)
        for event, *arguments in events:
            getattr(interleaving, event)(*arguments)
        interleaving.finish()

    check()


@pytest.mark.natively
def test_ties_excuse_hardly_anything_and_no_law_was_idle(reference):
    """Each of the six random interleavings with native kernels has at least one range of a version."""
    reference.tally.check()
    assert reference.num_ranges > 6
