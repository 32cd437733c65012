"""Fields of vLLM and SGLang: what ends an answer, what is kept of a prompt, lists per prompt."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from tests.support.serving.http_client import CHAT, COMPLETIONS, GENERATE, TOKENS, ask, check_error, stream

GREEDY = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}


LOGPROB_BOUND = 5e-6
"""By XLA in float32, which sums a row in another order in a program of another number of rows. docs/speculation.md
states 1e-6 and, as the largest exception, 4.5e-6. Native kernels change no bit: compare those with `==`."""


def assert_same_logprobs(actual, expected):
    """Assert that nested lists of [log-prob, token id, text] agree: log-probs to LOGPROB_BOUND, all else exactly."""
    if isinstance(expected, list):
        assert isinstance(actual, list) and len(actual) == len(expected), f"{actual} against {expected}"
        for one, other in zip(actual, expected, strict=True):
            assert_same_logprobs(one, other)
    elif isinstance(expected, float):
        assert isinstance(actual, float) and actual == pytest.approx(expected, rel=0, abs=LOGPROB_BOUND)
    else:
        assert actual == expected


@pytest.fixture
def plain(http):
    return ask(http, GENERATE, input_ids=[5, 6, 7], sampling_params=GREEDY)


def test_a_pattern_ends_an_answer_with_its_token(http, plain):
    text = plain["text"]
    middle = next(c for c in text[4:] if c.isascii() and c.isalnum() and c not in text[:3])
    sampling = {**GREEDY, "stop_regex": [f"[{middle}]", "never(x)"]}
    told = ask(http, GENERATE, input_ids=[5, 6, 7], sampling_params=sampling)
    assert told["text"] == text[: text.index(middle)]
    assert told["meta_info"]["finish_reason"] == {"type": "stop", "matched": f"[{middle}]"}
    assert told["output_ids"] == plain["output_ids"][: len(told["output_ids"])]
    kept = ask(http, GENERATE, input_ids=[5, 6, 7], sampling_params={**sampling, "no_stop_trim": True})
    assert kept["text"].startswith(text[: text.index(middle) + 1]) and kept["output_ids"] == told["output_ids"]
    events = stream(http, GENERATE, input_ids=[5, 6, 7], sampling_params=sampling)
    assert events[-1]["text"] == told["text"] and events[-1]["output_ids"] == told["output_ids"]


@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_that_repeats_itself_ends(http, streams):
    body = {"prompt": [5, 6], "max_tokens": 40, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body |= {"allowed_token_ids": [9], "repetition_detection": {"max_pattern_size": 3, "min_count": 4}}
    if streams:
        choices = [event["choices"][0] for event in stream(http, COMPLETIONS, **body) if event["choices"]]
        ids, finish = [i for choice in choices for i in choice["token_ids"]], choices[-1]["finish_reason"]
    else:
        (choice,) = ask(http, COMPLETIONS, **body)["choices"]
        ids, finish = choice["token_ids"], choice["finish_reason"]
    assert (ids, finish) == ([9] * 4, "repetition")
    of_tokens = {"max_tokens": 9, "allowed_token_ids": [9], "repetition_detection": {}}
    assert len(ask(http, TOKENS, token_ids=[5], sampling_params=of_tokens)["choices"][0]["token_ids"]) == 9


def test_long_prompts_are_cut_where_that_is_asked_for(http):
    body = {"max_tokens": 1, "return_token_ids": True, "temperature": 0}
    ids = list(range(5, 45))

    def kept(path=COMPLETIONS, **fields):
        told = ask(http, path, **body, **fields)
        return (told if path == CHAT else told["choices"][0])["prompt_token_ids"]

    assert kept(prompt=ids, truncate_prompt_tokens=7, truncation_side="left") == ids[-7:]
    assert kept(prompt=ids, truncate_prompt_tokens=7, truncation_side="right") == ids[:7]
    assert kept(prompt=ids, truncate_prompt_tokens=100) == ids
    assert len(kept(prompt="word " * 600, truncate_prompt_tokens=-1)) == 511
    messages = [{"role": "user", "content": "hello " * 200}]
    assert len(kept(CHAT, messages=messages, truncate_prompt_tokens=9)) == 9


def test_a_prompt_comes_back_as_text(http):
    told = ask(http, CHAT, messages=[{"role": "user", "content": "hé"}], max_tokens=1, return_prompt_text=True)
    assert "hé" in told["prompt_text"]
    assert "prompt_text" not in ask(http, CHAT, messages=[{"role": "user", "content": "x"}], max_tokens=1)


def test_each_prompt_of_a_batch_may_ask_for_other_log_probs(http):
    """A prompt in a batch and the same prompt alone run in programs of different sizes, which XLA sums differently."""
    prompts, sampling = [[5, 6, 7], [8, 9, 10], [11, 12]], {"max_new_tokens": 2, "temperature": 0}
    asked = {"return_logprob": [True, False, True], "logprob_start_len": [0, -1, 1], "top_logprobs_num": [2, 0, 0]}
    told = ask(http, GENERATE, input_ids=prompts, sampling_params=sampling, extra_key=["a", "b", ""], **asked)
    for place, (answer, prompt) in enumerate(zip(told, prompts, strict=True)):
        alone = {name: values[place] for name, values in asked.items()}
        one = ask(http, GENERATE, input_ids=prompt, sampling_params=sampling, **alone)
        assert answer["output_ids"] == one["output_ids"]
        for name in ("input_token_logprobs", "output_token_logprobs", "output_top_logprobs", "input_top_logprobs"):
            assert_same_logprobs(answer["meta_info"].get(name), one["meta_info"].get(name))
        assert ("output_token_logprobs" in answer["meta_info"]) == asked["return_logprob"][place]


def test_entries_of_log_probs_have_text_where_it_is_asked_for(http):
    asked = {"return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    told = ask(http, GENERATE, input_ids=[70, 71], sampling_params={"max_new_tokens": 3}, **asked)["meta_info"]
    assert all(isinstance(text, str) for _, _, text in told["output_token_logprobs"])
    assert all(isinstance(text, str) for likeliest in told["output_top_logprobs"] for _, _, text in likeliest)


def test_a_pause_may_wait_for_what_runs(http, engine, unhurried):
    answers = {}

    def generate(name):
        sampling = {"max_new_tokens": 24, "ignore_eos": True}
        answers[name] = ask(http, GENERATE, input_ids=[5, 6], sampling_params=sampling, rid=name)

    first = threading.Thread(target=generate, args=("first",))
    first.start()
    while not engine.loop.statistics()["requests_live"]:
        pass
    assert http.post("/pause", json={"mode": "wait"}).json() == {"status": "paused"}
    first.join()
    assert answers["first"]["meta_info"]["finish_reason"]["type"] == "length"
    second = threading.Thread(target=generate, args=("second",))
    second.start()
    assert http.post("/pause?wait_for_inflight_requests=true").json() == {"status": "paused"}
    http.post("/resume")
    second.join()
    assert answers["second"]["meta_info"]["finish_reason"]["type"] == "length"


def test_a_wrong_priority_is_refused_and_others_are_taken(http):
    for value in (-5, 0, 7):
        assert ask(http, GENERATE, input_ids=[5], sampling_params={"max_new_tokens": 1}, priority=value)
        assert ask(http, COMPLETIONS, prompt=[5], max_tokens=1, priority=value)
    assert check_error(http.post(COMPLETIONS, json={"prompt": [5], "priority": 1.5}), 400)["param"] == "priority"


def holds(ids, word):
    return any(ids[i : i + len(word)] == word for i in range(len(ids) - len(word) + 1))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("length", [1, 2, 3])
def test_a_bad_word_does_not_come(http, engine, length):
    encode = partial(engine.tokenizer.encode, add_special_tokens=False)
    letters = [token_id for letter in "abcdef" for token_id in encode(letter)]
    body = {"max_tokens": 24, "seed": 3, "ignore_eos": True, "allowed_token_ids": letters}
    by_text = {"prompt": [5, 6, 7], "return_token_ids": True, **body}
    (plain,) = ask(http, COMPLETIONS, **by_text)["choices"]
    ids = plain["token_ids"]
    word = plain["text"][5 : 5 + length]
    banned = encode(word)
    assert len(banned) == length and holds(ids, banned)
    (told,) = ask(http, COMPLETIONS, **by_text, bad_words=[word])["choices"]
    assert not holds(told["token_ids"], banned) and len(told["token_ids"]) == 24
    first = next(end for end in range(len(ids)) if holds(ids[: end + 1], banned))
    assert told["token_ids"][:first] == ids[:first], "before it nothing changes"
    events = stream(http, COMPLETIONS, **by_text, bad_words=[word])
    assert [i for event in events for choice in event["choices"] for i in choice["token_ids"]] == told["token_ids"]
    (by_ids,) = ask(http, TOKENS, token_ids=[5, 6, 7], sampling_params={**body, "bad_words": [word]})["choices"]
    assert by_ids["token_ids"] == told["token_ids"]


def test_an_answer_without_any_token_left_ends_with_an_error(http, engine):
    (only,) = engine.tokenizer.encode("a", add_special_tokens=False)
    (told,) = ask(http, COMPLETIONS, prompt=[5], max_tokens=4, allowed_token_ids=[only], bad_words=["a"])["choices"]
    assert told["finish_reason"] == "error" and told["text"] == ""
