"""How generation ends: stop ids, stop strings, the end of sequence, and streams that come to the same as answers."""

from __future__ import annotations

import asyncio

import pytest

from rayserve_moe import Engine, extract_routed_experts_from_meta_info
from tests.support.engine.outputs import Outcomes, assert_same, outcome_of_answer
from tests.support.engine.run_requests import run_alone
from tests.support.engine.workload import engine_arguments, mixed_workload, request_for

PROMPT = list(range(30, 60))
NUM_NEW = 24


@pytest.fixture(scope="module")
def free_run(engine: Engine) -> dict:
    """Greedy, to its full length."""
    return generate(engine)


def generate(engine: Engine, **sampling: object) -> dict:
    wanted = {"max_new_tokens": NUM_NEW, "temperature": 0, "ignore_eos": True, **sampling}
    answer = engine.generate(input_ids=PROMPT, return_logprob=True, return_routed_experts=True, **wanted)
    assert isinstance(answer, dict)
    return answer


def num_rows(answer: dict) -> int:
    return len(extract_routed_experts_from_meta_info(answer)) // 6


def test_a_stop_id_ends_after_its_first_occurrence(engine: Engine, free_run: dict):
    ids = free_run["output_ids"]
    for place in (0, 5, NUM_NEW - 1):
        stopped = generate(engine, stop_token_ids=[ids[place]])
        first = ids.index(ids[place])
        assert stopped["output_ids"] == ids[: first + 1]
        assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[place]}
        assert num_rows(stopped) == len(PROMPT) + first
        assert free_run["text"].startswith(stopped["text"])


def test_a_stop_string_ends_wherever_tokens_are_cut(engine: Engine, free_run: dict):
    text = free_run["text"]
    for first, last in ((3, 4), (10, 19), (len(text) // 2, len(text) // 2 + 12)):
        stop = text[first:last]
        stopped = generate(engine, stop=[stop])
        assert stopped["text"] == text[: text.index(stop)]
        assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        ids = stopped["output_ids"]
        assert ids == free_run["output_ids"][: len(ids)]
        assert num_rows(stopped) == len(PROMPT) + len(ids) - 1
        assert len(stopped["meta_info"]["output_token_logprobs"]) == len(ids)


def test_a_stop_string_that_never_comes_changes_nothing(engine: Engine, free_run: dict):
    unstopped = generate(engine, stop=["\x00\x01 never \x02"])
    assert unstopped["text"] == free_run["text"]
    assert unstopped["output_ids"] == free_run["output_ids"]


def test_the_end_of_sequence_ends_unless_ignored(engine: Engine):
    (eos,) = engine.card.eos_token_ids
    sampled = {"temperature": 3.0, "max_new_tokens": 400}
    for seed in range(40):
        ignored = generate(engine, seed=seed, **sampled)["output_ids"]
        assert len(ignored) == 400
        if eos in ignored:
            ended = generate(engine, seed=seed, ignore_eos=False, **sampled)
            assert ended["output_ids"] == ignored[: ignored.index(eos) + 1]
            assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": eos}
            return
    pytest.fail("no sample held the end of sequence")


def test_a_stream_comes_to_the_answer(engine: Engine, alone: Outcomes):
    for request in mixed_workload():
        if request.sampling.n == 1:
            *_, last = engine.generate_stream(**engine_arguments(request))
            assert_same(outcome_of_answer(last, engine.card.routing), alone[request.request_id, 0], index=False)


def test_a_stream_grows_token_by_token_and_brings_routing_at_its_end(engine: Engine, free_run: dict):
    seen = list(
        engine.generate_stream(
            input_ids=PROMPT, max_new_tokens=NUM_NEW, temperature=0, ignore_eos=True, return_routed_experts=True
        )
    )
    lengths = [len(answer["output_ids"]) for answer in seen]
    assert lengths == sorted(lengths) and lengths[-1] == NUM_NEW
    for answer in seen[:-1]:
        assert answer["meta_info"]["finish_reason"] is None
        assert "routed_experts" not in answer["meta_info"]
        assert free_run["text"].startswith(answer["text"])
    assert seen[-1]["text"] == free_run["text"]
    assert seen[-1]["meta_info"]["routed_experts"] == free_run["meta_info"]["routed_experts"]


def test_a_stream_of_several_choices_tells_them_apart(engine: Engine):
    sampled = {"input_ids": PROMPT, "n": 3, "seed": 6, "temperature": 1.0, "max_new_tokens": 10, "ignore_eos": True}
    latest: dict[int, list[int]] = {}
    for answer in engine.generate_stream(**sampled):
        latest[answer["index"]] = answer["output_ids"]
    assert [latest[index] for index in range(3)] == [answer["output_ids"] for answer in engine.generate(**sampled)]


def test_awaiting_comes_to_the_same(engine: Engine, alone: Outcomes):
    requests = [request for request in mixed_workload() if request.sampling.n == 1]

    async def run_all() -> list:
        return await asyncio.gather(*(engine.async_generate(**engine_arguments(request)) for request in requests))

    for request, answer in zip(requests, asyncio.run(run_all()), strict=True):
        assert_same(outcome_of_answer(answer, engine.card.routing), alone[request.request_id, 0], index=False)


def test_a_stream_that_is_left_is_aborted(engine: Engine):
    stream = engine.generate_stream(input_ids=PROMPT, max_new_tokens=400, temperature=0, ignore_eos=True)
    next(stream)
    stream.close()
    engine.loop.check_integrity()
    assert engine.loop.statistics()["requests_live"] == 0


def test_text_prompts_are_their_ids(engine: Engine):
    text = "Grüße, world"
    by_text = engine.generate(text, max_new_tokens=6, temperature=0)
    by_ids = engine.generate(input_ids=engine.tokenizer.encode(text), max_new_tokens=6, temperature=0)
    assert by_text["output_ids"] == by_ids["output_ids"]
    assert by_text["meta_info"]["prompt_tokens"] == len(engine.tokenizer.encode(text))


def test_sampling_parameters_stand_second_as_in_sglang(engine: Engine):
    text, sampled = "ab", {"max_new_tokens": 6, "temperature": 0}
    told = engine.generate(text, **sampled)["output_ids"]
    assert engine.generate(text, sampled)["output_ids"] == told
    assert [*engine.generate_stream(text, sampled)][-1]["output_ids"] == told
    assert asyncio.run(engine.async_generate(text, sampled))["output_ids"] == told


def test_the_longest_sequence_is_served_whole(engine: Engine):
    longest = engine.card.max_model_len
    wanted = request_for([5] * (longest - 3), max_new_tokens=3)
    outcome = run_alone(engine.runner, engine.card, [wanted])["r", 0]
    assert len(outcome.ids) == 3 and len(outcome.rows) == longest - 1
