"""Log-probs of listed ids, entropy and the model's own log-probs, under the names and in the form of each route."""

from __future__ import annotations

import pytest

from tests.support.serving.http_client import CHAT, COMPLETIONS, GENERATE, TOKENS, ask, check_error, stream

PROMPT = [*range(40, 60)]
LISTED = [300, 7, 9]
GREEDY = {"temperature": 0, "ignore_eos": True}
NATIVE = {"sampling_params": {**GREEDY, "max_new_tokens": 4}, "return_logprob": True}
OPENAI = {**GREEDY, "max_tokens": 4}
MESSAGES = [{"role": "user", "content": "x"}]
CLOSE = {"rel": 0, "abs": 1e-5}


@pytest.fixture
def expected(http):
    """By place, pairs of id and log-prob: the sampled one, then the listed ones."""
    meta = ask(http, GENERATE, input_ids=PROMPT, **NATIVE, token_ids_logprob=LISTED)["meta_info"]
    assert meta["input_token_ids_logprobs"] == []
    entries = zip(meta["output_token_logprobs"], meta["output_token_ids_logprobs"], strict=True)
    return [[(token_id, value) for value, token_id, _ in [own, *listed]] for own, listed in entries]


def assert_close(found, expected):
    assert [[token_id for token_id, _ in place] for place in found] == [[i for i, _ in place] for place in expected]
    for place, told in zip(found, expected, strict=True):
        assert [value for _, value in place] == pytest.approx([value for _, value in told], **CLOSE)


def test_listed_ids_come_in_their_order(expected):
    assert [[token_id for token_id, _ in place[1:]] for place in expected] == [LISTED] * 4


def test_the_token_route_names_them_after_the_sampled_token(http, expected):
    sampling = {**OPENAI, "logprobs": 1, "logprob_token_ids": LISTED}
    content = ask(http, TOKENS, token_ids=PROMPT, sampling_params=sampling)["choices"][0]["logprobs"]["content"]
    assert_close([[(top["token_id"], top["logprob"]) for top in place["top_logprobs"]] for place in content], expected)
    assert all([top["rank"] for top in place["top_logprobs"][1:]] == [None] * 3 for place in content)


@pytest.mark.parametrize("streams", [False, True])
def test_the_chat_route_does_in_place_of_the_likeliest(http, expected, streams):
    body = {"messages": MESSAGES, "input_ids": PROMPT, **OPENAI, "logprobs": True, "logprob_token_ids": LISTED}
    body |= {"return_tokens_as_token_ids": True}
    answers = stream(http, CHAT, **body) if streams else [ask(http, CHAT, **body)]
    content = [
        place for answer in answers for place in (answer["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    found = [
        [(int(top["token"].removeprefix("token_id:")), top["logprob"]) for top in place["top_logprobs"]]
        for place in content
    ]
    assert_close(found, expected)


def test_completions_have_them_by_name(http, expected):
    body = {"prompt": PROMPT, **OPENAI, "logprobs": 0, "logprob_token_ids": LISTED, "return_tokens_as_token_ids": True}
    tops = ask(http, COMPLETIONS, **body)["choices"][0]["logprobs"]["top_logprobs"]
    found = [[(int(name.removeprefix("token_id:")), value) for name, value in top.items()] for top in tops]
    assert_close(found, expected)


def test_each_prompt_of_a_batch_has_its_own_list(http):
    told = ask(http, GENERATE, input_ids=[PROMPT] * 3, **NATIVE, token_ids_logprob=[[5], None, [6, 7]])
    ids = [[i for _, i, _ in answer["meta_info"].get("output_token_ids_logprobs", [[]])[0]] for answer in told]
    assert ids == [[5], [], [6, 7]]


def test_lists_pass_without_effect_where_sglang_passes_over_them(http):
    body = {"input_ids": PROMPT, "sampling_params": NATIVE["sampling_params"], "token_ids_logprob": LISTED}
    assert "output_token_ids_logprobs" not in ask(http, GENERATE, **body)["meta_info"]


def test_entropy_needs_no_log_probs(http):
    body = {"input_ids": PROMPT, "sampling_params": NATIVE["sampling_params"], "return_entropy": True}
    entropy = ask(http, GENERATE, **body)["meta_info"]["output_token_entropy"]
    assert len(entropy) == 4 and all(0 < value < 6.3 for value in entropy)


@pytest.mark.parametrize("path", [COMPLETIONS, TOKENS])
def test_a_request_chooses_the_distribution(http, path):
    def logprobs(mode):
        sampling = {**OPENAI, "temperature": 0.3, "seed": 5, "logprobs": 1, "logprobs_mode": mode}
        if path == COMPLETIONS:
            return ask(http, path, prompt=PROMPT, **sampling)["choices"][0]["logprobs"]["token_logprobs"]
        content = ask(http, path, token_ids=PROMPT, sampling_params=sampling)["choices"][0]["logprobs"]["content"]
        return [place["logprob"] for place in content]

    scored = [None, *logprobs("raw_logprobs")]
    ids = {**OPENAI, "temperature": 0.3, "seed": 5, "return_token_ids": True}
    output = ask(http, COMPLETIONS, prompt=PROMPT, **ids)["choices"][0]["token_ids"]
    score = {"sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": len(PROMPT) - 1}
    told = ask(http, GENERATE, input_ids=PROMPT + output, **score)["meta_info"]["input_token_logprobs"]
    assert scored[1:] == pytest.approx([value for value, *_ in told[1:]], **CLOSE)
    assert logprobs("processed_logprobs") != pytest.approx(scored[1:], **CLOSE)


@pytest.mark.parametrize("listed", [None, LISTED])
def test_a_start_beyond_the_prompt_is_refused(http, listed):
    for start in (len(PROMPT) + 1, 2**31 - 1):
        body = {"input_ids": PROMPT, **NATIVE, "token_ids_logprob": listed, "logprob_start_len": start}
        assert check_error(http.post(GENERATE, json=body), 400)["param"] == "logprob_start_len"
