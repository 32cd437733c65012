"""What drafts change is time: every request comes to what it does without them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import fields, replace
from typing import Any
from unittest.mock import patch

import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe import Engine
from rayserve_moe.balancing.migration import Migration
from rayserve_moe.engine import cycle as step_cycle
from rayserve_moe.engine.cycle import StepCycle
from rayserve_moe.engine.eplb.steps import EplbSteps
from rayserve_moe.engine.extension import extension_of
from rayserve_moe.engine.routing import capture
from rayserve_moe.engine.routing.capture import RoutingCapture
from rayserve_moe.engine.speculation.policy import Speculation
from rayserve_moe.engine.speculation.proposers import PROPOSERS
from rayserve_moe.engine.speculation.steps import DraftedSteps
from rayserve_moe.execution.step import inputs as step_input
from rayserve_moe.execution.step import samples as step_samples
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.records import Constraint
from rayserve_moe.scheduling import verify_rows
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.step_plan import StepPlan, StepResult
from rayserve_moe.serving.metrics import EngineMetrics
from tests.pipelines.test_migration import heading_elsewhere
from tests.support.engine.engine_store import EngineStore
from tests.support.engine.host_runners import shared_by_many
from tests.support.engine.outputs import Outcome
from tests.support.engine.run_requests import PreparedExecutor, cycle_for, run_on, run_together, speculation_of
from tests.support.engine.schedulers import some_reach
from tests.support.engine.shared_settings import MOVING
from tests.support.engine.workload import request_for
from tests.support.models.core import PAGE_SIZE
from tests.support.speculation.oracle_proposer import Oracle
from tests.support.speculation.random_requests import (
    DRAFTS,
    PLAIN,
    SPECULATES,
    TOLERANCE,
    VOCAB_SIZE,
    assert_unchanged,
    check_mix,
    is_exact,
    random_requests,
    settle_placement,
)
from tests.support.text.constraints import synthetic_tokenizer

pytestmark = pytest.mark.natively


@pytest.fixture
def speculating(engine_with: EngineStore) -> Engine:
    with shared_by_many():
        return engine_with(**SPECULATES)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(4))
def test_drafts_do_not_show(speculating: Engine, seed: int):
    check_mix(speculating, seed, count=12)


TEXT_ALONE = {"stop", "stop_strings_after", "no_stop_trim", "stop_regex", "include_stop_str_in_output", "bad_words"}
TEXT_ALONE |= {"skip_special_tokens", "kept_special_ids", "repetition_detection", "logprobs_mode"}
WRITTEN_ALONE = {"incremental", "stream_routed_experts", "routed_experts_start", "thinking_token_budget"}
OF_OTHER_SERVERS = {"return_indexer_topk", "return_router_gates", "adapter"}
OF_AUDITS_AND_TEACHERS = {"is_audited", "return_layer_states", "layer_states_start"}
SHOWS_DRAFTS = {"return_draft_tokens"}
NUMBERED = {"request_id", "prompt_ids", "first_choice", "sampling"}
NOT_DRAWN = TEXT_ALONE | WRITTEN_ALONE | OF_OTHER_SERVERS | OF_AUDITS_AND_TEACHERS | SHOWS_DRAFTS | NUMBERED


def test_mixes_have_every_field_that_reaches_the_engine(speculating: Engine):
    """What the layers above read or write, and what only names a request, is not drawn."""
    requests = [one for seed in range(4) for one in random_requests(seed, count=16, layout=speculating.card.routing)]
    for records in (requests, [request.sampling for request in requests]):
        for field in fields(records[0]):
            if field.name not in NOT_DRAWN:
                assert any(getattr(record, field.name) != field.default for record in records), field.name


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 116))
def test_drafts_do_not_show_in_many_mixes(speculating: Engine, seed: int):
    check_mix(speculating, seed, count=32)


@pytest.mark.slow
@pytest.mark.float32("devices add up parts of sums")
@pytest.mark.parametrize("backend", ["replicated", "all_to_all"])
@pytest.mark.parametrize("seed", range(200, 206))
def test_drafts_do_not_show_over_two_data_ranks(engine_with: EngineStore, backend, seed):
    engine = engine_with(**SPECULATES, devices_per_host=4, data_parallel_size=2, expert_backend=backend)
    check_mix(engine, seed, count=24)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [300])
def test_drafts_do_not_show_with_experts_in_int8(engine_with: EngineStore, seed: int):
    check_mix(engine_with(**SPECULATES, expert_dtype="int8"), seed, count=24)


@pytest.mark.slow
@pytest.mark.float32("devices add up parts of sums")
@pytest.mark.parametrize("seed", [400])
def test_drafts_do_not_show_while_experts_move(engine_with: EngineStore, seed: int):
    engine = engine_with(**SPECULATES, **MOVING, data_parallel_size=2)
    eplb = EplbSteps(Migration(engine.runner.placement, hosts=1, slots_per_step=1), counts_every=7)
    version = eplb.migration.progress.version
    check_mix(engine, seed, count=24, eplb=eplb, intervene=heading_elsewhere(eplb))
    assert eplb.migration.progress.version >= version + 4
    settle_placement(engine, eplb, random_requests(seed, count=24, layout=engine.card.routing))


class CountingTokens(PreparedExecutor):
    """An executor that counts the tokens it is given."""

    num_tokens = 0

    def execute(self, plan: StepPlan) -> StepResult | None:
        self.num_tokens += plan.num_tokens
        return super().execute(plan)


@pytest.mark.slow
@pytest.mark.float32("devices add up parts of sums")
def test_balancing_counts_what_is_computed_and_answers_have_what_is_kept(engine_with: EngineStore):
    engine = engine_with(**SPECULATES, **MOVING, data_parallel_size=2)
    layout, requests = engine.card.routing, [request_for(np.arange(5, 25), max_new_tokens=24)]
    eplb = EplbSteps(Migration(engine.runner.placement, hosts=1, slots_per_step=1), counts_every=1)
    executor = CountingTokens(engine.runner, PLAIN.num_pages)
    way = replace(PLAIN, eplb=eplb, caches_prefixes=False, executor=executor)
    plain = run_together(engine.runner, engine.card, requests, way=way)
    before, executor.num_tokens = eplb.reading.counts, 0
    drafting = replace(way, proposer=Oracle(plain, share=0.5, vocab_size=VOCAB_SIZE), num_drafts=DRAFTS)
    found = run_together(engine.runner, engine.card, requests, way=drafting)
    counted = (eplb.reading.counts - before).sum(axis=1)
    (outcome,) = found.values()
    num_kept = len(outcome.rows)
    assert num_kept == 20 + 24 - 1 < executor.num_tokens
    assert counted.tolist() == [executor.num_tokens * layout.top_k] * len(layout.layer_ids)


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [5, 7])
def test_long_drafts_do_not_show_over_small_pages(engine_with: EngineStore, num_drafts):
    settings = SPECULATES | {"speculative_num_steps": 7, "page_size": 4, "num_pages": 400}
    engine = engine_with(**settings)
    requests = random_requests(num_drafts, count=24, layout=engine.card.routing)
    way = replace(PLAIN, page_size=4, num_pages=400)
    plain = run_together(engine.runner, engine.card, requests, way=way)
    oracle = Oracle(plain, share=0.9, vocab_size=VOCAB_SIZE)
    for num_pages in (60, 400):
        drafting = replace(way, proposer=oracle, num_drafts=num_drafts, num_pages=num_pages)
        found = run_together(engine.runner, engine.card, requests, way=drafting)
        assert_unchanged(engine, found, plain)


def test_drafts_that_are_right_take_fewer_steps(speculating: Engine):
    requests = [request_for(np.arange(5, 25), max_new_tokens=24)]
    plain = run_together(speculating.runner, speculating.card, requests, way=PLAIN)
    for share, num_steps in ((1.0, 1 + 6), (0.0, 24)):
        way = replace(PLAIN, proposer=Oracle(plain, share=share, vocab_size=VOCAB_SIZE), num_drafts=DRAFTS)
        cycle = cycle_for(speculating.runner, speculating.card, way)
        assert_unchanged(speculating, run_on(cycle, speculating.card, requests, constraints=PLAIN.constraints), plain)
        cycle.scheduler.flush()
        assert cycle.statistics()["steps"] == num_steps
        assert cycle.statistics()["tokens_sampled"] == 24


def test_a_request_that_wants_no_drafts_has_none(speculating: Engine):
    requests = [replace(request_for(np.arange(5, 25), max_new_tokens=24), speculative=False)]
    plain = run_together(speculating.runner, speculating.card, requests, way=PLAIN)
    way = replace(PLAIN, proposer=Oracle(plain, share=1.0, vocab_size=VOCAB_SIZE), num_drafts=DRAFTS)
    cycle = cycle_for(speculating.runner, speculating.card, way)
    run_on(cycle, speculating.card, requests, constraints=PLAIN.constraints)
    cycle.scheduler.flush()
    assert speculation_of(cycle).totals.drafted == 0


def test_aborts_leave_the_others_alone(speculating: Engine):
    requests = random_requests(3, count=8, layout=speculating.card.routing)
    plain = run_together(speculating.runner, speculating.card, requests, way=PLAIN)
    aborted: set[tuple[str, int]] = set()

    def abort(cycle: StepCycle, number: int) -> Iterable[Sequence]:
        if number % 5 or not cycle.scheduler.running:
            return ()
        sequence = cycle.scheduler.running[number % len(cycle.scheduler.running)]
        aborted.add((sequence.request.request_id, sequence.choice_index))
        return [cycle.end(sequence, FinishReason("abort"))]

    way = replace(PLAIN, proposer=Oracle(plain, share=0.8, vocab_size=VOCAB_SIZE), num_drafts=DRAFTS, intervene=abort)
    found = run_together(speculating.runner, speculating.card, requests, way=way)
    assert aborted
    for key in aborted:
        ids = found.pop(key).ids
        assert ids == plain[key].ids[: len(ids)]
    assert_unchanged(speculating, found, {key: plain[key] for key in found})


def answers_of(engine: Engine, **keywords: Any) -> list[dict]:
    """Answers to a prompt that repeats itself, streamed and at once."""
    prompt = [*range(5, 17), *range(5, 17), *range(5, 15)]
    params = {"n": 3, "max_new_tokens": 40, "temperature": 0.0, "sampling_seed": 3, "stop": ["ab", "q"]}
    asked = {"sampling_params": params, "return_logprob": True, "return_routed_experts": True, **keywords}
    whole = engine.generate(input_ids=prompt, **asked)
    pieces = {answer["index"]: answer for answer in engine.generate_stream(input_ids=prompt, **asked)}
    assert isinstance(whole, list)
    return [*whole, *(pieces[i] for i in range(3))]


def check_told(engine: Engine, speculation: Speculation, infos: list[dict[str, Any]]) -> None:
    """`meta_info` of all answers adds up to what `/metrics` tells of the proposer, time included."""
    totals, name = speculation.totals, speculation.proposer.name
    counts = {"spec_verify_ct": totals.chains, "spec_draft_token_num": totals.drafted}
    counts["spec_accept_token_num"] = totals.accepted
    assert counts == {key: sum(info.get(key, 0) for info in infos) for key in counts}
    for info in infos:
        if chains := info.get("spec_verify_ct", 0):
            assert info["spec_accept_length"] == 1 + info["spec_accept_token_num"] / chains
            assert info["spec_accept_rate"] == info["spec_accept_token_num"] / info["spec_draft_token_num"]
    samples = [sample for family in EngineMetrics(engine.loop, {}).collect() for sample in family.samples]
    told = {s.name.removeprefix("rayserve_moe_draft_"): s.value for s in samples if s.labels.get("proposer") == name}
    assert [told[f"{key}_total"] for key in ("chains", "tokens", "tokens_accepted")] == list(counts.values())
    assert told["accepted_length"] == 1 + totals.accepted / totals.chains
    assert told["seconds_total"] == totals.draft_s > 0


@pytest.mark.parametrize("algorithm", list(PROPOSERS))
def test_answers_are_those_without_drafts(speculating: Engine, algorithm: str):
    cycle = speculating.loop._cycle
    proposer = PROPOSERS[algorithm](replace(speculating.runner.served.settings.speculation, min_match=1))
    fixed = Speculation(cycle.scheduler.table, proposer, max_drafts=DRAFTS, is_fixed=True, reach=some_reach())
    plain = answers_of(speculating, speculative=False)
    with patch.object(extension_of(cycle.extensions, DraftedSteps), "speculation", fixed):
        drafted = answers_of(speculating)
        check_told(speculating, fixed, [answer["meta_info"] for answer in drafted])
    assert fixed.totals.drafted > 0 and (fixed.totals.accepted > 0 or algorithm == "NGRAM")
    assert any(answer["meta_info"].get("spec_accept_length", 0) >= 1 for answer in drafted)
    assert not any("spec_" in name for answer in plain for name in answer["meta_info"])
    varying = ("id", "e2e_latency", "cached_tokens", "routed_experts_info", "output_token_logprobs")
    for answer, expected in zip(drafted, plain, strict=True):
        logprobs = [[entry[0] for entry in one["meta_info"]["output_token_logprobs"]] for one in (answer, expected)]
        tolerance = 0 if is_exact(speculating) else TOLERANCE
        np.testing.assert_allclose(*logprobs, rtol=tolerance, atol=tolerance)
        for one in (answer, expected):
            one["meta_info"] = {k: v for k, v in one["meta_info"].items() if k not in varying and "spec_" not in k}
        assert answer == expected


def check_store(cycle: StepCycle, _: int) -> None:
    """The store has no row beyond what a sequence has computed for good."""
    captured = extension_of(cycle.extensions, RoutingCapture)
    assert captured is not None
    for sequence in cycle.scheduler.running:
        end = len(sequence.pages) * PAGE_SIZE
        slots, stamps = captured._places(sequence, sequence.num_computed, end)
        assert not captured._store.read(slots, stamps)[1].any(), "a row of a rejected token is kept"


def run_with_drafts(engine: Engine, *, share: float = 0.6) -> None:
    requests = random_requests(5, count=12, layout=engine.card.routing)
    plain = run_together(engine.runner, engine.card, requests, way=PLAIN)
    oracle = Oracle(plain, share=share, vocab_size=VOCAB_SIZE)
    way = replace(PLAIN, proposer=oracle, num_drafts=DRAFTS, intervene=check_store)
    cycle = cycle_for(engine.runner, engine.card, way)
    try:
        found = run_on(cycle, engine.card, requests, intervene=check_store, constraints=PLAIN.constraints)
        assert_unchanged(engine, found, plain)
    finally:
        engine.runner.execute(cycle.scheduler.empty_plan())


def test_no_row_of_a_rejected_token_is_kept(speculating: Engine):
    run_with_drafts(speculating)


def test_routing_of_rejected_tokens_would_be_seen(speculating: Engine):
    def keeps_all(schedule: Any, _: np.ndarray) -> np.ndarray:
        return np.ones(schedule.plan.num_tokens, np.bool_)

    with patch.object(capture, "tokens_that_count", keeps_all), pytest.raises(AssertionError, match="rejected"):
        run_with_drafts(speculating)


def test_one_draft_too_many_would_be_seen(speculating: Engine):
    true_counts = verify_rows.samples_that_count

    def one_more(table: Any, schedule: Any, *, result: Any) -> np.ndarray | None:
        counts = true_counts(table, schedule, result=result)
        if counts is None:
            return None
        rejected = np.flatnonzero(~counts)
        counts[rejected[:1]] = True
        return counts

    with patch.object(step_cycle, "samples_that_count", one_more), pytest.raises(AssertionError):
        run_with_drafts(speculating)


def test_constrained_sequences_have_no_drafts_and_drafts_of_others_change_nothing_beside_them(speculating: Engine):
    """Their samples are held in steps that verify drafts of other sequences."""
    requests = random_requests(9, count=6, layout=speculating.card.routing)
    constraint = Constraint("regex", "([a-d]{3} ){2,6}")
    sampled = {"max_new_tokens": 30, "temperature": 1.0, "ignore_eos": False}
    held = [replace(request_for([5, 6 + i], f"held{i}", seed=i, **sampled), constraint=constraint) for i in range(3)]
    plain = run_together(speculating.runner, speculating.card, [*held, *requests], way=PLAIN)
    oracle = Oracle(plain, share=0.9, vocab_size=VOCAB_SIZE)
    drafting = replace(PLAIN, proposer=oracle, num_drafts=DRAFTS)
    found = run_together(speculating.runner, speculating.card, [*held, *requests], way=drafting)
    assert_unchanged(speculating, found, plain)
    assert all(re.fullmatch("([a-d]{3} ){2,6}", text_of(found[f"held{i}", 0])) for i in range(3))


def text_of(outcome: Outcome) -> str:
    """The text of an answer, without the end of sequence."""
    return synthetic_tokenizer().decode(outcome.ids)


def _noise_by_step(sampling: Callable[..., Any]) -> Callable[..., Any]:
    def by_step(state: Any, rows_S: Any, *, positions_S: Any) -> Any:
        batch, penalties = sampling(state, rows_S, positions_S=positions_S)
        is_same = rows_S[1:] == rows_S[:-1]
        first = positions_S
        for _ in range(DRAFTS):
            first = first.at[1:].set(jnp.where(is_same, first[:-1], first[1:]))
        return replace(batch, seed_S=batch.seed_S + (positions_S - first).astype(batch.seed_S.dtype)), penalties

    return by_step


def _no_drafted_counts(logits_SV: Any, state: Any, **named: Any) -> Any:
    return _adjust(logits_SV, state, **(named | {"drafted_SK": None}))


_adjust = step_samples.adjust
DEVICE_FAULTS = {
    "noise by step": ((step_input, step_samples), "sampling_of", _noise_by_step(step_input.sampling_of)),
    "drafts that penalties do not count": ((step_samples,), "adjust", _no_drafted_counts),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", list(DEVICE_FAULTS))
def test_faults_on_the_devices_would_be_seen(core_checkpoint, speculating: Engine, fault: str):
    requests = random_requests(5, count=36, layout=speculating.card.routing)
    plain = run_together(speculating.runner, speculating.card, requests, way=PLAIN)
    modules, name, faulty = DEVICE_FAULTS[fault]
    kept = {"num_pages": 200, "page_size": PAGE_SIZE, "enable_return_routed_experts": True, "compile_cache": "off"}
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(patch.object(module, name, faulty))
        engine = stack.enter_context(Engine(str(core_checkpoint), **SPECULATES, **kept))
        way = replace(PLAIN, proposer=Oracle(plain, share=0.9, vocab_size=VOCAB_SIZE), num_drafts=DRAFTS)
        found = run_together(engine.runner, engine.card, requests, way=way)
    with pytest.raises(AssertionError):
        assert_unchanged(speculating, found, plain)
