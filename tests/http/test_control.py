"""Control over HTTP: aborting, flushing, and what the server says of itself."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rayserve_moe.rollouts.alignment import decode_answer
from rayserve_moe.serving.api.routes.unsupported import REASONS
from tests.http.conftest import POISONED_TOKEN_ID, assert_idle
from tests.support.engine import step_gate
from tests.support.serving.http_client import GENERATE, TOKENS, ask, check_error, stream, wait_until

NUM_WANTED = 160
"""Number of new tokens. With `unhurried` each takes 20 ms, so that requests outlast the calls of a test."""
ENDLESS = {"temperature": 0, "ignore_eos": True}
PROMPT = [5, 6, 7]


def native(**fields):
    sampling = {**ENDLESS, "max_new_tokens": NUM_WANTED, "n": fields.pop("n", 1)}
    return {"input_ids": PROMPT, "sampling_params": sampling, "return_routed_experts": True, **fields}


def tokens(**fields):
    return {"token_ids": PROMPT, "sampling_params": {**ENDLESS, "max_tokens": NUM_WANTED}, **fields}


@contextmanager
def running(http, engine, path, body):
    """Ask in another thread; yields a future of the answer as soon as tokens come."""
    sampled = engine.loop.statistics()["tokens_sampled"]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, http, path, **body)
        wait_until(lambda: engine.loop.statistics()["tokens_sampled"] > sampled + 5)
        yield answer


def check_partial(answer, layout):
    """What came before the abort is all there: tokens, and a row for each token but the last."""
    output_ids = answer["output_ids"]
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(output_ids) == answer["meta_info"]["completion_tokens"] < NUM_WANTED
    routing = decode_answer(answer, layout)
    assert len(routing.rows) == len(PROMPT) + len(output_ids) - 1 and not routing.missing


@pytest.mark.parametrize("command", [{"rid": "mine"}, {"abort_all": True}, {"rid": "", "abort_all": True}])
def test_an_aborted_request_answers_with_what_it_has(http, engine, command, unhurried):
    with running(http, engine, GENERATE, native(rid="mine")) as answer:
        assert ask(http, "/abort_request", **command) == {"success": True}
        check_partial(answer.result(), engine.loop.card.routing)


@pytest.mark.parametrize("fields", [{"n": 3}, {"input_ids": [PROMPT, PROMPT]}])
def test_the_id_of_a_batch_or_of_choices_aborts_all_of_them(http, engine, fields, unhurried):
    with running(http, engine, GENERATE, native(rid="many", **fields)) as answers:
        ask(http, "/abort_request", rid="many")
        for answer in answers.result():
            check_partial(answer, engine.loop.card.routing)


def test_one_request_of_a_batch_can_be_aborted_by_its_own_id(http, engine, unhurried):
    batch = native(rid=["first", "second"], input_ids=[PROMPT, PROMPT])
    with running(http, engine, GENERATE, batch) as answers:
        ask(http, "/abort_request", rid="second")
        first, second = answers.result()
    check_partial(second, engine.loop.card.routing)
    assert len(first["output_ids"]) == NUM_WANTED
    assert first["output_ids"][: len(second["output_ids"])] == second["output_ids"]


def test_an_aborted_token_answer_has_a_row_for_each_token_but_the_last(http, engine, unhurried):
    with running(http, engine, TOKENS, tokens(request_id="mine")) as answer:
        ask(http, "/abort_request", rid="mine")
        (choice,) = answer.result()["choices"]
    assert choice["finish_reason"] == "abort" and 0 < len(choice["token_ids"]) < NUM_WANTED
    assert choice["routed_experts"]["shape"][0] == len(PROMPT) + len(choice["token_ids"]) - 1


def test_an_abort_of_what_does_not_run_does_nothing(http, engine):
    with running(http, engine, GENERATE, native(rid="mine")) as answer:
        for rid in ("min", "mine_", "mine_1", "other"):
            ask(http, "/abort_request", rid=rid)
        assert answer.result()["meta_info"]["finish_reason"]["type"] == "length"


FLUSHES = [("GET", "/flush_cache"), ("POST", "/flush_cache"), ("POST", "/reset_prefix_cache")]


@pytest.mark.parametrize(("method", "path"), FLUSHES)
def test_a_flush_forgets_prefixes_and_waits_for_nobody(http, engine, method, path, unhurried):
    warm = {"input_ids": [*range(100, 140)], "sampling_params": {"max_new_tokens": 1}}
    for _ in range(2):
        cached = ask(http, GENERATE, **warm)["meta_info"]["cached_tokens"]
    assert cached == 32
    with running(http, engine, GENERATE, native(rid="mine")) as answer:
        assert check_error(http.request(method, path), 400)["code"] == "requests_running"
        ask(http, "/abort_request", abort_all=True)
        answer.result()
    assert_idle(engine)
    assert http.request(method, path).status_code == 200
    assert ask(http, GENERATE, **warm)["meta_info"]["cached_tokens"] == 0


def test_loads_count_what_runs_until_nothing_does(http, engine, unhurried):
    assert http.get("/v1/loads").json()["num_running_reqs"] == 0
    with running(http, engine, GENERATE, native(n=12)) as answer:
        wait_until(lambda: engine.loop.statistics()["requests_running"] == 8)
        busy = http.get("/v1/loads", params={"include": "core"}).json()
        assert busy["num_running_reqs"] == 8 and busy["num_waiting_reqs"] == 4
        assert busy["num_used_tokens"] > 8 * len(PROMPT) and 0 < busy["token_usage"] < 1
        assert busy["loads"][0]["num_running_reqs"] == 8
        ask(http, "/abort_request", abort_all=True)
        answer.result()
    assert_idle(engine)
    idle = http.get("/v1/loads?include=core").json()
    assert [idle[name] for name in ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "token_usage")] == [
        0
    ] * 4


def test_metrics_are_the_engine_s_statistics(http, engine):
    ask(http, GENERATE, input_ids=PROMPT, sampling_params={"max_new_tokens": 3, **ENDLESS})
    assert_idle(engine)
    answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    numbers = engine.loop.statistics()
    sampled = families["rayserve_moe_tokens_sampled"]
    assert sampled.type == "counter" and sampled.samples[0].value == numbers["tokens_sampled"]
    assert families["rayserve_moe_kv_pages"].type == "gauge"
    assert families["rayserve_moe_device_seconds"].samples[0].value == pytest.approx(numbers["device_s"])
    assert len(families) >= len(numbers)


def test_the_model_is_described(http, engine):
    card = engine.loop.card
    for path in ("/model_info", "/get_model_info", "/server_info", "/get_server_info"):
        told = http.get(path).json()
        assert told["model_path"] == card.path and told["is_generation"] and told["weight_version"] == "0"
        assert told["moe_layer_ids"] == list(card.routing.layer_ids)
    assert http.get("/get_weight_version").json() == {"weight_version": "0"}
    server = http.get("/server_info").json()
    assert server["version"] and server["statistics"]["pages_total"] > 0


def test_a_healthy_engine_generates_a_token(http, engine):
    sampled = engine.loop.statistics()["tokens_sampled"]
    assert http.get("/health_generate").json() == {"status": "ok"}
    assert engine.loop.statistics()["tokens_sampled"] == sampled + 1


def test_an_engine_that_cannot_take_more_says_that_it_is_busy(small_http, small_engine):
    unpoisoned = {str(POISONED_TOKEN_ID): -100}
    long = {"input_ids": [5], "sampling_params": {"max_new_tokens": 500, "ignore_eos": True, "logit_bias": unpoisoned}}
    threads = [threading.Thread(target=ask, args=(small_http, GENERATE), kwargs=long) for _ in range(2)]
    with step_gate.unhurried(small_engine.loop):
        for thread in threads:
            thread.start()
        wait_until(lambda: small_engine.loop.statistics()["requests_live"] == 2)
        check_error(small_http.get("/health_generate"), 429)
        ask(small_http, "/abort_request", abort_all=True)
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("path", list(REASONS))
def test_what_this_server_cannot_do_is_refused_with_a_reason(http, path):
    error = check_error(http.post(path, json={"names": ["zq7-marker"], "group_name": "x"}), 501)
    assert error["message"] == REASONS[path] and error["code"] == "not_implemented"


def test_streams_of_one_client_survive_an_abort_of_another(http, engine, unhurried):
    with running(http, engine, GENERATE, native(rid="mine")) as answer:
        events = stream(http, GENERATE, **native(rid="theirs", sampling_params={**ENDLESS, "max_new_tokens": 20}))
        ask(http, "/abort_request", rid="mine")
        check_partial(answer.result(), engine.loop.card.routing)
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 20}
