"""When a choice may end, and what is told of its end: each route in its own system's language, and in process alike."""

from __future__ import annotations

import pytest

from tests.support.serving.http_client import COMPLETIONS, GENERATE, MODEL, ask, stream

PROMPT = [5, 6, 7, 8]
NUM_NEW, LEAST = 24, 12


@pytest.fixture(scope="module")
def free(engine):
    """Greedy, to its full length."""
    return engine.generate(input_ids=PROMPT, max_new_tokens=NUM_NEW, temperature=0, ignore_eos=True)


@pytest.fixture
def stop(free):
    """A stop string that the third token or one soon after it completes."""
    return free["text"][2:4]


def native(**sampling):
    named = {"max_new_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True, **sampling}
    return {"input_ids": PROMPT, "sampling_params": named}


def completed(http, **fields):
    greedy = {"max_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True}
    return ask(http, COMPLETIONS, model=MODEL, prompt=PROMPT, **greedy, **fields)


def test_log_probs_are_of_what_is_sampled_from(http, free):
    ending = {"stop_token_ids": free["output_ids"][:LEAST], "min_new_tokens": LEAST}
    body = native(max_new_tokens=LEAST, **ending)
    meta = ask(http, GENERATE, **body, return_logprob=True, top_logprobs_num=20)["meta_info"]
    for tops, (logprob, token_id, _) in zip(meta["output_top_logprobs"], meta["output_token_logprobs"], strict=True):
        assert tops[0][:2] == [logprob, token_id], "the likeliest of what is left is sampled"
        assert not {entry[1] for entry in tops} & set(ending["stop_token_ids"])


def test_stop_strings_wait_in_one_language_and_not_in_the_other(http, free, stop):
    trimmed = free["text"][: free["text"].index(stop)]
    assert ask(http, GENERATE, **native(stop=stop, min_new_tokens=LEAST))["text"] == trimmed
    answer = completed(http, stop=stop, min_tokens=LEAST)
    assert answer["usage"]["completion_tokens"] > LEAST and answer["choices"][0]["text"].startswith(trimmed + stop)


def test_what_ended_a_choice_is_text_where_that_is_asked_for(http, engine, free, stop):
    end = free["text"].index(stop) + len(stop)
    kept = completed(http, stop=stop, include_stop_str_in_output=True)["choices"][0]
    assert kept["text"] == free["text"][:end] and kept["finish_reason"] == "stop"
    for no_stop_trim in (True, False):
        body = native(stop=stop, no_stop_trim=no_stop_trim)
        answer = ask(http, GENERATE, **body)
        whole = engine.tokenizer.decode(answer["output_ids"])
        assert answer["text"] == (whole if no_stop_trim else free["text"][: end - len(stop)])
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        assert stream(http, GENERATE, **body)[-1]["text"] == answer["text"]
    by_id = {"stop_token_ids": free["output_ids"][4:5]}
    untrimmed, answer = (ask(http, GENERATE, **native(**by_id, no_stop_trim=kept)) for kept in (True, False))
    assert untrimmed["output_ids"] == answer["output_ids"]
    assert untrimmed["text"] == engine.tokenizer.decode(answer["output_ids"])
    assert answer["text"] == engine.tokenizer.decode(answer["output_ids"][:-1])


def test_the_engine_in_process_ends_as_the_route_does(http, engine, free, stop):
    for sampling in (
        {"stop_token_ids": free["output_ids"][:LEAST], "min_new_tokens": LEAST},
        {"stop": stop, "no_stop_trim": True, "min_new_tokens": 3},
    ):
        body = native(**sampling)
        ours, theirs = engine.generate(input_ids=PROMPT, **body["sampling_params"]), ask(http, GENERATE, **body)
        assert (ours["text"], ours["output_ids"]) == (theirs["text"], theirs["output_ids"])
