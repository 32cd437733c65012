"""Tinker's sampling routes: recorded bodies, both answer formats, and orders that no client retrieves."""

from __future__ import annotations

import asyncio
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from rayserve_moe.config.settings import ServerSettings
from rayserve_moe.engine.admission import Capacity
from rayserve_moe.fleet.broadcast import Answers
from rayserve_moe.replay.encoding import decode_rollout
from rayserve_moe.serving.api.answers.tinker_orders import PROTOBUF
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.future_store import FutureStore
from rayserve_moe.serving.http import create_api
from tests.http.conftest import POISONED_TOKEN_ID, assert_idle, served
from tests.support.checkpoints.adapters import make_adapter
from tests.support.engine.step_gate import unhurried
from tests.support.serving.http_server import running
from tests.support.serving.local_fleet import local_fleet

PROMPT = [10, 11, 12, 13]
SESSION = "11111111-1111-4111-8111-111111111111"
ORDER = {
    "num_samples": 2,
    "prompt": {"chunks": [{"tokens": PROMPT[:1], "type": "encoded_text"}, {"tokens": PROMPT[1:]}]},
    "sampling_params": {"max_tokens": 3, "seed": 5, "temperature": 1.0, "top_k": -1, "top_p": 1.0},
    "sampling_session_id": f"{SESSION}:sample:0",
    "prompt_logprobs": True,
    "topk_prompt_logprobs": 2,
    "topk_sample_logprobs": 1,
    "prompt_alt_tokens_k": 0,
    "record_stability_info": False,
    "type": "sample",
}


@pytest.fixture(scope="module")
def url(engine):
    with served(engine, api_key="tml-secret") as url:
        yield f"{url}/api/v1"


@pytest.fixture(scope="module")
def client(url):
    with httpx.Client(base_url=url, headers={"X-API-Key": "tml-secret"}, timeout=60) as client:
        yield client


def ordered(client: httpx.Client, seq_id: int, **changes: Any) -> str:
    answer = client.post("/asample", json={**ORDER, "seq_id": seq_id, **changes})
    assert answer.status_code == 200, answer.text
    assert answer.json()["sample_sequence_ids"][0] == f"{answer.json()['request_id']}:0"
    return answer.json()["request_id"]


def retrieved(client: httpx.Client, request_id: str, accept: str = "application/json") -> httpx.Response:
    body = {"request_id": request_id, "allow_metadata_only": True}
    return client.post("/retrieve_future", json=body, headers={"Accept": accept})


def fields_of(message: bytes) -> list[tuple[int, Any]]:
    """Fields of a protobuf message, by a reader of its own."""
    found, at = [], 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            (byte,) = struct.unpack_from("B", message, at)
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        key = varint()
        if key & 7 == 0:
            found.append((key >> 3, varint()))
        else:
            length = varint()
            found.append((key >> 3, message[at : at + length]))
            at += length
    return found


def arrays_of(message: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Ids and log-probs of a `TopkLogprobs`."""
    top = dict(fields_of(message))
    return tuple(np.frombuffer(top[n], dtype).reshape(top[4], top[3]) for n, dtype in ((1, "<i4"), (2, "<f4")))


def test_a_session_of_the_client_from_first_to_last(client, engine):
    name = engine.card.name
    assert client.post("/client/config", json={"sdk_version": "0.38.0"}).json() == {"pjwt_auth_enabled": False}
    assert client.post("/client/dynamic_config", json={"sdk_version": "0.38.0"}).json()["sample_cancel_enabled"]
    (model,) = client.get("/get_server_capabilities").json()["supported_models"]
    assert model["model_name"] == name and model["sampleable"] and not model["trainable"]
    body = {"tags": [], "user_metadata": {"k": "v"}, "sdk_version": "0.38.0", "type": "create_session"}
    session = client.post("/create_session", json=body).json()["session_id"]
    asked = {"session_id": session, "sampling_session_seq_id": 4, "base_model": name, "type": "create_sampling_session"}
    sampler = client.post("/create_sampling_session", json=asked).json()["sampling_session_id"]
    assert sampler == f"{session}:sample:4"
    assert client.get(f"/samplers/{sampler}").json()["base_model"] == name
    for path in ("/session_heartbeat", "/telemetry", f"/sessions/{session}/finish"):
        assert client.post(path, json={"session_id": session}).status_code == 200
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.post("/create_sampling_session", json=asked | {"base_model": "other"}).status_code == 404
    assert client.get(f"/samplers/{sampler}").json()["model_path"] is None
    for unknown in (f"{sampler}:x", f"{sampler}:Li4vZXRj"):  # no base64; base64 of ../etc
        assert client.get(f"/samplers/{unknown}").status_code == 404


def test_samples_are_those_of_the_native_route_in_protobuf_and_json(client, engine):
    request_id = ordered(client, 0)
    wanted = engine.generate(
        input_ids=PROMPT,
        max_new_tokens=3,
        sampling_seed=5,
        n=2,
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
    )
    message = retrieved(client, request_id, f"{PROTOBUF}, application/json")
    assert message.headers["content-type"] == PROTOBUF
    assert retrieved(client, request_id, f"{PROTOBUF};q=0, */*").headers["content-type"] == "application/json"
    found = fields_of(message.content)
    scored = [entry[0] for entry in wanted[0]["meta_info"]["input_token_logprobs"][1:]]
    for sequence, answer in zip([value for number, value in found if number == 1], wanted, strict=True):
        parts = dict(fields_of(sequence))
        assert parts[1] == 1, "it ended at its length"
        assert np.frombuffer(parts[2], "<i4").tolist() == answer["output_ids"]
        own = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        np.testing.assert_allclose(np.frombuffer(parts[3], "<f4"), own, rtol=1e-5)
        ids, _ = arrays_of(parts[4])
        assert ids.tolist() == [[top[0][1]] for top in answer["meta_info"]["output_top_logprobs"]]
    by_number = dict(found)
    prompt = np.frombuffer(by_number[2], "<f4")
    assert np.isnan(prompt[0])
    np.testing.assert_allclose(prompt[1:], scored, rtol=1e-5)
    ids, logprobs = arrays_of(by_number[3])
    top = wanted[0]["meta_info"]["input_top_logprobs"][1:]
    assert ids[0].tolist() == [0, 0] and logprobs[0].tolist() == [-99999.0] * 2
    assert ids[1:].tolist() == [[entry[1] for entry in each] for each in top]
    np.testing.assert_allclose(logprobs[1:], [[entry[0] for entry in each] for each in top], rtol=1e-5)
    answer = retrieved(client, request_id).json()
    assert [each["tokens"] for each in answer["sequences"]] == [each["output_ids"] for each in wanted]
    assert answer["sequences"][0]["stop_reason"] == "length" and answer["prompt_logprobs"][0] is None
    np.testing.assert_array_equal(np.float32(answer["prompt_logprobs"][1:]), prompt[1:])
    assert answer["topk_prompt_logprobs"][0] is None and answer["topk_prompt_logprobs"][1][0][0] == top[0][0][1]


def test_the_last_log_probs_alone_and_stops(client, engine):
    last = ordered(client, 1, prompt_logprobs_last_n=2, topk_prompt_logprobs=0, num_samples=1)
    assert [each is None for each in retrieved(client, last).json()["prompt_logprobs"]] == [True, True, False, False]
    whole = retrieved(client, ordered(client, 2)).json()["sequences"][0]["tokens"]
    sampling = ORDER["sampling_params"]
    stopped = ordered(client, 3, sampling_params=sampling | {"stop": [whole[1]]})
    (first, *_) = retrieved(client, stopped).json()["sequences"]
    assert first["tokens"] == whole[:2] and first["stop_reason"] == "stop"
    for seq_id, stop in ((4, []), (5, "\n\n"), (6, ["a", "b"])):
        assert retrieved(client, ordered(client, seq_id, sampling_params=sampling | {"stop": stop})).status_code == 200
    filling = ordered(client, 7, num_samples=1, sampling_params={"stop": []})
    (sequence,) = retrieved(client, filling).json()["sequences"]
    assert len(sequence["tokens"]) == engine.card.max_model_len - len(PROMPT)


def test_a_sample_has_its_rows_and_versions_at_a_route_of_their_own(client, engine):
    request_id = ordered(client, 10)
    tokens = retrieved(client, request_id).json()["sequences"][1]["tokens"]
    answer = client.get(f"/rollout_evidence/{request_id}:1")
    header, (rows,) = decode_rollout(answer.content)
    assert header["output_ids"] == tokens and header["meta_info"]["weight_version"] == engine.card.weight_version
    assert rows.shape[0] == len(PROMPT) + 2 and header["meta_info"]["routed_experts_info"]["missing"] == []
    for unknown in (f"{request_id}:2", f"{request_id}:x", "nothing"):
        assert client.get(f"/rollout_evidence/{unknown}").status_code == 404


def test_a_repeated_order_is_answered_once_and_an_unknown_one_asks_for_another(client, engine):
    with unhurried(engine.loop):
        request_id = ordered(client, 20, sampling_params={"max_tokens": 20})
        assert ordered(client, 20, sampling_params={"max_tokens": 20}) == request_id
        assert engine.loop.statistics()["requests_live"] == 1
    first, second = (retrieved(client, request_id).json() for _ in range(2))
    assert first == second and len(first["sequences"]) == 2
    assert client.post("/cancel_future", json={"request_id": request_id}).json() == {}
    assert retrieved(client, request_id).status_code == 410 == retrieved(client, "unknown").status_code


def test_a_question_waits_and_a_cancelled_order_ends(client, engine, monkeypatch):
    monkeypatch.setattr("rayserve_moe.serving.api.routes.tinker.HOLD_S", 0.05)
    with unhurried(engine.loop):
        request_id = ordered(client, 30, sampling_params={"max_tokens": 30})
        waiting = retrieved(client, request_id).json()
        assert waiting["type"] == "try_again" and waiting["queue_state"] == "active"
        client.post("/cancel_future", json={"request_id": request_id})
    assert retrieved(client, request_id).status_code == 410
    assert_idle(engine)


def test_an_order_is_known_to_every_replica_and_lost_with_its_own(engine, second_engine):
    def asked(name: str, path: str, **body: Any) -> httpx.Response:
        return fleet[name].post(f"/api/v1{path}", json=body)

    with local_fleet({"a": engine, "b": second_engine}) as fleet:
        request_id = asked("a", "/asample", **ORDER, seq_id=0).json()["request_id"]
        first = asked("a", "/retrieve_future", request_id=request_id).json()
        assert asked("b", "/asample", **ORDER, seq_id=0).json()["request_id"] == request_id
        assert len(fleet.calls.replicas["b"].futures) == 0, "it is not computed again"
        assert asked("b", "/retrieve_future", request_id=request_id).json() == first
        assert fleet["b"].get(f"/api/v1/rollout_evidence/{request_id}:0").status_code == 200
        fleet.calls.silent = {"a"}
        assert asked("b", "/retrieve_future", request_id=request_id).status_code == 410
        fleet.calls.silent = set()
        asked("b", "/cancel_future", request_id=request_id)
        assert asked("a", "/retrieve_future", request_id=request_id).status_code == 410
        other = asked("b", "/asample", **ORDER, seq_id=1).json()["request_id"]
        assert asked("b", "/retrieve_future", request_id=other).json()["sequences"] == first["sequences"]


def test_orders_of_one_id_that_arrive_together_are_answered_once(engine, second_engine, monkeypatch):
    """A client that gives up waiting sends its order again, while replicas are asked about the first one."""
    with local_fleet({"a": engine, "b": second_engine}) as fleet, ThreadPoolExecutor(4) as pool:
        ask = fleet.calls.ask

        async def ask_slowly(call: str, *arguments: Any, **keywords: Any) -> Answers:
            answers = await ask(call, *arguments, **keywords)
            await asyncio.sleep(0.2)
            return answers

        monkeypatch.setattr(fleet.calls, "ask", ask_slowly)
        same = {**ORDER, "seq_id": 0}
        answers = list(pool.map(lambda _: fleet["a"].post("/api/v1/asample", json=same), range(4)))
        assert [answer.status_code for answer in answers] == [200] * 4, [answer.text for answer in answers]
        assert len({answer.text for answer in answers}) == 1 == len(fleet.calls.replicas["a"].futures)
        body = {"request_id": answers[0].json()["request_id"]}
        assert len(fleet["a"].post("/api/v1/retrieve_future", json=body).json()["sequences"]) == 2


def test_a_full_server_asks_for_the_same_order_again(client, engine, monkeypatch):
    with monkeypatch.context() as full:
        full.setattr(engine.loop, "capacity", Capacity((None,), 1))
        answer = client.post("/asample", json={**ORDER, "seq_id": 50})
        assert answer.status_code == 429 and answer.headers["Retry-After"] == "1"
    assert retrieved(client, ordered(client, 50)).status_code == 200


@pytest.fixture
def first_weights(engine, checkpoint):
    """Serve the configured checkpoint before a test and after it."""
    assert engine.update_weights_from_disk(checkpoint, weight_version="0").success
    yield
    assert engine.update_weights_from_disk(checkpoint, weight_version="0").success


SAVED = "tinker://run-1/sampler_weights/step-1"


def created(client: httpx.Client, path: str) -> httpx.Response:
    body = {"session_id": SESSION, "sampling_session_seq_id": 1, "model_path": path, "type": "create_sampling_session"}
    return client.post("/create_sampling_session", json=body)


def sampled(client: httpx.Client, sampler: str, seq_id: int) -> list[int]:
    greedy = {"max_tokens": 6, "temperature": 0.0, "stop": []}
    request_id = ordered(client, seq_id, num_samples=1, sampling_params=greedy, sampling_session_id=sampler)
    return retrieved(client, request_id).json()["sequences"][0]["tokens"]


@pytest.mark.usefixtures("first_weights")
def test_saved_weights_are_merged_where_no_adapter_lies_beside_the_weights(engine, checkpoint, tmp_path):
    made = make_adapter(checkpoint, "shared_outer")
    made.write(tmp_path / SAVED.removeprefix("tinker://"))
    made.write(tmp_path / "run-1/other")
    state = ApiState(engine.loop, engine.tokenizer, ServerSettings(), weight_roots=(str(tmp_path),))
    with running(create_api(state)) as url, httpx.Client(base_url=f"{url}/api/v1", timeout=60) as client:
        base = sampled(client, f"{SESSION}:sample:9", 0)
        sampler = created(client, SAVED).json()["sampling_session_id"]
        assert engine.loop.control.adapter == SAVED
        assert client.get(f"/samplers/{sampler}").json()["model_path"] == SAVED
        found = sampled(client, sampler, 0)
        assert found != base
        assert created(client, "tinker://run-1/other").status_code == 200
        refused = client.post("/asample", json={**ORDER, "seq_id": 1, "sampling_session_id": sampler})
        assert refused.status_code == 404 and "other weights serve now" in refused.text
        assert sampled(client, created(client, SAVED).json()["sampling_session_id"], 2) == found


@pytest.mark.usefixtures("first_weights")
def test_saved_weights_that_cannot_be_served_are_answered_as_the_client_expects(engine, checkpoint, tmp_path):
    """404 for absent ones, 400 for a wrong path and for an adapter that is refused; nothing changes."""
    wrong = make_adapter(checkpoint, "fused")
    wrong.config["use_dora"] = True
    wrong.write(tmp_path / "root/run/dora")
    make_adapter(checkpoint, "fused").write(tmp_path / "outside")
    (tmp_path / "root/run/link").symlink_to(tmp_path / "outside")
    state = ApiState(engine.loop, engine.tokenizer, ServerSettings(), weight_roots=(str(tmp_path / "root"),))
    with running(create_api(state)) as url, httpx.Client(base_url=f"{url}/api/v1", timeout=60) as client:
        cases = [
            ("tinker://run-1/sampler_weights/absent", 404, "no such weights"),
            ("tinker://run/link", 404, "no such weights"),
            ("tinker://run/dora", 400, "use_dora: DoRA"),
            *((path, 400, "model_path") for path in ("tinker://run", "/root/run", "tinker://run/../../outside")),
            ("tinker://" + "a/" * 64 + "a", 400, "model_path"),
        ]
        for path, status, message in cases:
            answer = created(client, path)
            assert answer.status_code == status and message in answer.text, (path, answer.text)
            assert str(tmp_path) not in answer.text
    assert engine.loop.control.adapter == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": {"chunks": [{"tokens": [1], "type": "image"}]}}, "images are not read"),
        ({"prompt": {"chunks": [{"tokens": [10**6]}]}}, "`prompt.chunks`: token ids"),
        ({"sampling_params": {"max_tokens": 10**6}}, "`sampling_params.max_tokens`: 4 prompt tokens"),
        ({"prompt": {"chunks": []}}, "chunks"),
        ({"prompt_alt_tokens_k": 2}, "`prompt_alt_tokens_k` is not supported"),
        ({"record_stability_info": True}, "`record_stability_info` is not supported"),
        ({"target_prompt_logprobs": {"data": [1]}}, "`target_prompt_logprobs` is not supported"),
        ({"invented": 1}, "1 fields of the body are not known"),
        ({"topk_prompt_logprobs": 100}, "topk_prompt_logprobs"),
        ({"num_samples": 0}, "num_samples"),
        ({"sampling_params": {"stop": [1, "a"]}}, "stop"),
        ({"sampling_params": {"top_p": 0.0}}, "top_p"),
        ({"seq_id": -1}, "seq_id"),
    ],
)
def test_what_is_not_served_is_refused_by_name(client, change, message):
    answer = client.post("/asample", json={**ORDER, "seq_id": 40, **change})
    assert answer.status_code == 400 and message in answer.json()["error"]["message"]


def test_a_wrong_key_is_refused(url):
    for headers in ({}, {"X-API-Key": "tml-other"}):
        assert httpx.post(f"{url}/create_session", json={}, headers=headers).status_code == 401


def test_a_model_that_fails_is_the_orders_own_error(small_engine):
    with served(small_engine) as url, httpx.Client(base_url=f"{url}/api/v1", timeout=60) as client:
        request_id = ordered(client, 0, prompt={"chunks": [{"tokens": [POISONED_TOKEN_ID]}]}, prompt_logprobs=False)
        answer = retrieved(client, request_id)
        assert answer.status_code == 200 and answer.json()["category"] == "user" and answer.json()["error"]


def test_orders_nobody_asks_for_end_and_the_oldest_outcomes_leave():
    async def use() -> None:
        store = FutureStore(max_bytes=10, abandoned_s=0.05, kept_s=0.05)
        never, is_cancelled = asyncio.Event(), asyncio.Event()

        async def waits() -> None:
            try:
                await never.wait()
            finally:
                is_cancelled.set()

        async def gives(value: int) -> int:
            return value

        store.start("abandoned", waits(), size_of=int)
        await is_cancelled.wait()
        assert len(store) == 0 and not store.drop("abandoned")
        store = FutureStore(max_bytes=10)
        for name, size in (("a", 6), ("b", 3), ("c", 4)):
            store.start(name, gives(size), size_of=int)
            await store.get(name)
            await asyncio.sleep(0)
        assert [store.get(name) is None for name in "abc"] == [True, False, False]
        store.start("large", gives(11), size_of=int)
        await store.get("large")
        await asyncio.sleep(0)
        assert len(store) == 0

    asyncio.run(use())
