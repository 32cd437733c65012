"""Experts move between devices while requests run, and nobody notices: same weights per expert, same answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count, islice
from pathlib import Path

import jax
import numpy as np
import pytest

from rayserve_moe import Engine
from rayserve_moe.balancing.migration import LayerSwap, Migration, MigrationPiece
from rayserve_moe.balancing.placement import ExpertPlacement, PlacementError, identity_placement
from rayserve_moe.checkpoints.synthetic import write_checkpoint
from rayserve_moe.engine.cycle import StepCycle
from rayserve_moe.engine.eplb.steps import EplbSteps
from rayserve_moe.execution.runner import HostRunner
from rayserve_moe.experts.slot_mapping import placement_arrays
from rayserve_moe.model.layers.moe import slot_specs
from rayserve_moe.requests.records import GenerationRequest, ModelCard
from tests.support.engine.host_runners import TWO_SHAPES, WAY, card_of, loaded_runner, prepared_runner
from tests.support.engine.outputs import assert_identical
from tests.support.engine.run_requests import run_together
from tests.support.engine.shared_settings import CORE, MOVING
from tests.support.engine.workload import mixed_workload
from tests.support.experts.eplb_proposals import SUMMED_CONFIG
from tests.support.experts.placements import random_placement

NUM_REDUNDANT, REBALANCE_EVERY = 4, 5
SLOTS_PER_STEP = 1

Mesh = tuple[int, int]


@dataclass(frozen=True)
class Moving:
    """A runner whose experts have moved before, and will again, and the weights [layers, experts, ...] of each kind."""

    runner: HostRunner
    eplb: EplbSteps
    by_expert: list[np.ndarray]


@dataclass(frozen=True)
class Runs:
    """Runners over a data-by-tensor mesh: with experts that move, or plain, where slot i holds expert i.

    Both are compiled once for each mesh and backend, `prepared` ones every time.
    """

    prepared: Callable[..., HostRunner]
    plain: Callable[[Mesh, str], HostRunner]
    moving: Callable[[Mesh, str], Moving]
    card: ModelCard


@pytest.fixture(scope="module")
def runs(core_checkpoint: Path, kernel_settings: dict[str, str]) -> Runs:
    def prepared(
        mesh: Mesh, backend: str, *, is_balanced: bool, start: Callable[..., HostRunner] = prepared_runner
    ) -> HostRunner:
        return start(
            core_checkpoint,
            mesh=mesh,
            expert_backend=backend,
            num_redundant_experts=NUM_REDUNDANT if is_balanced else 0,
            enable_eplb=is_balanced,
            eplb_slots_per_step=SLOTS_PER_STEP,
            enable_return_routed_experts=True,
            **TWO_SHAPES,
            **kernel_settings,
        )

    # Each compiled program takes hundreds of memory maps, of which a process has 65,530: forget some.
    @lru_cache(maxsize=2)
    def plain(mesh: Mesh, backend: str) -> HostRunner:
        return prepared(mesh, backend, is_balanced=False)

    @lru_cache(maxsize=2)
    def moving(mesh: Mesh, backend: str) -> Moving:
        runner = prepared(mesh, backend, is_balanced=True)
        migration = Migration(runner.placement, hosts=1, slots_per_step=SLOTS_PER_STEP)
        in_order = prepared(mesh, backend, is_balanced=False, start=loaded_runner)
        return Moving(runner, EplbSteps(migration, counts_every=7), expert_weights(in_order))

    return Runs(prepared, plain, moving, card_of(core_checkpoint))


def expert_weights(runner: HostRunner) -> list[np.ndarray]:
    """Weights of all slots by kind: [layers, slots, ...]."""
    return [np.asarray(runner.weights.params["experts"][name]) for name in slot_specs(runner.config.spec)]


def assert_slots_hold(runner: HostRunner, placement: ExpertPlacement, by_expert: list[np.ndarray]) -> None:
    """Every slot has the weights of the expert that the placement names, bit for bit, and the maps are its own."""
    layers = np.arange(placement.num_layers)[:, None]
    for held, wanted in zip(expert_weights(runner), by_expert, strict=True):
        np.testing.assert_array_equal(held, wanted[layers, placement.expert_of_slot])
    for held, wanted in zip(
        jax.tree.leaves(runner.weights.maps), jax.tree.leaves(placement_arrays(placement)), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(held), wanted)


def heading_elsewhere(eplb: EplbSteps) -> Callable[[StepCycle, int], None]:
    """Head for another random placement every few steps, whether or not the last one was reached."""

    def intervene(cycle: StepCycle, step: int) -> None:
        if step % REBALANCE_EVERY == 0:
            eplb.migration.begin(random_placement(eplb.migration.placement, seed=step))

    return intervene


def pieces_of(migration: Migration) -> Iterator[MigrationPiece]:
    """All that is left of a migration; what is not taken has not been handed out."""
    while (piece := migration.next_piece()) is not None:
        yield piece


def run_pieces(moving: Moving, pieces: Iterable[MigrationPiece]) -> None:
    """Let the runner do pieces without a step."""
    for piece in pieces:
        moving.runner.move_experts(piece)


def few_requests() -> list[GenerationRequest]:
    """Prompts of one block and of several, greedy and sampled, in steps with prompts and without."""
    return [request for request in mixed_workload() if len(request.prompt_ids) < 70][::2]


def crowd() -> list[GenerationRequest]:
    """32 requests, each of the mixed workload twice."""
    return [replace(request, request_id=f"{request.request_id} {i}") for i in range(2) for request in mixed_workload()]


CASES = [
    pytest.param((2, 2), "all_to_all", few_requests, marks=pytest.mark.slow),
    pytest.param((2, 2), "fused", few_requests, marks=pytest.mark.slow),
    *(
        pytest.param(mesh, backend, crowd, marks=pytest.mark.slow)
        for mesh in [(2, 2), (4, 1), (4, 2), (8, 1)]
        for backend in ("all_to_all", "fused")
    ),
]


@pytest.mark.parametrize(("mesh", "backend", "workload"), CASES)
def test_answers_are_the_same_bits_without_balancing_with_it_and_while_experts_move(runs, mesh, backend, workload):
    plain = run_together(runs.plain(mesh, backend), runs.card, workload(), way=WAY)
    moving = runs.moving(mesh, backend)
    runner, eplb = moving.runner, moving.eplb
    num_compilations = runner.num_compilations_since_start
    assert_identical(run_together(runner, runs.card, workload(), way=WAY), plain)

    version = eplb.migration.progress.version
    elsewhere = replace(WAY, eplb=eplb, intervene=heading_elsewhere(eplb))
    assert_identical(run_together(runner, runs.card, workload(), way=elsewhere), plain)
    assert eplb.migration.progress.version >= version + 4
    assert_slots_hold(runner, eplb.migration.placement, moving.by_expert)

    arriving = replace(WAY, eplb=eplb)
    assert_identical(run_together(runner, runs.card, workload(), way=arriving), plain)
    assert eplb.migration.progress.is_done and eplb.migration.next_piece() is None
    assert_slots_hold(runner, eplb.migration.placement, moving.by_expert)
    assert runner.num_compilations_since_start == num_compilations, "other runners of this process aside"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_slots_hold_their_experts_after_any_sequence_of_placements(runs, seed):
    moving = runs.moving((2, 2), "fused")
    migration, generator = moving.eplb.migration, np.random.default_rng(seed)
    num_compilations = moving.runner.num_compilations_since_start
    for turn in range(12):
        migration.begin(random_placement(migration.placement, seed=100 * seed + turn))
        run_pieces(moving, islice(pieces_of(migration), int(generator.integers(1, 30))))
        assert_slots_hold(moving.runner, migration.placement, moving.by_expert)
    assert moving.runner.num_compilations_since_start == num_compilations, "other runners of this process aside"


@pytest.mark.slow
def test_programs_with_nothing_to_do_change_nothing(runs):
    """A start runs each of them that way."""
    runner = runs.prepared((2, 2), "fused", is_balanced=True)
    assert_slots_hold(runner, runner.placement, runs.moving((2, 2), "fused").by_expert)


@pytest.mark.natively
def test_maps_without_their_weights_are_noticed(runs):
    """The laws above can fail: here the maps of a layer change, and its weights stay behind."""
    moving = runs.moving((2, 2), "fused")
    runner, migration = moving.runner, moving.eplb.migration
    true_answers = run_together(runner, runs.card, few_requests(), way=WAY)
    before = migration.placement
    other = random_placement(before, seed=99)
    layer = ExpertPlacement(*(array[:1] for array in (other.expert_of_slot, other.share_of_slot, other.slot_for)))
    fault = LayerSwap(0, layer, np.zeros(before.num_slots, np.bool_))
    run_pieces(moving, [MigrationPiece(1, swap=fault)])
    with pytest.raises(AssertionError):
        assert_identical(run_together(runner, runs.card, few_requests(), way=WAY), true_answers)
    with pytest.raises(AssertionError):
        assert_slots_hold(runner, before, moving.by_expert)

    rows = ExpertPlacement(*(array[:1] for array in (before.expert_of_slot, before.share_of_slot, before.slot_for)))
    run_pieces(moving, [MigrationPiece(1, swap=replace(fault, placement=rows))])
    assert_identical(run_together(runner, runs.card, few_requests(), way=WAY), true_answers)


@pytest.mark.slow
@pytest.mark.parametrize("fails_at", [0, 3])
def test_a_fetch_that_cannot_be_launched_leaves_experts_where_they_are(runs, fails_at, monkeypatch):
    """For want of memory, say: answers are the same bits, and the next migration arrives."""
    moving = runs.moving((2, 2), "fused")
    runner, eplb = moving.runner, moving.eplb
    plain = run_together(runner, runs.card, few_requests(), way=WAY)
    migration, programs = eplb.migration, moving.runner.programs.migration
    assert programs is not None
    calls = count()

    def fetch(*arguments: object, **keywords: object) -> object:
        if next(calls) == fails_at:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: planted")
        return programs.fetch(*arguments, **keywords)

    monkeypatch.setattr(runner, "_programs", replace(runner.programs, migration=programs._replace(fetch=fetch)))
    arriving = replace(WAY, eplb=eplb)
    eplb.set_target(random_placement(migration.placement, seed=7))
    assert_identical(run_together(runner, runs.card, few_requests(), way=arriving), plain)
    assert migration.given_up_version == migration.progress.version and migration.progress.is_done
    assert_slots_hold(runner, migration.placement, moving.by_expert)

    wanted = random_placement(migration.placement, seed=8)
    eplb.set_target(wanted)
    while migration.placement is not wanted:
        assert_identical(run_together(runner, runs.card, few_requests(), way=arriving), plain)
    assert_slots_hold(runner, wanted, moving.by_expert)


@pytest.mark.natively
def test_counts_leave_with_the_results_of_steps(runs):
    moving = runs.moving((2, 2), "fused")
    told = EplbSteps(Migration(moving.eplb.migration.placement, hosts=1, slots_per_step=1), counts_every=1)
    run_together(moving.runner, runs.card, few_requests(), way=replace(WAY, eplb=told))
    np.testing.assert_array_equal(told.reading.counts, moving.runner.expert_counts())
    assert told.reading.counts.sum() > 0


def test_an_engine_moves_experts_while_it_answers(tmp_path, kernel_settings):
    """Asked for from another thread, between one token and the next; other placements are refused.

    Under `auto` answers are equal to the bit. Tokens have four experts: two results give the same sum in any order.
    """
    checkpoint = write_checkpoint(tmp_path / "four", SUMMED_CONFIG, seed=3, dtype="float32")
    settings = {**CORE, **MOVING, "num_redundant_experts": MOVING["num_redundant_experts"] + 1, **kernel_settings}
    with Engine(str(checkpoint), **settings) as engine:
        eplb = engine.loop.eplb
        assert eplb is not None and eplb.migration.placement.num_redundant == 4, "lowered until it fits"
        asked = {
            "input_ids": [5, 6, 7],
            "temperature": 0.0,
            "max_new_tokens": 60,
            "ignore_eos": True,
            "return_logprob": True,
        }

        def answer() -> list[tuple[float, int, None]]:
            return engine.generate(**asked)["meta_info"]["output_token_logprobs"]

        expected = answer()
        eplb.set_target(random_placement(eplb.migration.placement, seed=1))
        assert answer() == expected, "while experts move"
        assert eplb.migration.progress.is_done and eplb.migration.progress.num_slots_done > 0
        assert answer() == expected, "afterwards"
        assert eplb.reading.counts.sum() > 0
        with pytest.raises(PlacementError):
            eplb.set_target(identity_placement(2, 8, ep_size=4))
        assert engine.runner.num_compilations_since_start == 0
