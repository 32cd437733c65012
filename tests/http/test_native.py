"""`/generate`: single, batch and stream agree with each other and with the in-process engine."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor

PROMPT = [5, 6, 7, 8]
GREEDY = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 6}


def generate(http, **body):
    answer = http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(http, **body):
    with http.stream("POST", "/generate", json={**body, "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def without_time(answer):
    meta_info = {name: value for name, value in answer["meta_info"].items() if name not in ("e2e_latency", "id")}
    return {**answer, "meta_info": meta_info}


def test_a_single_answer_has_everything_clients_need(http):
    answer = generate(http, input_ids=PROMPT, sampling_params=GREEDY, return_logprob=True, rid="mine")
    meta_info = answer["meta_info"]
    assert meta_info["id"] == "mine"
    assert meta_info["finish_reason"] == {"type": "length", "length": 6}
    assert (meta_info["prompt_tokens"], meta_info["completion_tokens"], meta_info["cached_tokens"]) == (4, 6, 0)
    assert meta_info["e2e_latency"] > 0 and meta_info["weight_version"] == "0"
    assert [token_id for _, token_id, _ in meta_info["output_token_logprobs"]] == answer["output_ids"]
    assert all(math.isfinite(logprob) and nothing is None for logprob, _, nothing in meta_info["output_token_logprobs"])
    assert "routed_experts" not in meta_info


def test_a_batch_is_its_single_requests(http):
    texts = ["one", "another one", "three"]
    batch = generate(http, text=texts, sampling_params=GREEDY, return_routed_experts=True, rid="batch")
    singles = [generate(http, text=text, sampling_params=GREEDY, return_routed_experts=True) for text in texts]
    assert [without_time(answer) for answer in batch] == [without_time(answer) for answer in singles]
    assert [answer["meta_info"]["id"] for answer in batch] == ["batch_0", "batch_1", "batch_2"]


def test_sampling_params_may_differ_within_a_batch(http):
    limits = [1, 5, 0]
    params = [{**GREEDY, "max_new_tokens": limit, "n": 1 + (limit == 5)} for limit in limits]
    answers = generate(http, input_ids=[PROMPT, PROMPT, PROMPT], sampling_params=params)
    assert [len(answer["output_ids"]) for answer in answers] == [1, 5, 5, 0]


def test_a_batch_of_one_is_a_list_and_n_makes_a_list(http):
    assert len(generate(http, input_ids=[PROMPT], sampling_params=GREEDY)) == 1
    first, second = generate(http, input_ids=PROMPT, sampling_params={**GREEDY, "n": 2})
    assert first["output_ids"] == second["output_ids"]


def test_events_of_several_choices_carry_their_index(http):
    whole = generate(http, input_ids=[PROMPT, [9]], sampling_params={**GREEDY, "n": 2})
    last = {
        event["index"]: event for event in events(http, input_ids=[PROMPT, [9]], sampling_params={**GREEDY, "n": 2})
    }
    assert [last[index]["output_ids"] for index in range(4)] == [answer["output_ids"] for answer in whole]


def test_the_engine_in_process_gives_the_same_answer(http, engine):
    ours = engine.generate(input_ids=PROMPT, sampling_params=GREEDY, return_logprob=True, return_routed_experts=True)
    theirs = generate(http, input_ids=PROMPT, sampling_params=GREEDY, return_logprob=True, return_routed_experts=True)
    assert without_time(ours) == without_time(theirs)


def test_null_means_not_given(http):
    plain = generate(http, input_ids=PROMPT, sampling_params=GREEDY)
    nulls = generate(
        http,
        text=None,
        input_ids=PROMPT,
        sampling_params={**GREEDY, "stop": None, "top_p": None},
        rid=None,
        stream=None,
    )
    assert without_time(plain) == without_time(nulls)


def test_requests_at_the_same_time_do_not_mix(http):
    bodies = [
        {"input_ids": [position, position + 1], "sampling_params": {**GREEDY, "n": 1 + position % 3}}
        for position in range(5, 25)
    ]

    def streamed_or_whole(position):
        body = bodies[position]
        if position % 2:
            return generate(http, **body)
        last = {event.pop("index", 0): event for event in events(http, **body)}
        return [last[choice] for choice in sorted(last)] if len(last) > 1 else last[0]

    def ids(answer):
        return [choice["output_ids"] for choice in (answer if isinstance(answer, list) else [answer])]

    alone = [ids(generate(http, **body)) for body in bodies]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(streamed_or_whole, range(len(bodies))))
    assert [ids(answer) for answer in together] == alone
