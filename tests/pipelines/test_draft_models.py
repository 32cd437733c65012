"""Draft models say what their files say, and change nothing but time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from rayserve_moe import Engine
from rayserve_moe.balancing.migration import Migration
from rayserve_moe.engine.cycle import StepCycle
from rayserve_moe.engine.eplb.steps import EplbSteps
from rayserve_moe.engine.speculation.model_drafts import ModelProposer
from rayserve_moe.execution.runner import HostRunner
from rayserve_moe.execution.step import inputs as step_input
from rayserve_moe.execution.step.function import weight_partitions
from rayserve_moe.model.draft_layer import draft_logits
from rayserve_moe.requests.records import GenerationRequest
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.step_plan import AWAITED, StepPlan, StepResult
from tests.pipelines.test_migration import heading_elsewhere
from tests.support.engine.engine_store import EngineStore
from tests.support.engine.outputs import assert_same
from tests.support.engine.run_requests import PreparedExecutor, Way, preempt_every, run_together
from tests.support.engine.shared_settings import MOVING
from tests.support.engine.workload import request_for
from tests.support.models.core import NUM_PAGES, PAGE_SIZE
from tests.support.speculation.draft_checkpoints import AUX_KEY, ENTERED, with_prediction_layer, write_eagle_head
from tests.support.speculation.draft_reference import DraftReference
from tests.support.speculation.random_requests import (
    DRAFTS,
    PLAIN,
    SPECULATES,
    assert_unchanged,
    known_to_devices,
    max_drafts,
    random_requests,
    settle_placement,
)

HEADS: dict[str, dict[str, Any]] = {
    "EAGLE3 of some words": {"algorithm": "EAGLE3", "num_words": 100},
    "EAGLE3 of all words": {
        "algorithm": "EAGLE3",
        "layer": "model.layers.0",
        "norm_before_residual": True,
        AUX_KEY: ENTERED,
    },
    "EAGLE": {"algorithm": "EAGLE", "layer": "layers.0"},
    "NEXTN": {"algorithm": "NEXTN"},
}
TOLERANCE = 1e-5
TRUE_PLACES = step_input._awaited
slow = pytest.mark.slow
SOME = ["EAGLE3 of some words", *(pytest.param(name, marks=slow) for name in list(HEADS)[1:])]


@pytest.fixture(scope="session")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where draft models are, each written once."""
    return tmp_path_factory.mktemp("drafts")


@pytest.fixture
def drafting_engine(core_checkpoint: Path, draft_folder: Path, engine_with: EngineStore):
    """The engine of a kind of draft model and settings, and what the model says by definition."""

    def start(kind: str, **settings: Any) -> tuple[Engine, DraftReference]:
        head = draft_folder / kind.replace(" ", "-")
        given = dict(HEADS[kind])
        if not head.exists() and given["algorithm"] == "NEXTN":
            with_prediction_layer(head, core_checkpoint)
        elif not head.exists():
            write_eagle_head(head, json.loads((core_checkpoint / "config.json").read_text()), **given)
        asked = {**SPECULATES, "speculative_algorithm": given["algorithm"], **settings}
        asked["speculative_draft_model_path"] = str(head)
        files = (head,) if given["algorithm"] == "NEXTN" else (core_checkpoint, head)
        return engine_with(**asked), DraftReference(*files)

    return start


def logits_of_rows(runner: HostRunner) -> Callable[[], np.ndarray]:
    """Return the compiled function from the kept hidden states of all rows to the draft head's logits."""
    config = runner.served.draft
    assert config is not None

    def on_device(weights: Any, features_RD: jax.Array) -> jax.Array:
        return draft_logits((weights.params, weights.draft), features_RD, config=config)

    whole = PartitionSpec()
    parts = weight_partitions(runner.config, config), whole
    mesh = runner.config.plan.mesh
    scored = jax.shard_map(on_device, mesh=mesh, in_specs=parts, out_specs=whole, check_vma=False)
    compiled = jax.jit(scored)
    return lambda: np.asarray(compiled(runner.weights, runner.state.draft.features_RD))


@pytest.mark.slow
@pytest.mark.float32("drafts are held to numpy")
@pytest.mark.parametrize("kind", SOME)
def test_features_logits_and_drafts_are_those_of_the_files(drafting_engine, kind: str):
    engine, reference = drafting_engine(kind)
    proposer, logits_of, compared = ModelProposer("drafts"), logits_of_rows(engine.runner), []

    def check(cycle: StepCycle, _: int) -> Iterable[Sequence]:
        for sequence in (each for each in cycle.scheduler.running if each.num_outputs):
            token_ids = sequence.token_ids[: sequence.num_tokens]
            features, logits, drafts = reference.ahead(token_ids, DRAFTS)
            (row,) = (row for row, other in enumerate(cycle.scheduler.table.sequences) if other is sequence)
            kept = np.asarray(engine.runner.state.draft.features_RD)[row]
            scale = np.abs(features[0]).max()
            np.testing.assert_allclose(kept, features[0], atol=TOLERANCE * scale)
            found = logits_of()[row]
            np.testing.assert_allclose(found, logits[0], atol=TOLERANCE * np.abs(logits[0]).max())
            assert proposer.propose(sequence, DRAFTS).tolist() == drafts
            compared.append(sequence.num_tokens)
        return ()

    way = replace(PLAIN, proposer=proposer, num_drafts=DRAFTS, intervene=check, overlaps=False)
    requests = [request_for(np.arange(5, 25), max_new_tokens=12), request_for(np.arange(40, 90), max_new_tokens=9)]
    run_together(engine.runner, engine.card, requests, way=way)
    assert len(compared) > 10


class Resting(PreparedExecutor):
    """Request drafts after every third step only, and record the shapes of decode steps."""

    def __init__(self, runner: HostRunner) -> None:
        super().__init__(runner, NUM_PAGES)
        self.has_drafted: list[bool] = []

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Execute a step, with drafts or without."""
        return super().execute(replace(plan, wants_drafts=plan.wants_drafts and plan.step_id % 3 == 0))


@pytest.mark.slow
@pytest.mark.float32("drafts are held to numpy")
@pytest.mark.parametrize("kind", SOME)
def test_drafts_after_a_rest_are_those_of_the_files(drafting_engine, kind: str):
    engine, reference = drafting_engine(kind)
    engine.runner.later.wait()
    assert any(shape.drafts_rest for shape in engine.runner.programs.steps)
    proposer, compared = ModelProposer("drafts"), []

    def check(cycle: StepCycle, _: int) -> Iterable[Sequence]:
        for sequence in (each for each in cycle.scheduler.running if each.num_outputs):
            if len(found := proposer.propose(sequence, DRAFTS)):
                _, _, drafts = reference.ahead(sequence.token_ids[: sequence.num_tokens], DRAFTS)
                assert found.tolist() == drafts
                compared.append(sequence.num_tokens)
        return ()

    way = replace(PLAIN, proposer=proposer, num_drafts=DRAFTS, intervene=check, overlaps=False)
    way = replace(way, executor=Resting(engine.runner))
    requests = [request_for(np.arange(5, 25), max_new_tokens=25), request_for(np.arange(40, 90), max_new_tokens=19)]
    run_together(engine.runner, engine.card, requests, way=way)
    assert len(compared) > 5


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOME)
def test_drafts_after_a_rest_are_those_without_one(drafting_engine, kind: str):
    """Native attention computes no query in steps that only store keys."""
    engine, _ = drafting_engine(kind)
    engine.runner.later.wait()

    def drafts_of(executor: PreparedExecutor) -> dict[tuple[int, int], list[int]]:
        proposer, found = ModelProposer("drafts"), {}

        def look(cycle: StepCycle, _: int) -> Iterable[Sequence]:
            for sequence in (each for each in cycle.scheduler.running if each.num_outputs):
                if len(drafts := proposer.propose(sequence, DRAFTS)):
                    found[sequence.num_prompt_tokens, sequence.num_tokens] = drafts.tolist()
            return ()

        way = replace(PLAIN, proposer=proposer, num_drafts=DRAFTS, intervene=look, overlaps=False, executor=executor)
        requests = [request_for(np.arange(5, 25), max_new_tokens=25), request_for(np.arange(40, 90), max_new_tokens=19)]
        run_together(engine.runner, engine.card, requests, way=way)
        return found

    resting, always = drafts_of(Resting(engine.runner)), drafts_of(PreparedExecutor(engine.runner, NUM_PAGES))
    both = resting.keys() & always.keys()
    assert len(both) > 3 and {key: resting[key] for key in both} == {key: always[key] for key in both}


@pytest.mark.natively
@pytest.mark.parametrize("kind", SOME)
@pytest.mark.parametrize("seed", [11])
def test_drafts_of_models_do_not_show(drafting_engine, kind: str, seed: int):
    engine, _ = drafting_engine(kind)
    check_law(engine, seed, count=6)


@slow
@pytest.mark.parametrize("kind", ["EAGLE3 of some words", "NEXTN"])
@pytest.mark.parametrize("seed", range(20, 26))
def test_drafts_of_models_do_not_show_in_many_mixes(drafting_engine, kind: str, seed: int):
    engine, _ = drafting_engine(kind)
    check_law(engine, seed, count=32)


@slow
@pytest.mark.float32("devices add up parts of sums")
@pytest.mark.parametrize("kind", ["EAGLE3 of some words", "NEXTN"])
@pytest.mark.parametrize("backend", ["replicated", "all_to_all"])
def test_drafts_of_models_do_not_show_over_two_data_ranks(drafting_engine, kind: str, backend: str):
    spread = {"devices_per_host": 4, "data_parallel_size": 2, "expert_backend": backend}
    engine, _ = drafting_engine(kind, **spread)
    check_law(engine, 30, count=24)


@slow
@pytest.mark.float32("devices add up parts of sums")
def test_drafts_of_models_do_not_show_while_experts_move(drafting_engine):
    engine, _ = drafting_engine("EAGLE3 of some words", **MOVING, data_parallel_size=2)
    eplb = EplbSteps(Migration(engine.runner.placement, hosts=1, slots_per_step=1), counts_every=7)
    version = eplb.migration.progress.version
    check_law(engine, 32, count=16, eplb=eplb, intervene=heading_elsewhere(eplb))
    assert eplb.migration.progress.version >= version + 4
    settle_placement(engine, eplb, random_requests(32, count=16, layout=engine.card.routing))


class CountingAwaited(PreparedExecutor):
    """An executor that counts chunks of which the devices alone know where they stand."""

    num_awaited = 0

    def execute(self, plan: StepPlan) -> StepResult | None:
        self.num_awaited += int((plan.chunks.starts <= AWAITED).sum())
        return super().execute(plan)


def check_law(engine: Engine, seed: int, *, count: int, **always: Any) -> None:
    """A run with drafts is the plain one, alone and beside preemptions, chunks and a small pool; also where no request
    keeps its next token waiting for the host, so that steps follow on drafts that are not known there."""
    requests = random_requests(seed, count=count, layout=engine.card.routing)
    for some in (requests, [known_to_devices(request) for request in requests]):
        executor = CountingAwaited(engine.runner, PLAIN.num_pages)
        check_runs(engine, seed, some, way=replace(PLAIN, executor=executor, **always))
    assert executor.num_awaited > min(100, 6 * count)


def check_runs(engine: Engine, seed: int, requests: list[GenerationRequest], *, way: Way) -> None:
    generator = np.random.default_rng(seed)
    plain = run_together(engine.runner, engine.card, requests, way=PLAIN)
    alone = replace(way, proposer=ModelProposer("drafts"), num_drafts=max_drafts(engine))
    assert_unchanged(engine, run_together(engine.runner, engine.card, requests, way=alone), plain)
    preempts = preempt_every(int(generator.integers(17, 25)), forgets=bool(generator.random() < 0.5))
    beside = {"chunk_tokens": 7, "num_pages": 60, "intervene": way.intervene or preempts}
    way = replace(alone, proposer=ModelProposer("drafts"), **beside)
    found = run_together(engine.runner, engine.card, requests, way=way)
    for key, outcome in plain.items():
        assert_same(found[key], outcome, routing=outcome.routing is not None)


def stale(draft: Any, rows_S: Any, positions_S: Any, ids_S: Any) -> Any:
    """One accepted draft is not counted."""
    return TRUE_PLACES(draft._replace(positions_R=draft.positions_R - 1), rows_S, positions_S, ids_S)


def one_too_far(draft: Any, rows_S: Any, positions_S: Any, ids_S: Any) -> Any:
    positions_S, ids_S = TRUE_PLACES(draft, rows_S, positions_S, ids_S)
    return jnp.where(positions_S > 0, positions_S + 1, positions_S), ids_S


@slow
@pytest.mark.parametrize("fault", [stale, one_too_far])
def test_faults_of_places_on_the_devices_would_be_seen(
    drafting_engine, core_checkpoint: Path, draft_folder: Path, fault: Callable[..., Any]
):
    engine, _ = drafting_engine(kind := "EAGLE3 of some words")
    requests = [known_to_devices(each) for each in random_requests(5, count=8, layout=engine.card.routing)]
    plain = run_together(engine.runner, engine.card, requests, way=PLAIN)
    head = {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": str(draft_folder / kind.replace(" ", "-")),
    }
    kept = {"num_pages": 200, "page_size": PAGE_SIZE, "enable_return_routed_experts": True, "compile_cache": "off"}
    way = replace(PLAIN, proposer=ModelProposer("drafts"), num_drafts=DRAFTS)
    settings = {**SPECULATES, **head, **kept}
    with patch.object(step_input, "_awaited", fault), Engine(str(core_checkpoint), **settings) as faulty:
        found = run_together(faulty.runner, faulty.card, requests, way=way)
    with pytest.raises(AssertionError):
        assert_unchanged(engine, found, plain)


@slow
def test_a_new_prediction_layer_comes_with_new_weights_or_the_old_one_stays(
    drafting_engine, core_checkpoint: Path, tmp_path: Path
):
    engine, _ = drafting_engine("NEXTN", num_pages=NUM_PAGES // 2)
    before = np.asarray(engine.runner.weights.draft["draft"]["fc_AD"]).copy()
    assert engine.update_weights_from_disk(core_checkpoint).success
    np.testing.assert_array_equal(np.asarray(engine.runner.weights.draft["draft"]["fc_AD"]), before)
    other = with_prediction_layer(tmp_path / "other", core_checkpoint, seed=1)
    assert engine.update_weights_from_disk(other).success
    assert not np.array_equal(np.asarray(engine.runner.weights.draft["draft"]["fc_AD"]), before)
