"""Conversations played with routing turn by turn are the same conversations, and pieces that do not fit are refused."""

from __future__ import annotations

import copy

import pytest

from benchmarks.delta_turns import ANSWER_TOKENS, NEW_PROMPT_TOKENS, SIDES, check_same, check_spliced, play
from rayserve_moe.inprocess.engine import Engine

SIZES = {"num_conversations": 2, "num_turns": 3, "seed": 1}


@pytest.mark.slow
def test_pieces_of_turns_are_the_rows_of_the_whole(engine: Engine) -> None:
    delta, whole = (play(engine, SIDES[name], **SIZES) for name in ("delta", "whole"))
    check_same({"off": whole.histories, "delta": delta.histories})
    assert [len(history) for history in delta.histories] == [3 * (NEW_PROMPT_TOKENS + ANSWER_TOKENS)] * 2
    check_spliced(delta.answers, whole.answers[-1])
    assert play(engine, SIDES["unasked"], **SIZES).answers == []


def test_pieces_that_are_not_its_routing_are_refused(engine: Engine) -> None:
    delta, whole = (play(engine, SIDES[name], **SIZES) for name in ("delta", "whole"))
    swapped = copy.deepcopy(delta.answers)
    swapped[1][0], swapped[1][1] = swapped[1][1], swapped[1][0]
    with pytest.raises(RuntimeError, match="conversation 0"):
        check_spliced(swapped, whole.answers[-1])
    with pytest.raises(RuntimeError, match="delta differ"):
        check_same({"off": whole.histories, "delta": [whole.histories[0], []]})
