"""`/v1/embeddings`, vLLM's form of `/v1/score`, and hidden states in answers: all of the same states."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest

from tests.support.serving.http_client import CHAT, COMPLETIONS, GENERATE, TOKENS, ask, check_error, scored, stream

EMBEDDINGS, SCORE = "/v1/embeddings", "/v1/score"
PROMPT = [*range(40, 60)]
GREEDY = {"temperature": 0, "ignore_eos": True}
CLOSE = {"rtol": 0, "atol": 3e-5}


def state_of(http, input_ids):
    """The state at the last token of a prompt, by the native route."""
    asked = {"sampling_params": {"max_new_tokens": 0}, "return_hidden_states": "last"}
    return np.array(ask(http, GENERATE, input_ids=input_ids, **asked)["meta_info"]["hidden_states"])


def unit(vector):
    return vector / np.linalg.norm(vector)


def embedded(http, **body):
    return np.array([each["embedding"] for each in ask(http, EMBEDDINGS, **body)["data"]])


def test_an_embedding_is_the_state_at_the_last_token_as_a_unit_vector(http):
    batch = [PROMPT, PROMPT[:7], [5]]
    answer = ask(http, EMBEDDINGS, input=batch)
    assert [each["index"] for each in answer["data"]] == [0, 1, 2] and answer["object"] == "list"
    assert answer["usage"] == {"prompt_tokens": 28, "total_tokens": 28}
    for each, prompt in zip(answer["data"], batch, strict=True):
        np.testing.assert_allclose(each["embedding"], unit(state_of(http, prompt)), **CLOSE)
    np.testing.assert_allclose(embedded(http, input=PROMPT, use_activation=False)[0], state_of(http, PROMPT), **CLOSE)


def test_texts_are_tokenized_and_cut_as_prompts_are(http):
    ids = ask(http, "/tokenize", prompt="some text")["tokens"]
    np.testing.assert_allclose(embedded(http, input="some text"), embedded(http, input=[ids]), **CLOSE)
    cut = embedded(http, input="some text", truncate_prompt_tokens=3, truncation_side="right")
    np.testing.assert_allclose(cut, embedded(http, input=ids[:3]), **CLOSE)


def test_base64_is_float32_as_openai_s_client_reads_it(http, client):
    plain = embedded(http, input=[PROMPT, [5]])
    for each, expected in zip(client.embeddings.create(model="tiny", input=[PROMPT, [5]]).data, plain, strict=True):
        np.testing.assert_allclose(each.embedding, expected, **CLOSE)
    encoded = ask(http, EMBEDDINGS, input=PROMPT, encoding_format="base64")["data"][0]["embedding"]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(encoded), "<f4"), plain[0], **CLOSE)


@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
def test_scores_of_pairs_are_cosines(http, names):
    first, second = names
    answer = ask(http, SCORE, **{first: "a b", second: ["c", "a b"]})
    one, *others = (embedded(http, input=text)[0] for text in ("a b", "c", "a b"))
    np.testing.assert_allclose([each["score"] for each in answer["data"]], [one @ other for other in others], **CLOSE)
    assert answer["data"][1]["score"] == pytest.approx(1, abs=1e-5)
    pairs = ask(http, SCORE, **{first: ["a b", "c"], second: ["c", "a b"]})["data"]
    assert pairs[0]["score"] == pytest.approx(pairs[1]["score"], abs=1e-5)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_openai_s_routes_have_the_state_that_the_last_token_came_from(http, path):
    prompt = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    prompt |= {"input_ids": PROMPT} if path == CHAT else {}
    body = {**prompt, **GREEDY, "max_tokens": 4, "return_token_ids": True, "return_hidden_states": True}
    choice = ask(http, path, **body)["choices"][0]
    expected = state_of(http, PROMPT + choice["token_ids"][:-1])
    np.testing.assert_allclose(choice["hidden_states"], expected, **CLOSE)
    found = [
        c["hidden_states"] for event in stream(http, path, **body) for c in event["choices"] if "hidden_states" in c
    ]
    np.testing.assert_allclose(found, [expected], **CLOSE)


def test_each_prompt_of_a_batch_says_what_it_wants(http):
    params = {"max_new_tokens": 2, **GREEDY}
    wanted = [True, False, "last"]
    answers = ask(http, GENERATE, input_ids=[PROMPT] * 3, sampling_params=params, return_hidden_states=wanted)
    first, second, last = (answer["meta_info"].get("hidden_states") for answer in answers)
    assert second is None and len(first) == 2 and len(first[0]) == len(PROMPT)
    np.testing.assert_allclose(first[-1], last, **CLOSE)


def test_rows_of_listed_ids_are_what_prompt_scores_say(http):
    rows = [[PROMPT[4], 7], [PROMPT[5]], [9, PROMPT[6]]]
    sampling = {"max_tokens": 1, **GREEDY, "prompt_logprob_token_ids": rows, "prompt_logprob_start": 3}
    answer = ask(http, TOKENS, token_ids=PROMPT, sampling_params=sampling)
    found = np.load(io.BytesIO(base64.b64decode(answer["prompt_token_id_logprobs"])))
    assert found.dtype == np.float32 and found.shape == (3, 2) and found[1, 1] == -np.inf
    own = [entry[0] for entry in scored(http, PROMPT, 3)["meta_info"]["input_token_logprobs"][1:4]]
    np.testing.assert_allclose([found[0, 0], found[1, 0], found[2, 1]], own, rtol=0, atol=1e-5)
    other = scored(http, [*PROMPT[:4], 7], 3)["meta_info"]["input_token_logprobs"][-1][0]
    assert found[0, 1] == pytest.approx(other, abs=1e-5)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprob_start": 3}, "prompt_logprob_start"),
        ({"prompt_logprob_token_ids": []}, "sampling_params.prompt_logprob_token_ids"),
        ({"prompt_logprob_token_ids": [[]]}, "sampling_params.prompt_logprob_token_ids"),
        ({"prompt_logprob_token_ids": [5]}, "sampling_params.prompt_logprob_token_ids"),
        ({"prompt_logprob_token_ids": [[10**6]]}, "sampling_params.prompt_logprob_token_ids"),
        ({"prompt_logprob_token_ids": [[5]] * 20}, "sampling_params.prompt_logprob_token_ids"),
        ({"prompt_logprob_token_ids": [[5]], "prompt_logprob_start": 19}, "sampling_params.prompt_logprob_token_ids"),
    ],
)
def test_rows_that_no_prompt_has_are_refused(http, fields, param):
    answer = http.post(TOKENS, json={"token_ids": PROMPT, "sampling_params": {"max_tokens": 1, **fields}})
    assert check_error(answer, 400)["param"] == param


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (EMBEDDINGS, {}, "input"),
        (EMBEDDINGS, {"input": []}, "input"),
        (EMBEDDINGS, {"input": ""}, "input"),
        (EMBEDDINGS, {"input": [10**6]}, "input"),
        (EMBEDDINGS, {"input": [5] * 600}, "input"),
        (EMBEDDINGS, {"input": "x", "dimensions": 8}, "dimensions"),
        (EMBEDDINGS, {"input": "x", "encoding_format": "bytes"}, "encoding_format"),
        (EMBEDDINGS, {"input": "x", "messages": [{}]}, "messages"),
        (SCORE, {"text_1": "x"}, "text_1"),
        (SCORE, {"text_1": "x", "documents": "y"}, "text_1"),
        (SCORE, {"text_1": ["x", "y"], "text_2": "x"}, "text_1"),
        (SCORE, {"query": "x", "documents": ["y"]}, "documents"),
        (COMPLETIONS, {"prompt": "x", "return_hidden_states": 2}, "return_hidden_states"),
    ],
)
def test_wrong_bodies_are_refused(http, path, fields, param):
    assert check_error(http.post(path, json=fields), 400)["param"] == param


def test_a_server_that_does_not_show_states_says_so(small_http):
    for path, body in ((EMBEDDINGS, {"input": "x"}), (SCORE, {"text_1": "x", "text_2": "y"})):
        error = check_error(small_http.post(path, json=body), 501)
        assert "enable_return_hidden_states" in error["message"]
    body = {"input_ids": PROMPT, "return_hidden_states": True}
    assert check_error(small_http.post(GENERATE, json=body), 400)["param"] == "return_hidden_states"


def test_states_that_are_no_numbers_are_the_model_s_failure(poisoned_states):
    assert check_error(poisoned_states.post(EMBEDDINGS, json={"input": [300, 5]}), 422)["code"] == "model_failed"


@pytest.mark.parametrize("streams", [False, True])
def test_sglang_s_extensions_stand_beside_the_choices(http, streams):
    """In a stream in an event of their own, ahead of the one that counts tokens."""
    body = {"messages": [{"role": "user", "content": "x"}], "input_ids": PROMPT, **GREEDY, "max_tokens": 3, "n": 1}
    names = ["return_cached_tokens_details", "return_spec_tokens_details"]
    body |= dict.fromkeys([*names, "return_input_ids_in_sglext", "return_output_ids_in_sglext"], True)
    ids = ask(http, CHAT, **body, return_token_ids=True)["choices"][0]["token_ids"]
    if streams:
        events = stream(http, CHAT, **body, stream_options={"include_usage": True})
        assert [event["choices"] for event in events[-2:]] == [[], []] and "usage" in events[-1]
        found = events[-2]["sglext"]
    else:
        found = ask(http, CHAT, **body)["sglext"]
    assert (found["input_ids"], found["output_ids"]) == (PROMPT, [ids])
    assert found["cached_tokens_details"]["host"] == 0 and found["spec_tokens_details"]["spec_verify_ct"] == 0
    plain = ask(http, COMPLETIONS, prompt=PROMPT, max_tokens=1, return_cached_tokens_details=True)
    assert plain["sglext"] == {"cached_tokens_details": {"device": 16, "host": 0}}


def test_the_token_route_keeps_the_end_of_a_prompt(http):
    def text(ids, **sampling):
        return ask(http, TOKENS, token_ids=ids, sampling_params={**GREEDY, "max_tokens": 4, **sampling})["choices"]

    assert text(PROMPT, truncate_prompt_tokens=7)[0]["token_ids"] == text(PROMPT[-7:])[0]["token_ids"]
    wrong = {"token_ids": PROMPT, "sampling_params": {"truncate_prompt_tokens": 0}}
    assert check_error(http.post(TOKENS, json=wrong), 400)["param"] == "truncate_prompt_tokens"


def test_a_sampling_mask_comes_in_meta_info(http):
    asked = {"max_tokens": 3, "ignore_eos": True, "top_k": 4, "return_sampling_mask": True}
    body = {"messages": [{"role": "user", "content": "x"}], **asked}
    meta = ask(http, CHAT, **body, return_meta_info=True)["choices"][0]["meta_info"]
    assert [len(ids) for ids in meta["output_token_sampling_mask"]] == [4] * 3
    assert check_error(http.post(CHAT, json=body), 400)
    answers = ask(
        http,
        GENERATE,
        input_ids=[PROMPT] * 2,
        sampling_params={"max_new_tokens": 2, "top_k": 3},
        return_sampling_mask=[True, False],
    )
    assert ["output_token_sampling_mask" in answer["meta_info"] for answer in answers] == [True, False]


@pytest.mark.parametrize("count", [1, 5])
def test_a_sample_of_too_many_words_ends_with_an_error(http, monkeypatch, count):
    monkeypatch.setattr("rayserve_moe.scheduling.token_commit.MAX_MASK_IDS", 100)
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": count}, "return_sampling_mask": True}
    reason = ask(http, GENERATE, **body)["meta_info"]["finish_reason"]
    assert reason["type"] == "error" and "top_k" in reason["message"]
