"""Routing over HTTP in every dialect of every route: one routing, whatever the form it comes in."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from rayserve_moe import Engine
from rayserve_moe.replay.encoding import ROLLOUT_MEDIA_TYPE, ROLLOUT_ZSTD_MEDIA_TYPE, decode_rollout
from rayserve_moe.requests.records import RoutedExperts
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.rollouts.alignment import decode_answer
from rayserve_moe.serving.api.answers import answering
from rayserve_moe.serving.api_state import ApiState
from tests.http.conftest import served
from tests.support.engine.shared_settings import SERVED
from tests.support.serving.dialects import DIALECTS as GENERATION
from tests.support.serving.dialects import Prompt
from tests.support.serving.http_client import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    TOKENS,
    ask,
    stream,
    wait_until,
)

PATHS = [COMPLETIONS, GENERATE, TOKENS]
DIALECTS = ["sglang", "nested", "npy", "packed"]
PROMPT = [*range(30, 55)]
NUM_NEW = 6
RETURNED = {"return_routed_experts": True}


def asked(path, *, max_tokens=NUM_NEW, start=0, sampling=None, **fields):
    """A greedy request for the routing of `PROMPT` and its answer."""
    (dialect,) = (dialect for dialect in GENERATION if dialect.path == path)
    body = dialect.body(Prompt("", PROMPT), max_tokens=max_tokens, **{"ignore_eos": True, **(sampling or {})})
    body |= {**RETURNED, **fields}
    if path == TOKENS:
        body["sampling_params"]["routed_experts_prompt_start"] = start
    elif start:
        body["routed_experts_start_len"] = start
    return body


def rows_of(http, layout, *, max_tokens=NUM_NEW):
    return decode_answer(ask(http, GENERATE, **asked(GENERATE, max_tokens=max_tokens)), layout).rows


@pytest.mark.sampled(2)
@pytest.mark.parametrize("start", [0, 7, len(PROMPT)])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("path", PATHS)
def test_every_dialect_tells_the_same_rows(http, layout, path, dialect, start):
    whole = rows_of(http, layout)
    answer = ask(http, path, **asked(path, start=start, routed_experts_format=dialect))
    routing = decode_answer(answer, layout)
    assert routing.start == start and not routing.missing
    assert len(whole) == len(PROMPT) + NUM_NEW - 1
    np.testing.assert_array_equal(routing.rows, whole[start:])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_routing_goes_where_clients_of_the_dialect_look(http, dialect):
    answer = ask(http, COMPLETIONS, **asked(COMPLETIONS, start=3, routed_experts_format=dialect))
    (choice,) = answer["choices"]
    if dialect == "sglang":
        assert choice["sgl_ext"]["routed_experts"] == choice["meta_info"]["routed_experts"]
        assert choice["meta_info"]["routed_experts_start_len"] == 3
        assert choice["meta_info"]["routed_experts_info"]["start"] == 3
    else:
        assert choice["routed_experts"] and choice["routed_experts_info"]["start"] == 3 and "meta_info" not in choice
    assert ("prompt_routed_experts" in answer) == (dialect == "nested")
    native = ask(http, GENERATE, **asked(GENERATE, start=3, routed_experts_format=dialect))["meta_info"]
    assert (
        native["routed_experts"] and native["routed_experts_info"]["start"] == 3 == native["routed_experts_start_len"]
    )


def test_the_description_is_the_same_in_every_dialect(http):
    ask(http, GENERATE, **asked(GENERATE))
    told = [
        ask(http, TOKENS, **asked(TOKENS, routed_experts_format=dialect))["choices"][0]["routed_experts_info"]
        for dialect in DIALECTS
    ]
    assert all(description == told[0] for description in told)
    assert told[0]["weight_version"] == [[0, len(PROMPT) + NUM_NEW - 1, "0"]]


@pytest.mark.parametrize("path", [COMPLETIONS, TOKENS])
def test_nested_rows_of_the_prompt_stand_apart_and_once(http, layout, path):
    answer = ask(http, path, **asked(path, routed_experts_format="nested", sampling={"n": 3}))
    moe_layers, top_k = layout.row_shape
    assert np.shape(answer["prompt_routed_experts"]) == (len(PROMPT), moe_layers, top_k)
    for index, choice in enumerate(answer["choices"]):
        assert np.shape(choice["routed_experts"]) == (NUM_NEW - 1, moe_layers, top_k)
        assert choice.keys().isdisjoint({"prompt_routed_experts"})
        np.testing.assert_array_equal(decode_answer(answer, layout, choice=index).rows, rows_of(http, layout))


def test_nested_rows_of_several_prompts_stand_in_their_order(http):
    body = {**asked(COMPLETIONS, routed_experts_format="nested", sampling={"n": 2}), "prompt": [PROMPT, [9, 10]]}
    assert [len(rows) for rows in ask(http, COMPLETIONS, **body)["prompt_routed_experts"]] == [len(PROMPT), 2]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("path", PATHS)
def test_rows_that_stream_add_up_to_the_whole(http, layout, path):
    for dialect in DIALECTS:
        body = asked(path, start=2, routed_experts_format=dialect, max_tokens=40, sampling={"n": 2})
        events = stream(http, path, **body, stream_routed_experts=True)
        assert len(events) > 2
        pieces = {index: [] for index in range(2)}
        for event in events:
            part = event if path == GENERATE else event["choices"][0]
            if "routed_experts" in part or "meta_info" in part:
                pieces[part["index"]].append((event, part))
        for index in range(2):
            check_pieces(pieces[index], layout, rows_of(http, layout, max_tokens=40)[2:], shares=dialect == "nested")


def check_pieces(pieces, layout, expected, *, shares):
    """Rows of every piece go on where those before end, at most one step behind the tokens."""
    position, joined = 2, []
    for event, part in pieces:
        holder = part.get("meta_info", part)
        if "routed_experts" not in holder:
            continue
        description = holder["routed_experts_info"]
        assert description["start"] == position
        position += description["shape"][0]
        if shares and "meta_info" not in part and "prompt_routed_experts" not in event:
            joined.append(None)
        else:
            joined.append(decode_answer(event, layout).rows)
    assert position == 2 + len(expected)
    if all(rows is not None for rows in joined):
        np.testing.assert_array_equal(np.concatenate(joined), expected)
    else:
        assert [rows is None for rows in joined] == [True] + [False] * (len(joined) - 1)
        np.testing.assert_array_equal(np.concatenate(joined[1:]), expected[-sum(map(len, joined[1:])) :])


@pytest.mark.parametrize("path", [*PATHS, CHAT])
def test_rows_come_with_the_last_event_unless_they_stream(http, layout, path):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": NUM_NEW, **RETURNED}
    events = stream(http, path, **(body if path == CHAT else asked(path)))
    parts = [event if path == GENERATE else event["choices"][0] for event in events]
    has_routing = ["routed_experts_info" in part.get("meta_info", part) for part in parts]
    assert has_routing == [False] * (len(parts) - 1) + [True]
    assert not decode_answer(events[-1], layout).missing


@pytest.mark.parametrize("path", PATHS)
def test_a_prefill_returns_every_row_of_the_prompt(http, layout, path):
    routing = decode_answer(ask(http, path, **asked(path, max_tokens=0)), layout)
    np.testing.assert_array_equal(routing.rows, rows_of(http, layout)[: len(PROMPT)])
    assert len(routing.rows) == len(PROMPT)


def test_a_turn_s_new_rows_go_on_where_those_of_the_turn_before_end(http, layout):
    first = ask(http, GENERATE, **asked(GENERATE))
    text = PROMPT + first["output_ids"] + [7, 8, 9]
    sampling = {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": text, "sampling_params": sampling, **RETURNED}
    delta = decode_answer(ask(http, GENERATE, **body, routed_experts_start_len=len(PROMPT) + NUM_NEW - 1), layout)
    alone = decode_answer(ask(http, GENERATE, **body, cache_salt="another"), layout)
    np.testing.assert_array_equal(np.concatenate([rows_of(http, layout), delta.rows]), alone.rows)


@pytest.mark.parametrize("media_type", [ROLLOUT_MEDIA_TYPE, ROLLOUT_ZSTD_MEDIA_TYPE])
@pytest.mark.parametrize("path", [GENERATE, TOKENS])
def test_a_container_holds_the_answer_and_its_raw_rows(http, layout, path, media_type):
    expected = rows_of(http, layout)
    accept = {"Accept": f"text/html, {media_type};q=0.9, */*"}
    answer = http.post(path, json=asked(path, start=4), headers=accept)
    assert answer.headers["content-type"] == media_type
    header, (rows,) = decode_rollout(answer.content)
    plain = ask(http, path, **asked(path, start=4))
    assert header.keys() == plain.keys()
    np.testing.assert_array_equal(rows, expected[4:])
    assert decode_answer(answer.content, layout).start == 4


@pytest.mark.parametrize("path", [GENERATE, TOKENS])
def test_a_container_holds_the_rows_of_a_prompt_once(http, layout, path):
    body = asked(path, sampling={"n": 3, "temperature": 1, "seed": 5})
    content = http.post(path, json=body, headers={"Accept": ROLLOUT_MEDIA_TYPE}).content
    routings = [decode_answer(content, layout, choice=index) for index in range(3)]
    assert [routing.start for routing in routings] == [0, len(PROMPT), len(PROMPT)]
    plain = ask(http, path, **body)
    for index, routing in enumerate(routings):
        whole = decode_answer(plain, layout, choice=index)
        np.testing.assert_array_equal(routing.rows, whole.rows[routing.start :])


def test_a_batch_in_a_container_is_told_apart(http, layout):
    body = {**asked(GENERATE), "input_ids": [PROMPT, [9, 10]]}
    content = http.post(GENERATE, json=body, headers={"Accept": ROLLOUT_MEDIA_TYPE}).content
    header, rows = decode_rollout(content)
    assert [len(answer["output_ids"]) for answer in header["answers"]] == [NUM_NEW] * 2
    assert [len(each) for each in rows] == [len(PROMPT) + NUM_NEW - 1, 2 + NUM_NEW - 1]
    assert not decode_answer(content, layout, choice=1).missing


@pytest.mark.parametrize(
    ("accept", "media_type"),
    [
        (f"{ROLLOUT_MEDIA_TYPE};q=0, */*", "application/json"),
        (f"{ROLLOUT_MEDIA_TYPE};q=0, {ROLLOUT_ZSTD_MEDIA_TYPE}", ROLLOUT_ZSTD_MEDIA_TYPE),
        (f"{ROLLOUT_MEDIA_TYPE};q=0.1, {ROLLOUT_ZSTD_MEDIA_TYPE};q=0.2", ROLLOUT_ZSTD_MEDIA_TYPE),
    ],
)
def test_a_container_is_of_the_type_that_the_client_prefers(http, accept, media_type):
    answer = http.post(GENERATE, json=asked(GENERATE), headers={"Accept": accept})
    assert answer.status_code == 200 and answer.headers["content-type"] == media_type


def test_a_stream_may_refuse_the_container(http):
    body = {**asked(GENERATE), "stream": True}
    assert http.post(GENERATE, json=body, headers={"Accept": f"{ROLLOUT_MEDIA_TYPE};q=0"}).status_code == 200


def test_a_container_cannot_stream(http):
    answer = http.post(GENERATE, json={**asked(GENERATE), "stream": True}, headers={"Accept": ROLLOUT_MEDIA_TYPE})
    assert answer.status_code == 400


def test_large_answers_are_built_off_the_event_loop(engine):
    """Small ones are not: a change of threads costs more than they do."""
    state = ApiState(engine.loop, engine.tokenizer)

    def builder():
        return threading.current_thread().name.encode()

    small = asyncio.run(answering.built(state, builder, size=100))
    large = asyncio.run(answering.built(state, builder, size=answering.LARGE_ANSWER_BYTES))
    assert small == threading.current_thread().name.encode() and large.startswith(b"encode")
    rows = np.zeros((answering.LARGE_ANSWER_BYTES, 1, 1), np.uint8)
    result = ChoiceResult(routing=RoutedExperts(rows))
    assert answering.size_of([result]) >= answering.LARGE_ANSWER_BYTES


@pytest.mark.parametrize("path", [GENERATE, TOKENS])
def test_rows_that_were_never_computed_are_missing_in_every_dialect(http, engine, layout, path, unhurried):
    """Eight choices fill the engine, so that what comes after them is aborted before its prompt is computed."""
    with ThreadPoolExecutor(1 + len(DIALECTS) + 1) as pool:
        busy = {"input_ids": [5], "rid": "busy", "sampling_params": {"max_new_tokens": 500, "ignore_eos": True, "n": 8}}
        pool.submit(ask, http, GENERATE, **busy)
        wait_until(lambda: engine.loop.statistics()["requests_running"] == 8)
        asked_for = [asked(path, routed_experts_format=dialect) for dialect in DIALECTS]
        answers = [pool.submit(ask, http, path, **body) for body in asked_for]
        accept = {"Accept": ROLLOUT_MEDIA_TYPE}
        container = pool.submit(http.post, path, json=asked(path), headers=accept)
        wait_until(lambda: engine.loop.statistics()["requests_live"] == 2 + len(DIALECTS))
        ask(http, "/abort_request", abort_all=True)
        descriptions = []
        for answer in answers:
            part = answer.result()["meta_info"] if path == GENERATE else answer.result()["choices"][0]
            assert part["routed_experts"] is None
            descriptions.append(part["routed_experts_info"])
        header, (rows,) = decode_rollout(container.result().content)
        part = header["meta_info"] if path == GENERATE else header["choices"][0]
        descriptions.append(part["routed_experts_info"])
    assert len(rows) == 0
    for description in descriptions:
        assert description["missing"] == [[0, len(PROMPT) - 1]] and description["crc32"] is None


def test_a_server_flag_alone_returns_the_lists_of_vllm(checkpoint, http):
    """As a script reads them that sends nothing about routing; null or false, and another form, are what they say."""
    body = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    with (
        Engine(str(checkpoint), **SERVED, routed_experts_by_default="nested") as engine,
        served(engine) as url,
        httpx.Client(base_url=url, timeout=600) as by_default,
    ):
        answer = ask(by_default, COMPLETIONS, **body)
        asked = ask(http, COMPLETIONS, **body, return_routed_experts=True, routed_experts_format="nested")
        assert answer["prompt_routed_experts"] == asked["prompt_routed_experts"]
        assert answer["choices"][0]["routed_experts"] == asked["choices"][0]["routed_experts"]
        assert len(answer["choices"][0]["routed_experts"]) == 4 and len(answer["prompt_routed_experts"]) == len(PROMPT)
        sampling = {key: value for key, value in body.items() if key != "prompt"}
        chat = ask(by_default, CHAT, messages=[{"role": "user", "content": "x"}], **sampling)
        assert chat["prompt_routed_experts"] and chat["choices"][0]["routed_experts"]
        assert "prompt_routed_experts" not in ask(by_default, COMPLETIONS, **body, return_routed_experts=False)
        assert "meta_info" in ask(by_default, COMPLETIONS, **body, routed_experts_format="sglang")["choices"][0]
