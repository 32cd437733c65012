"""Laws of every dialect, each written once: what is asked, how an answer ends, what is counted, and who leaves."""

from __future__ import annotations

import itertools
import json
import math
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from urllib.parse import urlsplit

import pytest

from tests.http.conftest import POISONED_TOKEN_ID, assert_idle
from tests.support.engine.step_gate import held_steps
from tests.support.serving.dialects import DIALECTS, Prompt, rendered
from tests.support.serving.http_client import COMPLETIONS, GENERATE, TOKENS, check_error, scored, stream, wait_until

NUM_NEW = 16
CLOSE = {"rel": 0, "abs": 1e-5}
WITH_IDS = [dialect for dialect in DIALECTS if dialect.ids is not None]
"""They return token ids, and take several choices, a seed, stop ids and biases."""


def each(dialects):
    return pytest.mark.parametrize("dialect", dialects, ids=lambda dialect: dialect.name)


whole_and_streamed = pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])


@pytest.fixture
def prompt(http):
    return rendered(http, "hi")


@pytest.fixture
def plain(engine, prompt):
    """The greedy answer of the engine in this process, which ends by its length."""
    sampling = {"max_new_tokens": NUM_NEW, "temperature": 0}
    answer = engine.generate(input_ids=prompt.ids, sampling_params=sampling, return_logprob=True)
    assert len(answer["output_ids"]) == NUM_NEW
    return answer


@pytest.mark.sampled(3)
@each(DIALECTS)
@whole_and_streamed
@pytest.mark.parametrize("num_top", [None, 0])
def test_the_answer_is_that_of_the_engine_in_process(http, prompt, plain, dialect, streams, num_top):
    answer = dialect.ask(http, dialect.body(prompt, max_tokens=NUM_NEW, num_top=num_top), streams=streams)
    (choice,) = answer.choices
    assert choice.text == (None if dialect.path == TOKENS else plain["text"])
    assert choice.ids == (None if dialect.ids is None else plain["output_ids"])
    assert (choice.finish, choice.stop) == ("length", None)
    assert (answer.num_prompt_tokens, answer.num_output_tokens) == (len(prompt.ids), NUM_NEW)
    assert answer.prompt_ids == (None if dialect.ids is None else list(prompt.ids))
    expected = [entry[0] for entry in plain["meta_info"]["output_token_logprobs"]]
    if num_top is None or dialect.logprobs is None:
        assert choice.logprobs is None
    else:
        assert choice.logprobs == pytest.approx(expected, **CLOSE)


@pytest.mark.sampled(2)
@each(WITH_IDS)
@whole_and_streamed
def test_the_likeliest_tokens_follow_the_sampled_one_in_vllm_and_stand_alone_in_sglang(
    http, engine, prompt, dialect, streams
):
    """Completions add the sampled token to so many others; chats and the token route count it among them."""
    sampling = {"max_new_tokens": NUM_NEW, "temperature": 1.5, "sampling_seed": 11, "ignore_eos": True}
    meta = engine.generate(input_ids=prompt.ids, sampling_params=sampling, return_logprob=True, top_logprobs_num=3)[
        "meta_info"
    ]
    body = dialect.body(prompt, max_tokens=NUM_NEW, num_top=3, temperature=1.5, seed=11, ignore_eos=True)
    (choice,) = dialect.ask(http, body, streams=streams).choices
    expected = []
    for (value, token_id, _), place in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
        likeliest = [(other, told) for told, other, _ in place]
        assert all(likelier[1] >= less[1] for likelier, less in itertools.pairwise(likeliest))
        ordered = [(token_id, value), *(pair for pair in likeliest if pair[0] != token_id)]
        expected.append(likeliest if dialect.path == GENERATE else ordered[: 4 if dialect.path == COMPLETIONS else 3])
    assert_close(choice.top, expected)


@pytest.mark.sampled(2)
@each(WITH_IDS)
@whole_and_streamed
def test_listed_ids_follow_the_sampled_one_in_their_order(http, prompt, plain, dialect, streams):
    """Each has the log-prob that it has at the end of a scored prompt."""
    listed = [300, 7, 9]
    field = "token_ids_logprob" if dialect.path == GENERATE else "logprob_token_ids"
    body = dialect.body(prompt, max_tokens=4, num_top=0)
    place = body[dialect.nested] if dialect.path == TOKENS else body
    place[field] = listed
    (choice,) = dialect.ask(http, body, streams=streams).choices
    answers = scored(http, [[*prompt.ids, token_id] for token_id in listed])
    scores = [answer["meta_info"]["input_token_logprobs"][-1][0] for answer in answers]
    assert_close(choice.top[:1], [[(choice.ids[0], choice.logprobs[0]), *zip(listed, scores, strict=True)]])
    assert [[token_id for token_id, _ in place] for place in choice.top] == [[own, *listed] for own in choice.ids]


@each([dialect for dialect in WITH_IDS if dialect.path != GENERATE])
def test_a_request_chooses_the_distribution(http, prompt, dialect):
    """The model's own log-probs are those that the output has as part of a prompt."""
    raw, processed = (
        dialect.ask(http, dialect.body(prompt, num_top=0, temperature=0.3, seed=5, logprobs_mode=mode)).choices[0]
        for mode in ("raw_logprobs", "processed_logprobs")
    )
    told = scored(http, [*prompt.ids, *raw.ids], len(prompt.ids) - 1)["meta_info"]["input_token_logprobs"]
    assert raw.logprobs == pytest.approx([value for value, *_ in told[1:]], **CLOSE)
    assert raw.ids == processed.ids and processed.logprobs != pytest.approx(raw.logprobs, **CLOSE)


def assert_close(found, expected):
    assert [[token_id for token_id, _ in place] for place in found] == [[i for i, _ in place] for place in expected]
    for place, told in zip(found, expected, strict=True):
        assert [value for _, value in place] == pytest.approx([value for _, value in told], **CLOSE)


@each([dialect for dialect in WITH_IDS if dialect.path != TOKENS])
@whole_and_streamed
def test_an_answer_names_the_weights_of_every_token(http, prompt, dialect, streams):
    body = dialect.body(prompt, n=2, max_tokens=5, ignore_eos=True) | {"return_weight_versions": True}
    answer = dialect.ask(http, body, streams=streams)
    assert [choice.versions for choice in answer.choices] == [[{"version": "0", "start": 0, "end": 5}]] * 2


@pytest.mark.sampled(4)
@each(WITH_IDS)
@whole_and_streamed
@pytest.mark.parametrize("seed", [7, -7, 2**63 - 1])
def test_a_seed_gives_the_same_choices_in_every_dialect(http, engine, prompt, dialect, streams, seed):
    sampling = {"max_new_tokens": NUM_NEW, "temperature": 1, "sampling_seed": seed, "n": 3, "ignore_eos": True}
    expected = engine.generate(input_ids=prompt.ids, sampling_params=sampling)
    body = dialect.body(prompt, max_tokens=NUM_NEW, temperature=1, seed=seed, n=3, ignore_eos=True)
    answer = dialect.ask(http, body, streams=streams)
    assert [choice.ids for choice in answer.choices] == [each["output_ids"] for each in expected]
    assert len({tuple(choice.ids) for choice in answer.choices}) == 3
    if dialect.path != TOKENS:
        assert [choice.text for choice in answer.choices] == [each["text"] for each in expected]
    assert (answer.num_prompt_tokens, answer.num_output_tokens) == (len(prompt.ids), 3 * NUM_NEW)


@pytest.mark.sampled(2)
@each(DIALECTS)
@whole_and_streamed
def test_a_stop_string_ends_the_text_before_it(http, prompt, plain, dialect, streams):
    text = plain["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    (choice,) = dialect.ask(http, dialect.body(prompt, max_tokens=NUM_NEW, stop=[stop]), streams=streams).choices
    assert choice.finish == "stop"
    assert choice.stop == (None if dialect.name == "responses" else stop)
    if dialect.ids is not None:
        assert choice.ids == plain["output_ids"][: len(choice.ids)] and len(choice.ids) < NUM_NEW
    if dialect.path != TOKENS:
        assert choice.text == text[: text.index(stop)]


@pytest.mark.sampled(2)
@each([dialect for dialect in DIALECTS if dialect.name != "messages"])
@whole_and_streamed
def test_a_stop_id_ends_the_tokens_and_is_named(http, prompt, plain, dialect, streams):
    stop = plain["output_ids"][2]
    num_tokens = plain["output_ids"].index(stop) + 1
    body = dialect.body(prompt, max_tokens=NUM_NEW, stop_token_ids=[stop], ignore_eos=True)
    answer = dialect.ask(http, body, streams=streams)
    assert (answer.choices[0].finish, answer.num_output_tokens) == ("stop", num_tokens)
    if dialect.ids is not None:
        assert answer.choices[0].stop == stop and answer.choices[0].ids == plain["output_ids"][:num_tokens]


@each([dialect for dialect in DIALECTS if dialect.name != "messages"])
@whole_and_streamed
def test_the_end_of_sequence_ends_an_answer_and_is_named_by_sglang_alone(http, engine, prompt, dialect, streams):
    (end,) = engine.card.eos_token_ids
    answer = dialect.ask(http, dialect.body(prompt, logit_bias={str(end): 100}), streams=streams)
    assert (answer.choices[0].finish, answer.num_output_tokens) == ("stop", 1)
    assert answer.choices[0].stop == (end if dialect.path == GENERATE else None)
    assert not answer.choices[0].text


@each(DIALECTS)
@whole_and_streamed
def test_no_tokens_may_be_asked_for(http, prompt, dialect, streams):
    answer = dialect.ask(http, dialect.body(prompt, max_tokens=0), streams=streams)
    assert answer.num_output_tokens == 0 and answer.num_prompt_tokens == len(prompt.ids)
    assert not answer.choices[0].text and not answer.choices[0].ids and answer.choices[0].finish == "length"


@pytest.mark.sampled(2)
@each(DIALECTS)
@whole_and_streamed
def test_usage_says_what_was_cached_under_the_same_salt(http, dialect, streams):
    """The last of the prompt's tokens is always computed, and pages of 16 tokens are cached whole."""
    prompt = rendered(http, "a long prompt " * 6)
    cached = len(prompt.ids) // 16 * 16 - (16 if len(prompt.ids) % 16 == 0 else 0)
    told = []
    for n, salt in ((1, "a salt"), (1, "another"), (3, "a salt")):
        choices = {} if dialect.ids is None else {"n": n}
        body = dialect.body(prompt, max_tokens=2, **choices) | {"cache_salt": f"{salt} of {dialect.name} {streams}"}
        told.append(dialect.ask(http, body, streams=streams).num_cached_tokens)
    assert told == [0, 0, cached]


@each([dialect for dialect in DIALECTS if dialect.usage])
def test_every_event_counts_tokens_where_that_is_asked_for(http, prompt, dialect):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = dialect.body(prompt, max_tokens=5, n=2, ignore_eos=True)
    *events, last = stream(http, dialect.path, **body, stream_options=options)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 10
    counted = {}
    for event in events:
        (choice,) = event["choices"]
        usage, before = event["usage"], counted.get(choice["index"], 0)
        assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"]
        assert usage["completion_tokens"] >= before
        counted[choice["index"]] = usage["completion_tokens"]
    assert counted == {0: 5, 1: 5}


@each(WITH_IDS)
def test_a_biased_token_is_the_only_one(http, prompt, dialect):
    body = dialect.body(prompt, max_tokens=24, logit_bias={"77": 100}, ignore_eos=True)
    assert dialect.ask(http, body).choices[0].ids == [77] * 24


@pytest.mark.sampled(3)
@each(WITH_IDS)
@pytest.mark.parametrize("penalty", [{"presence_penalty": 2}, {"frequency_penalty": 2}, {"repetition_penalty": 100}])
def test_a_penalty_ends_a_repetition(http, prompt, dialect, penalty):
    """A moderate bias makes greedy decoding repeat one token, which any penalty on it undoes."""
    free, held = (
        dialect.ask(http, dialect.body(prompt, max_tokens=24, logit_bias={"77": 2}, ignore_eos=True, **fields))
        for fields in ({}, penalty)
    )
    assert len(set(held.choices[0].ids)) > len(set(free.choices[0].ids))


@each(WITH_IDS)
def test_neutral_values_change_nothing(http, prompt, plain, dialect):
    neutral = {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1, "logit_bias": {}}
    body = dialect.body(prompt, max_tokens=NUM_NEW, **neutral)
    assert dialect.ask(http, body).choices[0].ids == plain["output_ids"]


@each([dialect for dialect in WITH_IDS if dialect.path != GENERATE])
@pytest.mark.parametrize("temperature", [0, 0.01, 2])
def test_only_allowed_ids_are_sampled_and_scored_among_themselves(http, prompt, dialect, temperature):
    allowed = [9, 200, 450]
    body = dialect.body(prompt, num_top=3, temperature=temperature, allowed_token_ids=allowed, ignore_eos=True)
    (choice,) = dialect.ask(http, body).choices
    assert set(choice.ids) <= set(allowed)
    for place in choice.top:
        assert sum(math.exp(value) for _, value in place) == pytest.approx(1, abs=1e-5)


@each(WITH_IDS)
def test_no_id_ends_a_choice_before_its_min_length(http, engine, prompt, plain, dialect):
    num_compilations = engine.runner.num_compilations_since_start
    ending = {"stop_token_ids": plain["output_ids"][: NUM_NEW // 2], "ignore_eos": True}
    assert dialect.ask(http, dialect.body(prompt, max_tokens=NUM_NEW, **ending)).num_output_tokens == 1
    body = dialect.body(prompt, max_tokens=NUM_NEW, min_tokens=NUM_NEW // 2, **ending)
    ids = dialect.ask(http, body).choices[0].ids
    assert len(ids) >= NUM_NEW // 2 and not set(ids[: NUM_NEW // 2]) & set(ending["stop_token_ids"])
    assert engine.runner.num_compilations_since_start == num_compilations


@each(WITH_IDS)
@pytest.mark.parametrize("min_tokens", [-1, NUM_NEW + 1])
def test_a_min_length_lies_within_the_max(http, prompt, dialect, min_tokens):
    answer = http.post(dialect.path, json=dialect.body(prompt, max_tokens=NUM_NEW, min_tokens=min_tokens))
    name = dialect.param("min_tokens")
    assert check_error(answer, 400)["param"] in (name, name.replace("params.", "params.0."))


@each([dialect for dialect in DIALECTS if dialect.name != "messages"])
@whole_and_streamed
def test_an_answer_keeps_to_an_expression(http, prompt, dialect, streams):
    constraint = {"regex": "[a-c]{3}"} if dialect.path == GENERATE else {"structured_outputs": {"regex": "[a-c]{3}"}}
    answer = dialect.ask(http, dialect.body(prompt, max_tokens=20, **constraint), streams=streams)
    assert answer.choices[0].finish == "stop" and answer.num_output_tokens == 4
    assert dialect.path == TOKENS or set(answer.choices[0].text) <= set("abc")


@each(DIALECTS)
def test_a_bad_value_is_refused_before_a_stream_starts(http, dialect):
    body = dialect.body(Prompt("x", [5]), max_tokens=600) | {"stream": True}
    assert check_error(http.post(dialect.path, json=body), 400)["param"] == dialect.param("max_tokens")


@each(DIALECTS)
def test_a_client_that_leaves_a_stream_gives_its_pages_back(http, engine, prompt, dialect, unhurried):
    sampled = engine.loop.statistics()["tokens_sampled"]
    body = dialect.body(prompt, max_tokens=400, **long_fields(dialect))
    with http.stream("POST", dialect.path, json={**body, "stream": True}) as answer:
        assert next(answer.iter_lines())
    assert_idle(engine)
    assert engine.loop.statistics()["tokens_sampled"] - sampled < 400 * 0.9


@each(DIALECTS)
def test_a_client_that_leaves_before_its_answer_gives_its_pages_back(http, url, engine, prompt, dialect, unhurried):
    sampled = engine.loop.statistics()["tokens_sampled"]
    address = urlsplit(url)
    content = json.dumps(dialect.body(prompt, max_tokens=400, **long_fields(dialect))).encode()
    head = f"POST {dialect.path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(head + content)
        wait_until(lambda: engine.loop.statistics()["tokens_sampled"] > sampled)
    assert_idle(engine)
    assert engine.loop.statistics()["tokens_sampled"] - sampled < 400 * 0.9


@each([dialect for dialect in DIALECTS if dialect.name != "messages"])
@whole_and_streamed
def test_a_request_is_aborted_by_its_id_which_no_other_can_have(http, engine, prompt, dialect, streams, unhurried):
    field = "request_id" if dialect.name in ("tokens", "responses") else "rid"
    choices = {} if dialect.ids is None else {"n": 2}
    body = dialect.body(prompt, max_tokens=400, ignore_eos=True, **choices) | {field: "mine"}
    sampled = engine.loop.statistics()["tokens_sampled"]
    with ThreadPoolExecutor(1) as beside:
        asked = beside.submit(dialect.ask, http, body, streams=streams)
        wait_until(lambda: engine.loop.statistics()["tokens_sampled"] > sampled + 5)
        assert check_error(http.post(dialect.path, json=body), 400)["param"] == field
        assert http.post("/abort_request", json={"rid": "mine"}).json() == {"success": True}
    answer = asked.result()
    assert {choice.finish for choice in answer.choices} == {"abort"}
    assert len(answer.choices) == choices.get("n", 1) and 0 < answer.num_output_tokens < 800


def long_fields(dialect):
    """Return what keeps an answer from ending by itself, where the dialect has such a field."""
    return {} if dialect.name == "messages" else {"ignore_eos": True}


BATCHES = {"completions": {"prompt": [[5]] * 2}, "generate": {"input_ids": [[5]] * 2}}


@each(DIALECTS)
@whole_and_streamed
@pytest.mark.parametrize("num_held", [1, 2])
def test_a_full_queue_answers_429_and_recovers(small_http, small_engine, dialect, streams, num_held):
    """The engine has room for two requests: for one prompt of a batch, or none. No step runs, so none can end."""
    if num_held == 1 and dialect.name not in BATCHES:
        pytest.skip("one prompt has room")
    body = dialect.body(Prompt("x", [5])) | {"stream": streams} | BATCHES.get(dialect.name, {})
    with ThreadPoolExecutor(1) as beside, held_steps(small_engine.loop) as gate:
        filling = beside.submit(small_http.post, COMPLETIONS, json={"prompt": [[5]] * num_held, "max_tokens": 1})
        gate.meet()
        wait_until(partial(_has_requests, small_engine, number=num_held))
        answer = small_http.post(dialect.path, json=body)
        assert check_error(answer, 429)["type"] == "overloaded_error"
        assert int(answer.headers["retry-after"]) >= 1
        assert small_http.get("/health").status_code == 200
        assert not filling.done()
    assert filling.result().status_code == 200
    assert_idle(small_engine)
    assert small_http.post(dialect.path, json=dialect.body(Prompt("x", [5]), max_tokens=1)).status_code == 200


def _has_requests(engine, *, number):
    return engine.loop.statistics()["requests_live"] == number


@each([dialect for dialect in WITH_IDS if dialect.path != TOKENS])
@whole_and_streamed
def test_routing_without_the_server_flag_names_the_flag(small_http, dialect, streams):
    body = dialect.body(Prompt("x", [5]), max_tokens=1) | {"return_routed_experts": True, "stream": streams}
    error = check_error(small_http.post(dialect.path, json=body), 400)
    assert "enable_return_routed_experts" in error["message"] and error["param"] == "return_routed_experts"


@pytest.mark.slow
def test_logits_that_are_not_numbers_fail_one_request_in_every_dialect(small_http):
    """The good requests afterwards run through every page of the pool, those that held NaN among them."""
    good = {"prompt": [5, 6], "max_tokens": 120, "temperature": 0, "ignore_eos": True}
    before = small_http.post(COMPLETIONS, json=good).json()["choices"]
    for dialect in (dialect for dialect in WITH_IDS if dialect.name != "chat"):
        body = dialect.body(Prompt("", [POISONED_TOKEN_ID] * 300), max_tokens=4)
        assert check_error(small_http.post(dialect.path, json=body), 422)["type"] == "model_error"
        streamed = small_http.post(dialect.path, json={**body, "stream": True}).text.split("\n\n")
        assert '"type":"model_error"' in streamed[-3] and streamed[-2:] == ["data: [DONE]", ""]
    for _ in range(9):
        assert small_http.post(COMPLETIONS, json=good).json()["choices"] == before
