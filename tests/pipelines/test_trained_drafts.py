"""Drafts of a trained head, of which many are right: steps that follow on them before that is known change nothing."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from examples.calculator.problems import MIX, draw
from rayserve_moe import Engine
from rayserve_moe.engine.speculation.model_drafts import ModelProposer
from rayserve_moe.requests.records import GenerationRequest
from tests.support.engine.run_requests import Way, cycle_for, preempt_every, run_on, run_together, speculation_of
from tests.support.engine.workload import request_for
from tests.support.speculation.random_requests import assert_unchanged

HEAD = Path(__file__).resolve().parents[2] / "benchmarks" / "heads" / "calculator-eagle3"
SETTINGS = {
    "max_running_requests": 4,
    "precompile_bs_paddings": [4],
    "max_step_tokens": 64,
    "page_size": 16,
    "num_pages": 60,
    "max_model_len": 96,
    "enable_return_routed_experts": True,
    "speculative_algorithm": "EAGLE3",
    "speculative_draft_model_path": str(HEAD),
    "speculative_num_steps": 3,
}
WAY = Way(num_rows=4, step_tokens=64, chunk_tokens=64, num_pages=60)


def requests() -> list[GenerationRequest]:
    """Problems, greedy and sampled, with penalties, several answers, and answers that go on behind their ends."""
    generator, found = random.Random(3), []
    for number in range(24):
        prompt = list(draw(MIX[number % len(MIX)][0], generator, held_out=True).prompt.encode())
        penalties = {"frequency_penalty": 0.4, "repetition_penalty": 1.2} if number % 5 == 0 else {}
        ends = {"max_new_tokens": generator.randint(1, 40), "ignore_eos": number % 3 == 0, "n": 1 + number % 4 // 3}
        sampling = {"temperature": (0.0, 0.7, 1.0)[number % 3], "seed": number, **penalties, **ends}
        found.append(request_for(prompt, f"{number}", **sampling))
    return found


@pytest.mark.slow
def test_right_drafts_that_are_not_known_yet_do_not_show():
    with Engine(model_path="trained:calculator", **SETTINGS) as engine:
        plain = run_together(engine.runner, engine.card, requests(), way=WAY)
        for more in ({}, {"intervene": preempt_every(7)}, {"num_pages": 16, "chunk_tokens": 5}, {"overlaps": False}):
            way = replace(WAY, proposer=ModelProposer("head"), num_drafts=3, **more)
            cycle = cycle_for(engine.runner, engine.card, way)
            found = run_on(cycle, engine.card, requests(), intervene=way.intervene)
            cycle.scheduler.flush()
            assert_unchanged(engine, found, plain)
            totals = speculation_of(cycle).totals
            assert totals.accepted > totals.drafted / 20
