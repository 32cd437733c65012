"""Log-probs over HTTP: of outputs, of prompts, of the likeliest tokens; scoring a text is generating it again."""

from __future__ import annotations

import math

import pytest

from tests.support.serving.http_client import CHAT, COMPLETIONS, GENERATE, TOKENS, ask, scored, stream

PROMPT = [*range(40, 75)]
GREEDY = {"temperature": 0, "ignore_eos": True}
NUM_NEW = 8
CLOSE = {"rel": 0, "abs": 1e-5}


@pytest.fixture
def generated(http):
    """A greedy answer in the native dialect, with its log-probs and three of the likeliest for each."""
    sampling = {**GREEDY, "max_new_tokens": NUM_NEW}
    return ask(http, GENERATE, input_ids=PROMPT, sampling_params=sampling, return_logprob=True, top_logprobs_num=3)


def values(entries):
    return [None if entry is None else entry[0] for entry in entries]


def test_a_greedy_token_is_the_likeliest_and_its_log_prob_the_same(generated):
    meta_info = generated["meta_info"]
    assert [top[0] for top in meta_info["output_top_logprobs"]] == meta_info["output_token_logprobs"]
    for top in meta_info["output_top_logprobs"]:
        assert len(top) == 3 and values(top) == sorted(values(top), reverse=True)
        assert all(math.isfinite(logprob) and logprob <= 0 for logprob in values(top))


@pytest.mark.parametrize("start", [-1, len(PROMPT)])
def test_without_a_start_nothing_of_the_prompt_is_told(http, start):
    sampling = {**GREEDY, "max_new_tokens": 1}
    asked = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": start}
    meta_info = ask(http, GENERATE, **asked, top_logprobs_num=3)["meta_info"]
    assert meta_info["input_token_logprobs"] == meta_info["input_top_logprobs"] == []
    assert len(meta_info["output_token_logprobs"]) == len(meta_info["output_top_logprobs"]) == 1


def known(entries):
    return [value for value in values(entries) if value is not None]


@pytest.mark.parametrize("start", [0, 1, len(PROMPT) - 1, len(PROMPT) + 3])
def test_scoring_an_output_gives_the_log_probs_it_had(http, generated, start):
    """From whichever position, and whether or not a prefix is cached."""
    text = PROMPT + generated["output_ids"]
    told = scored(http, text, start, top_logprobs_num=3)["meta_info"]
    entries, tops = told["input_token_logprobs"], told["input_top_logprobs"]
    assert [token_id for _, token_id, _ in entries] == text[start:]
    assert entries[0][0] is None and tops[0] is None and len(tops) == len(entries)
    both = max(start + 1, len(PROMPT))
    had = generated["meta_info"]
    assert values(entries[both - start :]) == pytest.approx(
        values(had["output_token_logprobs"][both - len(PROMPT) :]), **CLOSE
    )
    for ours, theirs in zip(tops[both - start :], had["output_top_logprobs"][both - len(PROMPT) :], strict=True):
        assert values(ours) == pytest.approx(values(theirs), **CLOSE)
    assert told["output_token_logprobs"] == told["output_top_logprobs"] == []


def test_a_stream_brings_the_prompt_s_log_probs_with_its_end(http):
    body = {
        "input_ids": PROMPT,
        "sampling_params": {**GREEDY, "max_new_tokens": 4, "n": 2},
        "return_logprob": True,
        "logprob_start_len": 3,
        "top_logprobs_num": 2,
    }
    whole = ask(http, GENERATE, **body)
    last = {event["index"]: event for event in stream(http, GENERATE, **body)}
    for index, answer in enumerate(whole):
        for name in ("input_token_logprobs", "output_token_logprobs"):
            ours, theirs = last[index]["meta_info"][name], answer["meta_info"][name]
            assert [token_id for _, token_id, _ in ours] == [token_id for _, token_id, _ in theirs]
            assert known(ours) == pytest.approx(known(theirs), **CLOSE)
        for name in ("input_top_logprobs", "output_top_logprobs"):
            assert len(last[index]["meta_info"][name]) == len(answer["meta_info"][name])
    assert len(whole[1]["meta_info"]["input_token_logprobs"]) == len(PROMPT) - 3


@pytest.mark.parametrize("max_tokens", [0, 1, NUM_NEW])
def test_echo_puts_the_prompt_before_the_completion(http, generated, max_tokens):
    text = PROMPT + generated["output_ids"]
    (choice,) = ask(http, COMPLETIONS, prompt=text, max_tokens=max_tokens, echo=True, logprobs=1, **GREEDY)["choices"]
    logprobs = choice["logprobs"]
    assert {len(column) for column in logprobs.values()} == {len(text) + max_tokens}
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][len(PROMPT) : len(text)] == pytest.approx(
        values(generated["meta_info"]["output_token_logprobs"]), **CLOSE
    )
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert "\N{REPLACEMENT CHARACTER}" in token or choice["text"].startswith(token, offset)
    plain = ask(http, COMPLETIONS, prompt=text, max_tokens=max_tokens, logprobs=1, **GREEDY)["choices"][0]
    assert choice["text"].endswith(plain["text"]) and choice["finish_reason"] == plain["finish_reason"]


def test_whether_a_text_is_the_greedy_one_is_told_by_its_log_probs(http, generated):
    """As lm-eval decides it: a token is the greedy one where nothing in `top_logprobs` is likelier."""
    other = [*generated["output_ids"][:-1], (generated["output_ids"][-1] + 1) % 512]
    prompts = [PROMPT + generated["output_ids"], PROMPT + other]
    choices = ask(http, COMPLETIONS, prompt=prompts, max_tokens=1, echo=True, logprobs=1, seed=1234, temperature=0)
    is_greedy = []
    for choice in choices["choices"]:
        own = choice["logprobs"]["token_logprobs"][len(PROMPT) : -1]
        tops = choice["logprobs"]["top_logprobs"][len(PROMPT) : -1]
        is_greedy.append(all(value == max(top.values()) for value, top in zip(own, tops, strict=True)))
    assert is_greedy == [True, False]


@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("stop", [None, "\x00\x01"])
def test_an_echoed_stream_adds_up_to_the_whole_answer(http, logprobs, stop):
    asked = {
        "prompt": [PROMPT, [9]],
        "n": 2,
        "max_tokens": 5,
        "echo": True,
        "logprobs": logprobs,
        "stop": stop,
        **GREEDY,
    }
    whole = ask(http, COMPLETIONS, **asked)["choices"]
    texts, columns = [""] * 4, [[] for _ in range(4)]
    for event in stream(http, COMPLETIONS, **asked):
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
        if logprobs is not None:
            columns[choice["index"]] += choice["logprobs"]["text_offset"]
    assert texts == [choice["text"] for choice in whole]
    if logprobs is not None:
        assert columns == [choice["logprobs"]["text_offset"] for choice in whole]


def test_echo_gives_a_text_back_as_it_came(http):
    text = "for é \N{GRINNING FACE} all: "
    (choice,) = ask(http, COMPLETIONS, prompt=text, max_tokens=0, echo=True)["choices"]
    assert choice["text"] == text and choice["logprobs"] is None


def test_chat_lists_the_likeliest(http):
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "logprobs": True, "temperature": 0}
    (choice,) = ask(http, CHAT, **asked, top_logprobs=20)["choices"]
    for entry in choice["logprobs"]["content"]:
        assert len(entry["top_logprobs"]) == 20
        assert entry["top_logprobs"][0] == {name: entry[name] for name in ("token", "logprob", "bytes")}
    (plain,) = ask(http, CHAT, **asked)["choices"]
    assert [entry["top_logprobs"] for entry in plain["logprobs"]["content"]] == [[]] * 4


def test_token_answers_name_tokens_by_their_ids(http, generated):
    sampling = {**GREEDY, "max_tokens": NUM_NEW}
    answers = [
        ask(http, TOKENS, token_ids=PROMPT, sampling_params={**sampling, **extra})["choices"][0]
        for extra in ({}, {"logprobs": 1}, {"logprobs": 3})
    ]
    assert answers[0]["logprobs"] is None
    had = generated["meta_info"]
    for answer in answers[1:]:
        for entry, (value, token_id, _) in zip(
            answer["logprobs"]["content"], had["output_token_logprobs"], strict=True
        ):
            assert list(entry) == ["token", "token_id", "logprob", "rank", "top_logprobs"]
            assert (entry["token"], entry["token_id"], entry["rank"]) == (f"token_id:{token_id}", token_id, 1)
            assert entry["logprob"] == pytest.approx(value, **CLOSE)
    assert [entry["top_logprobs"] for entry in answers[1]["logprobs"]["content"]] == [[]] * NUM_NEW
    tops = [[entry["token"] for entry in one["top_logprobs"]] for one in answers[2]["logprobs"]["content"]]
    assert tops == [[f"token_id:{token_id}" for _, token_id, _ in top] for top in had["output_top_logprobs"]]


@pytest.mark.parametrize("num_top", [0, 2])
def test_token_answers_score_the_prompt(http, num_top):
    entries = scored(http, PROMPT)["meta_info"]["input_token_logprobs"]
    answer = ask(http, TOKENS, token_ids=PROMPT, sampling_params={"max_tokens": 0, "prompt_logprobs": num_top})
    scores = answer["prompt_logprobs"]
    assert len(scores) == len(PROMPT) and scores[0] is None
    for token_id, score, entry in zip(PROMPT[1:], scores[1:], entries[1:], strict=True):
        own, *others = score.values()
        assert next(iter(score)) == str(token_id) and own["logprob"] == pytest.approx(entry[0], **CLOSE)
        assert len(others) == num_top - (own["rank"] <= num_top)
        assert [one["rank"] for one in others] == [rank for rank in range(1, num_top + 1) if rank != own["rank"]]
        assert all((one["logprob"] >= own["logprob"]) == (one["rank"] < own["rank"]) for one in others)


def distribution_after(http, token_ids):
    """Log-probs of every token of the vocabulary after `token_ids`, as listed ids."""
    sampling, found = {"max_new_tokens": 1, "temperature": 1, "ignore_eos": True}, []
    for first in range(0, 512, 128):
        asked = {"input_ids": token_ids, "sampling_params": sampling, "return_logprob": True}
        answer = ask(http, GENERATE, **asked, token_ids_logprob=[*range(first, first + 128)])
        found += [value for value, *_ in answer["meta_info"]["output_token_ids_logprobs"][0]]
    return found


def check_rank(told, token_id, distribution):
    """What lies closer than the precision of a batch may stand on either side."""
    own = distribution[token_id]
    assert told["logprob"] == pytest.approx(own, **CLOSE)
    least = 1 + sum(value > own + 1e-5 for value in distribution)
    assert least <= told["rank"] <= sum(value >= own - 1e-5 for value in distribution)


def test_ranks_count_the_likelier_tokens(http):
    """Of the prompt and of sampled tokens, in the whole vocabulary and whatever number of others is told."""
    start = PROMPT[:3]
    distribution = distribution_after(http, start)
    for token_id in (0, 7, 300, 511):
        for num_top in (0, 5):
            sampling = {"max_tokens": 0, "prompt_logprobs": num_top}
            scores = ask(http, TOKENS, token_ids=[*start, token_id], sampling_params=sampling)["prompt_logprobs"]
            check_rank(next(iter(scores[-1].values())), token_id, distribution)
    sampling = {"max_tokens": 1, "temperature": 1, "n": 16, "seed": 5, "logprobs": 3, "ignore_eos": True}
    told = [choice["logprobs"]["content"][0] for choice in
            ask(http, TOKENS, token_ids=start, sampling_params=sampling)["choices"]]  # fmt: skip
    assert len({entry["rank"] for entry in told}) > 4
    for entry in told:
        check_rank(entry, entry["token_id"], distribution)
        first, *others = entry["top_logprobs"]
        assert first == {name: entry[name] for name in first} and len(others) == 2
        assert [one["rank"] for one in others] == [rank for rank in (1, 2, 3) if rank != entry["rank"]][:2]


def test_an_end_of_sequence_has_one_name_of_two(http, engine):
    """Under the names of both systems; the model's own end of sequence is told by SGLang's name alone."""
    (end,) = engine.card.eos_token_ids
    ended = {"max_tokens": 9, "temperature": 0, "logit_bias": {str(end): 100}}
    (choice,) = ask(http, COMPLETIONS, prompt=PROMPT, **ended)["choices"]
    (last,) = stream(http, COMPLETIONS, prompt=PROMPT, **ended)[-1]["choices"]
    for told in (choice, last):
        assert (told["stop_reason"], told["matched_stop"]) == (None, end)


@pytest.mark.parametrize("temperature", [1e-30, 1e-37, 1e-38, 1e-320, 100])
@pytest.mark.parametrize("repetition_penalty", [0.001, 100])
def test_log_probs_are_finite_at_the_edges(http, temperature, repetition_penalty):
    sampling = {"temperature": temperature, "repetition_penalty": repetition_penalty, "max_new_tokens": 4}
    sampling |= {"logit_bias": {"7": 100, "8": -100}, "ignore_eos": True}
    meta_info = ask(
        http, GENERATE, input_ids=PROMPT, sampling_params=sampling, return_logprob=True, top_logprobs_num=20
    )["meta_info"]
    assert all(map(math.isfinite, values(meta_info["output_token_logprobs"])))
    assert all(math.isfinite(logprob) for top in meta_info["output_top_logprobs"] for logprob in values(top))


def test_the_best_samples_of_each_prompt_are_the_likeliest_ones(http):
    asked = {"prompt": [[5, 6], PROMPT], "max_tokens": 6, "seed": 3, "temperature": 1, "logprobs": 0}
    every = ask(http, COMPLETIONS, **asked, n=4)
    best = ask(http, COMPLETIONS, **asked, n=2, best_of=4, return_token_ids=True)

    def likelihood(choice):
        return sum(choice["logprobs"]["token_logprobs"]) / len(choice["logprobs"]["token_logprobs"])

    expected = []
    for samples in (every["choices"][:4], every["choices"][4:]):
        expected += sorted(samples, key=likelihood, reverse=True)[:2]
    assert [choice["text"] for choice in best["choices"]] == [choice["text"] for choice in expected]
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert [choice["prompt_token_ids"] for choice in best["choices"]] == [[5, 6]] * 2 + [PROMPT] * 2
    assert best["usage"]["completion_tokens"] == every["usage"]["completion_tokens"], "all were generated"
    unasked = {name: value for name, value in asked.items() if name != "logprobs"}
    assert ask(http, COMPLETIONS, **unasked, best_of=4)["choices"][0]["text"] == expected[0]["text"]
