"""Hidden states, and log-probs of listed ids in prompts: what they are, and that nothing depends on them."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from rayserve_moe import Engine
from rayserve_moe.config.settings import SettingsError
from rayserve_moe.replay.sketches import sketches_of
from rayserve_moe.requests.columns import Columns, as_array
from rayserve_moe.requests.records import GenerationRequest, ListedInPrompt, RequestError
from tests.pipelines.conftest import ON_TWO_RANKS, STATES, EngineStore, ReferenceFactory
from tests.support.engine.outputs import LOGPROB_TOLERANCE, STATE_TOLERANCE, Outcomes, assert_all_same
from tests.support.engine.run_requests import Way, cycle_for, preempt_every, run_alone, run_on, run_together
from tests.support.engine.shared_settings import ONE_BUCKET
from tests.support.engine.workload import draw_prompt, request_for
from tests.support.speculation.random_requests import PLAIN, VOCAB_SIZE

ALONE = replace(PLAIN, constraints=None)
WAYS = {
    "together": ALONE,
    "one step after the other": replace(ALONE, overlaps=False),
    "chunks that cut pages": replace(ALONE, chunk_tokens=7, step_tokens=48),
    "single tokens": replace(ALONE, chunk_tokens=1),
    "preemption every 2 steps": replace(ALONE, chunk_tokens=16, intervene=preempt_every(2)),
    "preemption every 3 steps, all forgotten": replace(ALONE, intervene=preempt_every(3, forgets=True)),
    "no cached prefixes": replace(ALONE, caches_prefixes=False),
}


def asking() -> list[GenerationRequest]:
    """Requests for states, listed log-probs and audits, with one and several choices, with and without outputs."""
    generator = np.random.default_rng(11)
    requests = []
    for i, length in enumerate([1, 2, 33, 40, 77, 100]):
        sampling = {"max_new_tokens": (0, 6, 1, 9, 0, 5)[i], "n": 1 + 2 * (i == 3), "temperature": float(i == 3)}
        request = request_for(draw_prompt(generator, length), f"i{i}", **sampling)
        rows = generator.integers(-1, VOCAB_SIZE, (length - 1, 1 + 40 * (i == 2))).astype(np.int32)[i:]
        if len(rows) and i != 5:
            request = replace(request, listed_in_prompt=ListedInPrompt(i, rows))
        request = replace(request, return_hidden_states=("last", "all", "all", "all", "", "last")[i])
        request = replace(request, is_audited=i in (0, 3, 4))
        requests.append(replace(request, return_layer_states=i in (2, 3, 4), layer_states_start=5 * (i == 3)))
    return requests


@pytest.fixture(scope="module")
def shown(engine_with: EngineStore) -> Iterator[Engine]:
    with engine_with.held(**ONE_BUCKET, **STATES, structured_output=True) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(shown: Engine) -> Outcomes:
    return run_alone(shown.runner, shown.card, asking(), way=ALONE)


@pytest.mark.float32("the reference is numpy's, in float64")
def test_they_are_those_of_the_reference(shown: Engine, alone: Outcomes, reference_for: ReferenceFactory):
    reference = reference_for(Path(shown.card.path))
    for request in asking():
        for choice in range(request.sampling.n):
            outcome = alone[request.request_id, choice]
            text = [*request.prompt_ids.tolist(), *outcome.ids]
            read = text[: max(len(request.prompt_ids), len(text) - 1)]
            states = reference.states(read)
            found = {} if outcome.prompt is None else outcome.prompt.columns
            assert ("hidden" in found) == bool(request.return_hidden_states)
            if "hidden" in found:
                wanted = states if request.return_hidden_states == "all" else states[len(request.prompt_ids) - 1 :]
                np.testing.assert_allclose(found["hidden"], wanted, rtol=0, atol=STATE_TOLERANCE)
            if (listed := request.listed_in_prompt) is not None:
                rows = reference.all_logprobs(text)[listed.start : listed.start + len(listed.ids)]
                expected = np.where(listed.ids < 0, 0, np.take_along_axis(rows, np.maximum(listed.ids, 0), axis=1))
                np.testing.assert_allclose(found["listed_logprobs"], expected, rtol=0, atol=LOGPROB_TOLERANCE)
            if request.return_layer_states:
                check_layer_states(shown, request, found)
            if request.is_audited:
                prompt = request.prompt_ids.tolist()
                np.testing.assert_array_equal(found["native_experts"], reference.rows(prompt)[0])
                assert (found["expert_ranks"] == shown.card.routing.top_k).all()


def check_layer_states(engine: Engine, request: GenerationRequest, found: Columns) -> None:
    """The first state is the embedding of each token; sketches project the states."""
    states, start, tokens = as_array(found["layer_states"]), request.layer_states_start, request.prompt_ids
    table = load_file(Path(engine.card.path) / "model.safetensors")["model.embed_tokens.weight"]
    assert states.shape == (len(tokens) - start, 3, table.shape[1])
    np.testing.assert_allclose(states[:, 0], table[tokens[start:]], rtol=0, atol=STATE_TOLERANCE)
    if request.is_audited:
        sketches = as_array(found["sketches"])[start:, [0, 2, 3]]
        np.testing.assert_allclose(sketches_of(states), sketches, rtol=0, atol=STATE_TOLERANCE)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_they_do_not_depend_on_scheduling(shown: Engine, alone: Outcomes, way: Way):
    assert_all_same(run_together(shown.runner, shown.card, asking(), way=way), alone)


@pytest.mark.natively
def test_they_do_not_depend_on_data_ranks(two_ranks: Engine, alone: Outcomes):
    assert_all_same(run_together(two_ranks.runner, two_ranks.card, asking(), way=ON_TWO_RANKS), alone)


def test_what_is_looked_at_is_computed_although_it_is_cached(shown: Engine, alone: Outcomes):
    cycle = cycle_for(shown.runner, shown.card, ALONE)
    for request in asking():
        plain = replace(request, request_id="plain", return_hidden_states="", listed_in_prompt=None)
        plain = replace(plain, is_audited=False, return_layer_states=False)
        run_on(cycle, shown.card, [plain])
        outcomes = run_on(cycle, shown.card, [request])
        assert_all_same(outcomes, {key: alone[key] for key in outcomes})
        if request.return_hidden_states == "all" or request.is_audited or request.return_layer_states:
            assert outcomes[request.request_id, 0].num_cached <= request.layer_states_start
    cycle.scheduler.flush()


def answer_of(engine: Engine, **fields: Any) -> dict[str, Any]:
    asked = {"input_ids": [*range(40, 60)], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
    answer = engine.generate(**(asked | fields))
    assert isinstance(answer, dict)
    return answer


def test_a_teacher_s_pass_has_likeliest_tokens_states_and_rows(shown: Engine):
    """Score a prompt under its own rows and under the router's; all states are equal."""
    asked = {"sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}
    asked |= {"top_logprobs_num": 5, "return_layer_states": True, "layer_states_start_len": 4}
    meta = answer_of(shown, return_routed_experts=True, **asked)["meta_info"]
    states = meta["layer_states"]
    values = np.frombuffer(base64.b64decode(states["data"]), "<f4").reshape(states["shape"])
    assert (values.shape[:2], states["start"], states["layers"]) == ((16, 3), 4, [0, 2, 3])
    assert [len(top) for top in meta["input_top_logprobs"][1:]] == [5] * 19
    again = answer_of(shown, forced_routed_experts=meta["routed_experts"], **asked)["meta_info"]
    assert again["layer_states"]["shape"] == states["shape"]
    forced = np.frombuffer(base64.b64decode(again["layer_states"]["data"]), "<f4").reshape(states["shape"])
    np.testing.assert_allclose(forced, values, rtol=0, atol=STATE_TOLERANCE)


def test_states_of_layers_that_cannot_be_returned_are_refused(shown: Engine, engine: Engine):
    with pytest.raises(RequestError, match="hidden_state_layers"):
        answer_of(engine, return_layer_states=True)
    with pytest.raises(RequestError) as refused:
        answer_of(shown, return_layer_states=True, layer_states_start_len=20)
    assert refused.value.param == "layer_states_start_len"
    for layers in ([4], [1, 1]):
        with pytest.raises(SettingsError, match="hidden_state_layers"):
            Engine(str(shown.card.path), hidden_state_layers=layers)


def test_listed_log_probs_of_prompts_are_those_of_prompt_scores(shown: Engine):
    """Of the token that stands there, and of others as a prompt with that token says."""
    asked = {"return_logprob": True, "logprob_start_len": 3, "sampling_params": {"max_new_tokens": 0}}
    meta = answer_of(shown, token_ids_logprob=[*range(40, 60), 7], **asked)["meta_info"]
    first, *entries = meta["input_token_ids_logprobs"]
    assert first is None and len(entries) == 16
    for own, listed in zip(meta["input_token_logprobs"][1:], entries, strict=True):
        (value,) = [logprob for logprob, token_id, _ in listed if token_id == own[1]]
        assert value == pytest.approx(own[0], abs=LOGPROB_TOLERANCE)
    other = answer_of(shown, input_ids=[*range(40, 50), 7], **asked)["meta_info"]["input_token_logprobs"][-1]
    assert entries[6][-1][:2] == [pytest.approx(other[0], abs=LOGPROB_TOLERANCE), 7]


def test_answers_have_a_state_for_every_token_that_was_read(shown: Engine):
    width = shown.card.hidden_size
    states = answer_of(shown, return_hidden_states=True)["meta_info"]["hidden_states"]
    assert [len(states[0]), *map(len, states[1:])] == [20, width, width, width]
    last = answer_of(shown, return_hidden_states="last")["meta_info"]["hidden_states"]
    assert last == pytest.approx(states[-1], abs=STATE_TOLERANCE)
    params = {"max_new_tokens": 4, "temperature": 0}
    *_, end = shown.generate_stream(input_ids=[*range(40, 60)], sampling_params=params, return_hidden_states=True)
    for one, other in zip(end["meta_info"]["hidden_states"], states, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=STATE_TOLERANCE)


def test_states_end_with_the_text(shown: Engine):
    """What a stop string cuts off has none either."""
    plain = answer_of(shown, return_hidden_states=True, sampling_params={"max_new_tokens": 8, "temperature": 0})
    params = {"max_new_tokens": 8, "temperature": 0, "stop": [plain["text"][:1]]}
    cut = answer_of(shown, return_hidden_states=True, sampling_params=params)
    assert len(cut["output_ids"]) < 8
    assert len(cut["meta_info"]["hidden_states"]) == len(cut["output_ids"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"return_hidden_states": "first"}, "return_hidden_states"),
        ({"return_hidden_states": 1}, "return_hidden_states"),
    ],
)
def test_what_cannot_be_returned_is_refused(shown: Engine, fields: dict[str, Any], param: str):
    with pytest.raises(RequestError) as refused:
        answer_of(shown, **fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"return_hidden_states": True},
        {"return_hidden_states": "last"},
    ],
)
def test_a_server_that_does_not_show_states_says_how_it_would(engine: Engine, fields: dict[str, Any]):
    with pytest.raises(RequestError, match="enable_return_hidden_states"):
        answer_of(engine, **fields)


def test_ids_listed_for_a_prompt_need_no_setting(engine: Engine):
    asked = {"return_logprob": True, "logprob_start_len": 0, "token_ids_logprob": [5, 9]}
    meta = answer_of(engine, **asked)["meta_info"]
    first, *entries = meta["input_token_ids_logprobs"]
    assert first is None and len(entries) == len(meta["input_token_logprobs"]) - 1
    assert all([token_id for _, token_id, _ in entry] == [5, 9] for entry in entries)
    assert all(logprob < 0 for entry in entries for logprob, _, _ in entry)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64])
def test_positions_between_two_spans_are_computed_in_any_chunks(engine: Engine, chunk_tokens: int):
    """Ids are listed at the first positions, and scores begin later; decode steps of this server keep their states."""
    listed = ListedInPrompt(0, np.full((3, 1), 7, np.int32))
    request = replace(request_for([*range(40, 60)], max_new_tokens=2), listed_in_prompt=listed, score_prompt_from=12)
    way = Way(chunk_tokens=chunk_tokens)
    assert_all_same(
        run_together(engine.runner, engine.card, [request], way=way), run_alone(engine.runner, engine.card, [request])
    )


@pytest.mark.parametrize(
    "listed",
    [
        ListedInPrompt(0, np.zeros((20, 2), np.int32)),
        ListedInPrompt(19, np.zeros((1, 2), np.int32)),
        ListedInPrompt(-1, np.zeros((1, 2), np.int32)),
        ListedInPrompt(0, np.full((1, 2), VOCAB_SIZE, np.int32)),
        ListedInPrompt(0, np.full((1, 2), -2, np.int32)),
        ListedInPrompt(0, np.zeros((1, 129), np.int32)),
    ],
)
def test_lists_that_no_prompt_position_has_are_refused(shown: Engine, listed: ListedInPrompt):
    request = replace(request_for([*range(40, 60)]), listed_in_prompt=listed)
    with pytest.raises(RequestError) as refused:
        shown.loop.submit(request, lambda _: None)
    assert refused.value.param == "listed_in_prompt"
