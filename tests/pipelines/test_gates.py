"""Router gates: the weights of a row's experts, the same however the row was computed, and forced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from rayserve_moe import Engine, extract_indexer_topk_from_meta_info, extract_router_gates_from_meta_info
from rayserve_moe.config.settings import SettingsError
from rayserve_moe.engine.speculation.model_drafts import ModelProposer
from rayserve_moe.execution.programs.specs import programs_of
from rayserve_moe.execution.runner import HostRunner
from rayserve_moe.replay.encoding import routing_until
from rayserve_moe.requests.columns import as_array
from rayserve_moe.requests.records import GATES, ModelCard, RequestError
from rayserve_moe.requests.results import ChoiceResult
from tests.support.engine.cached_prompts import check_cached_prompts
from tests.support.engine.host_runners import TWO_SHAPES, WAY, card_of, prepared_runner
from tests.support.engine.outputs import Outcomes, assert_identical
from tests.support.engine.run_requests import cycle_for, preempt_every, run_alone, run_on, speculation_of
from tests.support.engine.workload import mixed_workload
from tests.support.kernels.native_kernels import need_native_kernels
from tests.support.models.families import family_case, write_family
from tests.support.models.full_logits import prompt_outputs_of
from tests.support.speculation.draft_checkpoints import with_prediction_layer

SCALED = family_case("deepseek_v3-0")
PROMPTS = [np.random.default_rng(length).integers(3, 100, length).tolist() for length in (5, 40, 70)]
SETTINGS: dict[str, Any] = {**TWO_SHAPES, "dtype": "float32", "enable_return_routed_experts": True}
SAMPLING = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
SCORED = {"max_new_tokens": 0, "temperature": 0}
ROWS = {"return_routed_experts": True, "return_router_gates": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(SCALED, tmp_path_factory.mktemp("gates") / "model", seed=5)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Engine]:
    with Engine(str(checkpoint), enable_return_router_gates=True, **SETTINGS) as engine:
        yield engine


@pytest.fixture(scope="module")
def answers(engine: Engine) -> list[dict]:
    return engine.generate(input_ids=PROMPTS, sampling_params=SAMPLING, return_logprob=True, **ROWS)


def whole(prompt: list[int], answer: dict) -> list[int]:
    return [*prompt, *answer["output_ids"]]


def test_gates_are_those_of_a_plain_run_and_are_described(engine: Engine, answers: list[dict]):
    outputs_of = prompt_outputs_of(engine.runner, longest=96)
    router = engine.runner.config.spec.router
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        gates, info = extract_router_gates_from_meta_info(answer), answer["meta_info"]["router_gates_info"]
        wanted = outputs_of(whole(prompt, answer)[:-1]).gates_MTK.swapaxes(0, 1)
        np.testing.assert_allclose(gates, wanted, rtol=0, atol=1e-5)
        assert info["missing"] == [] and info["shape"] == answer["meta_info"]["routed_experts_info"]["shape"]
        assert (info["score"], info["normalized"], info["scale"]) == ("sigmoid", True, router.scale)
        np.testing.assert_allclose(gates.sum(-1), router.scale, rtol=1e-5)
    assert router.scale != 1.0


def scored(engine: Engine, answers: list[dict], forced: list[Any], **fields: Any) -> list[dict]:
    return engine.generate(
        input_ids=[whole(prompt, answer) for prompt, answer in zip(PROMPTS, answers, strict=True)],
        sampling_params=SCORED,
        return_logprob=True,
        logprob_start_len=0,
        forced_routed_experts=[answer["meta_info"]["routed_experts"] for answer in answers],
        forced_router_gates=forced,
        **fields,
    )


def logprobs_of(found: list[dict]) -> list[np.ndarray]:
    return [np.array([entry[0] for entry in each["meta_info"]["input_token_logprobs"][1:]]) for each in found]


def test_forced_gates_give_the_log_probs_of_the_run_and_others_do_not(engine: Engine, answers: list[dict]):
    """A zero gate changes its token's log-prob and no earlier one. Forced gates are returned."""
    free = logprobs_of(scored(engine, answers, [None] * 3))
    same = logprobs_of(scored(engine, answers, [answer["meta_info"]["router_gates"] for answer in answers]))
    changed = [extract_router_gates_from_meta_info(answer).copy() for answer in answers]
    for gates in changed:
        gates[3] = 0.0
    found = scored(engine, answers, changed, **ROWS)
    for ours, theirs, answer in zip(same, free, answers, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
        outputs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        np.testing.assert_allclose(ours[-len(outputs) :], outputs, rtol=0, atol=1e-5)
    for ours, theirs, answer, gates in zip(logprobs_of(found), free, found, changed, strict=True):
        np.testing.assert_allclose(ours[:3], theirs[:3], rtol=0, atol=1e-5)
        assert abs(ours[3] - theirs[3]) > 1e-3
        np.testing.assert_array_equal(extract_router_gates_from_meta_info(answer)[: len(gates)], gates)


@pytest.mark.parametrize(
    ("forced", "message"),
    [
        (np.ones((5, 1, 2), np.float32), "must hold floats of shape"),
        ("AAAA", "must hold float32 of shape"),
    ],
)
def test_gates_that_do_not_fit_are_refused(engine: Engine, answers: list[dict], forced: Any, message: str):
    with pytest.raises(RequestError, match=message) as refused:
        scored(engine, answers, [forced, None, None])
    assert refused.value.param == "forced_router_gates"


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e39])
def test_gates_that_are_not_finite_in_float32_are_refused(engine: Engine, answers: list[dict], value: float):
    gates = np.full(extract_router_gates_from_meta_info(answers[0]).shape, value)
    with pytest.raises(RequestError, match="must hold finite numbers"):
        scored(engine, answers, [gates, None, None])


def test_gates_need_experts(engine: Engine, answers: list[dict]):
    gates = extract_router_gates_from_meta_info(answers[0])
    with pytest.raises(RequestError, match="needs forced_routed_experts"):
        engine.generate(input_ids=PROMPTS[0], sampling_params=SCORED, forced_router_gates=gates[:5])
    with pytest.raises(RequestError, match="needs return_routed_experts"):
        engine.generate(input_ids=PROMPTS[0], sampling_params=SCORED, return_router_gates=True)


@pytest.mark.slow
def test_a_server_without_the_setting_computes_no_gates_and_refuses_them(checkpoint: Path, answers: list[dict]):
    """Without the setting, steps have neither an input nor an output for gates."""
    experts = answers[0]["meta_info"]["routed_experts"]
    with Engine(str(checkpoint), **SETTINGS) as plain:
        for step in [each for each in programs_of(plain.runner.served, num_pages=8) if each.shape is not None]:
            _, output = jax.eval_shape(step.run, *step.arguments, **step.inputs)
            assert output.gates_MTK is None and output.topk_ids_MTK is not None
            assert step.inputs["blocks"] is None or step.inputs["blocks"].gates_NMXK is None
        with pytest.raises(RequestError, match="enable_return_router_gates: true"):
            plain.generate(input_ids=PROMPTS[0], sampling_params=SCORED, **ROWS)
        with pytest.raises(RequestError, match="enable_return_router_gates: true"):
            plain.generate(
                input_ids=whole(PROMPTS[0], answers[0]),
                sampling_params=SCORED,
                forced_routed_experts=experts,
                forced_router_gates=answers[0]["meta_info"]["router_gates"],
            )
    with pytest.raises(SettingsError, match="enable_return_router_gates needs enable_return_routed_experts"):
        Engine(str(checkpoint), enable_return_router_gates=True)


@pytest.mark.slow
def test_four_devices_have_and_force_the_gates_of_one(engine: Engine, answers: list[dict], checkpoint: Path):
    spread = {**SETTINGS, "enable_return_router_gates": True, "devices_per_host": 4, "data_parallel_size": 2}
    changed = [extract_router_gates_from_meta_info(answer) * np.float32(0.5) for answer in answers]
    wanted = logprobs_of(scored(engine, answers, changed))
    with Engine(str(checkpoint), **spread) as mesh:
        found = mesh.generate(input_ids=PROMPTS, sampling_params=SAMPLING, **ROWS)
        for ours, theirs in zip(found, answers, strict=True):
            np.testing.assert_allclose(*map(extract_router_gates_from_meta_info, (ours, theirs)), rtol=0, atol=1e-5)
        for ours, theirs in zip(logprobs_of(scored(mesh, answers, changed)), wanted, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_any_subset_of_decisions_can_be_forced(tmp_path: Path):
    """Forcing all parts of a run gives its log-probs; zero gates change them, as does an index limited to the token."""
    sparse = family_case("glm_moe_dsa-1")
    on = {"enable_return_router_gates": True, "enable_return_indexer_topk": True, "page_size": 16}
    path = write_family(sparse, tmp_path / "sparse", seed=5)
    with Engine(str(path), **{**SETTINGS, **on}) as engine:
        (answer,) = engine.generate(
            input_ids=PROMPTS[1:2], sampling_params=SAMPLING, return_indexer_topk=True, return_logprob=True, **ROWS
        )
        meta = answer["meta_info"]
        gates, index = extract_router_gates_from_meta_info(answer), extract_indexer_topk_from_meta_info(answer)
        alone = np.full_like(index, -1)
        alone[:, :, 0] = np.arange(len(index))[:, None]

        def logprobs(**forced: Any) -> np.ndarray:
            (found,) = engine.generate(
                input_ids=[whole(PROMPTS[1], answer)],
                sampling_params=SCORED,
                return_logprob=True,
                logprob_start_len=len(PROMPTS[1]) - 1,
                **{name: [value] for name, value in forced.items()},
            )
            return np.array([entry[0] for entry in found["meta_info"]["input_token_logprobs"][1:]])

        wanted = [entry[0] for entry in meta["output_token_logprobs"]]
        experts = {"forced_routed_experts": meta["routed_experts"]}
        for gates_of_run in ({}, {"forced_router_gates": gates}):
            for index_of_run in ({}, {"forced_indexer_topk": index}):
                found = logprobs(**experts, **gates_of_run, **index_of_run)
                np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
        for other in ({"forced_router_gates": 0 * gates}, {"forced_indexer_topk": alone}):
            assert np.abs(logprobs(**experts, **other) - wanted).max() > 1e-3


DRAFTS = 3
WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "small chunks": {"chunk_tokens": 7, "num_rows": 3},
    "nothing cached": {"caches_prefixes": False},
    "preempted": {"intervene": preempt_every(5)},
    "preempted, pages lost": {"num_pages": 29, "intervene": preempt_every(11, forgets=True)},
    "drafts": {"proposer": ModelProposer("drafts"), "num_drafts": DRAFTS},
}


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_native_kernels()
    directory = tmp_path_factory.mktemp("laws")
    return with_prediction_layer(
        directory / "model", write_family(SCALED, directory / "plain", seed=5, dtype="bfloat16")
    )


@pytest.fixture(scope="module")
def card(drafting: Path) -> ModelCard:
    return card_of(drafting, enable_return_router_gates=True)


@pytest.fixture(scope="module")
def runner(drafting: Path) -> HostRunner:
    sizes = {**TWO_SHAPES, "precompile_bs_paddings": [WAY.num_rows * (1 + DRAFTS)], "cpu_kernels": "native"}
    drafted = {"speculative_algorithm": "NEXTN", "speculative_num_steps": DRAFTS}
    on = {"enable_return_routed_experts": True, "enable_return_router_gates": True, "dtype": "bfloat16"}
    return prepared_runner(drafting, **sizes, **drafted, **on, speculative_draft_model_path=str(drafting))


@pytest.fixture(scope="module")
def alone(runner: HostRunner, card: ModelCard) -> Outcomes:
    """Run each request alone, without drafts or cached prompts."""
    return run_alone(runner, card, mixed_workload(), way=replace(WAY, caches_prefixes=False))


@pytest.mark.slow
@pytest.mark.parametrize("changes", WAYS.values(), ids=WAYS.keys())
def test_the_way_does_not_show(runner: HostRunner, card: ModelCard, alone: Outcomes, changes: dict[str, Any]):
    """Assert that every gate is known and equal to the bit."""
    cycle = cycle_for(runner, card, replace(WAY, **changes))
    found = run_on(cycle, card, mixed_workload(), intervene=changes.get("intervene"))
    cycle.scheduler.flush()
    assert all(outcome.routing is not None and GATES in outcome.routing.parts for outcome in found.values())
    assert_identical(found, alone)


@pytest.mark.slow
@pytest.mark.parametrize("intervene", [None, preempt_every(7)], ids=["undisturbed", "preempted"])
def test_outputs_that_were_accepted_drafts_are_as_many_as_are_counted(
    runner: HostRunner, card: ModelCard, intervene: Any
):
    cycle = cycle_for(runner, card, replace(WAY, proposer=ModelProposer("drafts"), num_drafts=DRAFTS))
    requests = [replace(request, return_draft_tokens=True) for request in mixed_workload()]
    found = run_on(cycle, card, requests, intervene=intervene)
    cycle.scheduler.flush()
    for outcome in found.values():
        assert len(outcome.columns["drafted"]) == len(outcome.ids)
    num_drafted = sum(int(as_array(outcome.columns["drafted"]).sum()) for outcome in found.values())
    assert num_drafted == speculation_of(cycle).totals.accepted > 0


@pytest.mark.slow
def test_cached_prompts_have_their_gates(runner: HostRunner, card: ModelCard, alone: Outcomes):
    check_cached_prompts(runner, card, alone)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 7])
def test_a_request_of_a_lost_replica_goes_on_with_its_gates(
    runner: HostRunner, card: ModelCard, alone: Outcomes, count: int
):
    """Committed tokens keep their gates; the other replica returns the following ones."""
    requests = [request for request in mixed_workload() if request.sampling.max_new_tokens > count]
    committed = []
    for request in requests:
        for choice in range(request.sampling.n):
            outcome = alone[request.request_id, choice]
            assert outcome.routing is not None
            rows = routing_until(outcome.routing, len(request.prompt_ids) + count - 1)
            ids, logprobs = outcome.ids[:count], outcome.logprobs[:count]
            committed.append(ChoiceResult(request.request_id, choice, ids, logprobs, ranks=[1] * count, routing=rows))
    cycle = cycle_for(runner, card, WAY)
    streamed = [replace(request, stream_routed_experts=True) for request in requests]
    found = run_on(cycle, card, streamed, committed=committed)
    cycle.scheduler.flush()
    for before in committed:
        key = before.request_id, before.choice_index
        rest, theirs = found[key].routing, alone[key].routing
        assert rest is not None and theirs is not None and rest.gates is not None and theirs.gates is not None
        np.testing.assert_array_equal(rest.gates, theirs.gates[rest.start :])
