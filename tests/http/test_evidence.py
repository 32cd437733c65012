"""Ids, versions and scored prompts on the OpenAI routes agree with what other routes say of the same tokens."""

from __future__ import annotations

import pytest

from tests.support.serving.http_client import CHAT, COMPLETIONS, TOKENS, ask, check_error, stream

PROMPT = [*range(20, 40)]
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 5}
MESSAGES = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
IDS = {"return_token_ids": True}


@pytest.fixture
def expected(http):
    sampling = {**GREEDY, "logprobs": 2, "prompt_logprobs": 2}
    return ask(http, TOKENS, token_ids=PROMPT, sampling_params=sampling)


def body_of(path, **fields):
    prompt = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": MESSAGES, "input_ids": PROMPT}
    return {**prompt, **GREEDY, **fields}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_tokens_are_called_by_their_ids(http, path, expected):
    logprobs = 2 if path == COMPLETIONS else True
    top = {} if path == COMPLETIONS else {"top_logprobs": 2}
    plain, by_id = (
        ask(http, path, **body_of(path, logprobs=logprobs, **top, return_tokens_as_token_ids=flag))["choices"][0]
        for flag in (False, True)
    )
    names = [f"token_id:{token_id}" for token_id in expected["choices"][0]["token_ids"]]
    if path == COMPLETIONS:
        assert by_id["logprobs"]["tokens"] == names
        assert [next(iter(top)) for top in by_id["logprobs"]["top_logprobs"]] == names
        for field in ("token_logprobs", "text_offset"):
            assert by_id["logprobs"][field] == plain["logprobs"][field]
    else:
        content = by_id["logprobs"]["content"]
        assert [entry["token"] for entry in content] == names
        assert [entry["top_logprobs"][0]["token"] for entry in content] == names
        bare = [{**entry, "token": "", "top_logprobs": []} for entry in content]
        assert bare == [{**entry, "token": "", "top_logprobs": []} for entry in plain["logprobs"]["content"]]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_prompt_is_scored_as_the_token_route_scores_it(http, engine, path, expected):
    answer = ask(http, path, **body_of(path, prompt_logprobs=2))
    scored = (answer["choices"][0] if path == COMPLETIONS else answer)["prompt_logprobs"]
    texts = [entry and [token.pop("decoded_token") for token in entry.values()] for entry in scored]
    assert scored == expected["prompt_logprobs"]
    assert texts[1][0] == engine.tokenizer.token_text(PROMPT[1])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_does_not_score_prompts(http, path):
    assert (
        "prompt_logprobs"
        in check_error(http.post(path, json=body_of(path, prompt_logprobs=0, stream=True)), 400)["message"]
    )


def chat_prompt(http, **fields):
    answer = ask(http, CHAT, messages=MESSAGES, max_tokens=1, **IDS, **fields)
    return answer["prompt_token_ids"], answer["choices"][0]["message"]


def test_a_prompt_opens_an_answer_or_continues_the_last_message(http, engine):
    rendered = engine.tokenizer.decode
    opened, _ = chat_prompt(http)
    closed, _ = chat_prompt(http, add_generation_prompt=False)
    continued, message = chat_prompt(http, continue_final_message=True, echo=True)
    assert rendered(opened, skip_special_tokens=False) == "user: one</s>\nassistant: two</s>\nassistant: "
    assert opened[: len(closed)] == closed and rendered(opened[len(closed) :]) == "assistant: "
    assert rendered(continued, skip_special_tokens=False) == "user: one</s>\nassistant: two"
    assert message["role"] == "assistant" and message["content"].startswith("two")
    by_kwargs, _ = chat_prompt(http, chat_template_kwargs={"add_generation_prompt": False})
    assert by_kwargs == closed


@pytest.mark.parametrize("streams", [False, True])
def test_an_echo_comes_before_the_answer_of_the_same_role(http, streams):
    user = [{"role": "user", "content": [{"type": "text", "text": "one"}]}]

    def text_of(**fields):
        body = {"messages": user, **GREEDY, **fields}
        if not streams:
            return ask(http, CHAT, **body)["choices"][0]["message"]["content"]
        return "".join(event["choices"][0]["delta"]["content"] for event in stream(http, CHAT, **body))

    assert text_of(echo=True) == text_of()
    continued = {"continue_final_message": True}
    assert text_of(**continued, echo=True) == "one" + text_of(**continued)


def test_options_reach_the_template_and_no_others(http):
    plain, _ = chat_prompt(http)
    assert chat_prompt(http, chat_template_kwargs={"enable_thinking": False}, documents=[{"text": "x"}])[0] == plain
    for wrong in ({"tokenize": True}, {"chat_template": "x"}):
        body = {"messages": MESSAGES, "chat_template_kwargs": wrong}
        assert check_error(http.post(CHAT, json=body), 400)["param"] == "chat_template_kwargs"
    for field, value in (("documents", [{"text": 5}]), ("documents", {}), ("chat_template_kwargs", [])):
        if value:
            assert check_error(http.post(CHAT, json={"messages": MESSAGES, field: value}), 400)["param"] == field
    both = {"messages": MESSAGES, "add_generation_prompt": True, "continue_final_message": True}
    assert "continue_final_message" in check_error(http.post(CHAT, json=both), 400)["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_special_tokens_of_the_tokenizer_are_added_or_not(http, engine, path):
    text = "x" if path == COMPLETIONS else "user: one</s>\nassistant: two</s>\nassistant: "
    for added in (False, True):
        prompt = {"prompt": "x"} if path == COMPLETIONS else {"messages": MESSAGES}
        answer = ask(http, path, **prompt, max_tokens=1, **IDS, add_special_tokens=added)
        ids = (answer["choices"][0] if path == COMPLETIONS else answer)["prompt_token_ids"]
        assert ids == engine.tokenizer.encode(text, add_special_tokens=added)
