"""Choices of a seed asked for in parts are the choices of the whole."""

from __future__ import annotations

import pytest

from rayserve_moe import Engine
from rayserve_moe.requests.records import RequestError

PROMPT = list(range(40, 60))
SAMPLING = {"max_new_tokens": 10, "temperature": 1.0, "sampling_seed": 3, "ignore_eos": True}


def test_parts_make_up_the_whole(engine: Engine) -> None:
    whole = engine.generate(input_ids=PROMPT, n=5, **SAMPLING)
    parts = [
        *engine.generate(input_ids=PROMPT, n=2, **SAMPLING),
        engine.generate(input_ids=PROMPT, first_choice=2, **SAMPLING),
        *engine.generate(input_ids=PROMPT, n=2, first_choice=3, **SAMPLING),
    ]
    assert [answer["output_ids"] for answer in parts] == [answer["output_ids"] for answer in whole]
    assert len({tuple(answer["output_ids"]) for answer in whole}) == 5


@pytest.mark.parametrize("wrong", [-1, 2**31])
def test_numbers_out_of_range_are_refused(engine: Engine, wrong: int) -> None:
    with pytest.raises(RequestError, match="first_choice"):
        engine.generate(input_ids=PROMPT, first_choice=wrong, **SAMPLING)
