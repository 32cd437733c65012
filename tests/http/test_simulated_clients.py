"""The client that plays conversations to a served fleet sees every token, and what was cached."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.simulation import calibrate
from benchmarks.simulation.client import play, stream
from benchmarks.simulation.workloads import Conversation, Turn
from tests.support.models.core import PAGE_SIZE


def test_conversations_go_on_from_their_answers(url, engine):
    address = (url.split("/")[2].split(":")[0], int(url.rsplit(":", 1)[1]))
    turns = (Turn(((1, 40),), 6), Turn(((2, 20),), 5, 0.01))
    seen = asyncio.run(play(address, [Conversation(0.0, turns)], vocab_size=engine.card.vocab_size, num_replicas=1))
    first, second = seen.asked
    assert (first.num_given, second.num_given) == (40, 66)
    assert second.num_cached == 45 // PAGE_SIZE * PAGE_SIZE
    assert 0 < first.arrived_at < first.first_at < first.last_at < second.arrived_at
    assert seen.figures(ttft_s=600.0, tpot_s=600.0)["good_share"] == 1.0


def test_step_times_are_fitted_from_streams(url, engine, monkeypatch):
    monkeypatch.setattr(calibrate, "ANSWER_TOKENS", 16)
    address = (url.split("/")[2].split(":")[0], int(url.rsplit(":", 1)[1]))
    sizes = {"streams": (1, 4), "prompts": (8, 32, 64), "repeats": 1}
    times = asyncio.run(calibrate.calibrate(address, [address], vocab_size=engine.card.vocab_size, **sizes))
    assert times.step_s + times.row_s > 0 and times.request_s >= 0 and times.prompt_s >= 0


def test_errors_of_a_stream_are_not_taken_for_answers(url):
    address = (url.split("/")[2].split(":")[0], int(url.rsplit(":", 1)[1]))
    with pytest.raises(RuntimeError, match="400"):
        asyncio.run(stream(address, [-5], num_answer=4))
