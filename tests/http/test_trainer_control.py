"""Control routes under the names of vLLM, Miles, AReaL and others: what each trainer calls between two rollouts."""

from __future__ import annotations

import pytest

from rayserve_moe.serving.middleware.ignored_fields import HEADER
from tests.http.conftest import assert_idle
from tests.http.test_control import PROMPT, check_partial, native, running, tokens
from tests.http.test_weight_routes import SHORT
from tests.support.serving.http_client import GENERATE, TOKENS, ask, check_error

WARM = {"input_ids": [*range(100, 140)], "sampling_params": {"max_new_tokens": 1}}
FLUSH, RESET = "/flush_cache", "/reset_prefix_cache"


@pytest.fixture
def going_on(http, checkpoint):
    yield
    ask(http, "/resume")
    ask(http, "/update_weights", weight_dir=str(checkpoint))
    ask(http, "/update_weight_version", new_version="0")


def cached_tokens(http):
    return ask(http, GENERATE, **WARM)["meta_info"]["cached_tokens"]


def status_of(http, path):
    return http.get(path).status_code


@pytest.mark.parametrize("in_query", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_pause_keeps_or_ends_what_runs(http, engine, going_on, unhurried, in_query):
    def pause(**options):
        given = {"params": options} if in_query else {"json": options}
        assert http.post("/pause", **given).json() == {"status": "paused"}

    cached_tokens(http)
    with running(http, engine, GENERATE, native(rid="kept")) as answer:
        pause(mode="keep", clear_cache="false" if in_query else False)
        assert http.get("/is_paused").json() == {"is_paused": True}
        assert [status_of(http, path) for path in ("/ready", "/ping", "/liveness", "/health")] == [503, 200, 200, 200]
        assert http.get("/load").json() == {"server_load": 1}
        assert http.post("/resume").json() == {"status": "resumed"}
        assert http.get("/is_paused").json() == {"is_paused": False} and status_of(http, "/ready") == 200
        assert answer.result()["meta_info"]["finish_reason"]["type"] == "length"
    with running(http, engine, GENERATE, native(rid="ended")) as answer:
        pause(mode="abort", clear_cache="false" if in_query else False)
        check_partial(answer.result(), engine.loop.card.routing)
    ask(http, "/resume")
    assert cached_tokens(http) == 32
    pause()
    ask(http, "/resume")
    assert cached_tokens(http) == 0
    assert check_error(http.post("/pause?mode=x"), 400)


@pytest.mark.parametrize(("method", "path"), [("GET", FLUSH), ("POST", FLUSH), ("POST", RESET)])
def test_the_cache_is_flushed_while_requests_wait_without_pages(http, engine, going_on, unhurried, method, path):
    """Miles pauses with `retract` and asks for the flush until it is answered 200."""
    cached_tokens(http)
    with running(http, engine, GENERATE, native(rid="waits")) as answer:
        assert check_error(http.request(method, path), 400)["code"] == "requests_running"
        ask(http, "/pause_generation", mode="in_place")
        assert check_error(http.request(method, path), 400)["code"] == "requests_running"
        ask(http, "/pause_generation", mode="retract")
        assert http.request(method, path).status_code == 200
        engine.loop.check_integrity()
        ask(http, "/continue_generation")
        ask(http, "/abort_request", rid="waits")
        check_partial(answer.result(), engine.loop.card.routing)
    assert cached_tokens(http) == 0


@pytest.mark.parametrize("is_paused", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_requests_that_run_are_computed_anew_after_a_reset(http, engine, going_on, unhurried, is_paused):
    """SkyRL sends the option in a body, vLLM's own clients in the query."""
    plain = ask(http, GENERATE, **native(rid="plain"))
    cached_tokens(http)
    with running(http, engine, GENERATE, native(rid="mine")) as answer:
        if is_paused:
            ask(http, "/pause", mode="keep", clear_cache=False)
        assert ask(http, RESET, reset_running_requests=True)["success"]
        assert http.post(f"{RESET}?reset_running_requests=true").status_code == 200
        engine.loop.check_integrity()
        ask(http, "/resume")
        assert answer.result()["output_ids"] == plain["output_ids"]
    assert cached_tokens(http) == 0


@pytest.mark.parametrize("path", ["/abort_requests", "/inference/v1/abort_requests"])
@pytest.mark.parametrize("body", [{"request_ids": ["mine", "gone"]}, {"request_ids": []}, {}, None])
def test_requests_are_aborted_by_their_ids_or_all(http, engine, unhurried, path, body):
    with running(http, engine, TOKENS, tokens(request_id="mine")) as answer:
        aborted = http.post(path, json=body) if body is not None else http.post(path)
        assert aborted.json() == {"status": "aborted", "aborted": 2 if body and body["request_ids"] else 1}
        assert answer.result()["choices"][0]["finish_reason"] == "abort"


def test_requests_are_aborted_by_what_their_ids_begin_with(http, engine, unhurried):
    with running(http, engine, GENERATE, native(rid="group-7-a")) as answer:
        ask(http, "/abort_request", rid="group-8", prefix=True)
        ask(http, "/abort_request", rid="group-7", prefix=False)
        assert engine.loop.statistics()["requests_live"] == 1
        ask(http, "/abort_request", rid="group-7", prefix=True)
        check_partial(answer.result(), engine.loop.card.routing)


@pytest.mark.parametrize(
    ("path", "field"), [("/update_weights", "weight_dir"), ("/areal_update_weights", "model_path")]
)
def test_weights_come_from_a_directory(http, engine, going_on, other_checkpoint, path, field):
    before = ask(http, GENERATE, **SHORT)["output_ids"]
    for command in ("/areal_pause_generation", "/begin_weight_update"):
        assert ask(http, command)["success"]
    told = ask(http, path, **{field: str(other_checkpoint)})
    assert told["success"] and told["message"] and told["weight_version"] == "1"
    for command in ("/end_weight_update", "/areal_continue_generation"):
        assert ask(http, command)["success"]
    assert http.get("/weight_info").json() == http.get("/get_weight_version").json() == {"weight_version": "1"}
    assert ask(http, GENERATE, **SHORT)["output_ids"] != before
    refused = http.post(path, json={field: "/nowhere"}).json()
    assert refused["success"] is False and refused["error"]["param"] == field


def test_weights_do_not_come_over_a_collective(http):
    for body in ({"update_info": {"names": ["zq7-marker"]}}, {"weight_dir": None}):
        assert "weight_dir" in check_error(http.post("/update_weights", json=body), 501)["message"]


@pytest.mark.parametrize("aborts", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_same_weights_get_another_name(http, engine, going_on, unhurried, aborts):
    plain = ask(http, GENERATE, **native(rid="plain"))
    cached_tokens(http)
    with running(http, engine, GENERATE, native(rid="mine")) as answer:
        told = ask(http, "/update_weight_version", new_version="step-9", abort_all_requests=aborts)
        assert told["success"] and told["new_version"] == "step-9"
        meta = answer.result()["meta_info"]
        assert meta["finish_reason"]["type"] == ("abort" if aborts else "length")
    if not aborts:
        assert answer.result()["output_ids"] == plain["output_ids"]
        old, new = meta["weight_versions"]
        assert (old["version"], new["version"]) == ("0", "step-9") and old["end"] == new["start"]
        assert meta["weight_version"] == meta["routed_experts_info"]["weight_version"][-1][2] == "step-9"
    assert http.get("/get_weight_version").json() == {"weight_version": "step-9"}
    assert cached_tokens(http) == 32
    assert_idle(engine)


def test_texts_become_ids_and_ids_texts(http, engine):
    text, tokenizer = "a</s>b", engine.tokenizer
    told = ask(http, "/tokenize", prompt=text, model="tiny", return_token_strs=True)
    assert told["tokens"] == tokenizer.encode(text) and told["count"] == len(told["tokens"])
    assert len(told["token_strs"]) == told["count"] and told["max_model_len"] == engine.loop.card.max_model_len
    bare = ask(http, "/tokenize", prompt=text, add_special_tokens=False)
    assert bare["tokens"] == tokenizer.encode(text, add_special_tokens=False) and bare["token_strs"] is None
    assert ask(http, "/detokenize", tokens=bare["tokens"]) == {"prompt": text, "text": "ab"}
    for skips, expected in ((True, "ab"), (False, text)):
        texts = ask(http, "/detokenize", tokens=bare["tokens"], skip_special_tokens=skips)
        assert texts == {"prompt": expected, "text": expected}


def test_texts_may_be_several_and_empty(http, engine):
    each = [ask(http, "/tokenize", prompt=text, return_token_strs=True) for text in ("ab", "", "</s>c")]
    several = ask(http, "/tokenize", prompt=["ab", "", "</s>c"], return_token_strs=True)
    assert each[1]["tokens"] == engine.tokenizer.encode("") and several["max_model_len"] == each[0]["max_model_len"]
    for name in ("count", "tokens", "token_strs"):
        assert several[name] == [one[name] for one in each]
    ids = [one["tokens"] for one in each]
    texts = [ask(http, "/detokenize", tokens=one) for one in ids]
    assert ask(http, "/detokenize", tokens=ids) == {name: [one[name] for one in texts] for name in ("prompt", "text")}
    assert ask(http, "/detokenize", tokens=[]) == {"prompt": "", "text": ""}
    assert ask(http, "/tokenize", prompt=[])["tokens"] == []


def test_ids_that_the_model_has_not_are_refused(http, engine):
    last = engine.loop.card.vocab_size - 1
    assert ask(http, "/detokenize", tokens=[last])["prompt"]
    for given in ([last + 1], [[5], [last + 1]], [5, [6]], [[5], 6], [-1], [True]):
        assert check_error(http.post("/detokenize", json={"tokens": given}), 400)["param"] == "tokens"


def test_messages_become_the_ids_that_a_chat_has(http):
    messages = [{"role": "user", "content": "x"}]
    chat = ask(http, "/v1/chat/completions", messages=messages, max_tokens=1, return_token_ids=True)
    assert ask(http, "/tokenize", messages=messages)["tokens"] == chat["prompt_token_ids"]
    check_error(http.post("/tokenize", json={"messages": messages, "prompt": "x"}), 400)
    check_error(http.post("/tokenize", json={}), 400)
    assert check_error(http.post("/detokenize", json={"tokens": ["x"]}), 400)["param"] == "tokens"


def test_the_server_says_what_it_is(http, engine):
    assert http.get("/get_world_size").json() == {"world_size": engine.loop.start_report.num_expert_ranks}
    assert check_error(http.get("/get_world_size?include_dp=false"), 400)["param"] == "include_dp"
    assert http.get("/version").json() == {"version": http.get("/server_info").json()["version"]}
    assert http.get("/is_sleeping").json() == {"is_sleeping": False}
    assert http.post("/ping").status_code == http.post("/finish_session?session_id=x").status_code == 200


def test_skyrl_asks_under_its_own_name(http):
    answer = ask(http, "/skyrl/v1/generate", token_ids=PROMPT, sampling_params={"max_tokens": 2, "logprobs": 1})
    assert answer["choices"][0]["routed_experts"]["dtype"] == "uint8"


def test_options_that_are_not_known_are_listed(http):
    answer = http.post("/resume?colour=red")
    assert answer.status_code == 200 and HEADER not in answer.headers
    answer = http.post(f"{FLUSH}?colour=red", json={"torch_empty_cache": True})
    assert answer.headers[HEADER] == "torch_empty_cache, colour"
