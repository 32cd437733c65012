"""Seeds, choices and draws, through the whole engine."""

from __future__ import annotations

import pytest

from rayserve_moe import Engine
from tests.support.engine.outputs import assert_same
from tests.support.engine.run_requests import Way, preempt_every, run_alone, run_together
from tests.support.engine.workload import request_for

PROMPT = list(range(20, 70))
SAMPLED = {"temperature": 1.0, "max_new_tokens": 30, "seed": 99}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("truncation", [{}, {"top_k": 20}, {"top_p": 0.8, "min_p": 0.01}], ids=str)
@pytest.mark.parametrize("way", [Way(), Way(num_rows=2, chunk_tokens=16), Way(intervene=preempt_every(4))])
def test_choice_0_of_several_is_the_choice_of_one(engine: Engine, truncation: dict, way: Way):
    one = request_for(PROMPT, "one", **SAMPLED, **truncation)
    four = request_for(PROMPT, "four", n=4, **SAMPLED, **truncation)
    alone = run_alone(engine.runner, engine.card, [one])["one", 0]
    choices = run_together(engine.runner, engine.card, [four], way=way)
    assert_same(choices["four", 0], alone)
    assert len({tuple(choice.ids) for choice in choices.values()}) == 4, "choices differ"


def test_greedy_choices_are_equal(engine: Engine):
    greedy = request_for(PROMPT, "greedy", n=4, max_new_tokens=20)
    choices = list(run_together(engine.runner, engine.card, [greedy]).values())
    for choice in choices[1:]:
        assert_same(choice, choices[0])


def test_one_seed_gives_one_answer_and_another_seed_another(engine: Engine):
    def draw(seed: int | None) -> list[int]:
        answer = engine.generate(input_ids=PROMPT, temperature=1.0, max_new_tokens=20, ignore_eos=True, seed=seed)
        return answer["output_ids"]

    assert draw(5) == draw(5)
    assert draw(5) != draw(5 + 2**32) and draw(4) == draw(5 + 2**32), "64 bits are folded to 32"
    assert len({tuple(draw(seed)) for seed in range(6)}) == 6
    assert draw(None) != draw(None), "a request without a seed draws one"


def test_choices_of_a_request_without_a_seed_differ(engine: Engine):
    answers = engine.generate(input_ids=PROMPT, temperature=1.0, max_new_tokens=32, ignore_eos=True, n=3)
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 3


def test_nearly_no_temperature_is_greedy(engine: Engine):
    greedy = engine.generate(input_ids=PROMPT, temperature=0.0, max_new_tokens=16, ignore_eos=True)
    cold = engine.generate(input_ids=PROMPT, temperature=1e-30, max_new_tokens=16, ignore_eos=True, return_logprob=True)
    assert cold["output_ids"] == greedy["output_ids"]
    assert [entry[0] for entry in cold["meta_info"]["output_token_logprobs"]] == [0.0] * 16


@pytest.mark.parametrize("top_k", [1, 2])
def test_top_k_bounds_what_is_sampled(engine: Engine, top_k: int):
    sampled = engine.generate(
        input_ids=PROMPT, temperature=5.0, top_k=top_k, max_new_tokens=1, n=40, seed=3, ignore_eos=True
    )
    assert len({answer["output_ids"][0] for answer in sampled}) == top_k
