"""Weights of every family change while an engine serves on four devices: those that come back, or are sent,
answer as they did from disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayserve_moe import Engine
from tests.pipelines.families.conftest import families
from tests.support.checkpoints.send_weights import send_weights
from tests.support.engine.shared_settings import CORE

pytestmark = [pytest.mark.slow, families()]

SPREAD: dict[str, Any] = {"devices_per_host": 4, "data_parallel_size": 2, "num_redundant_experts": 4}
PROMPTS = [list(range(3, 3 + length)) for length in (5, 40)]


def test_weights_that_come_back_or_are_sent_answer_as_they_did(
    core_checkpoint: Path, other_checkpoint: Path, kernel_settings: dict[str, str]
):
    with Engine(str(core_checkpoint), **CORE, **SPREAD, **kernel_settings) as engine:
        before = answers_of(engine)
        assert engine.update_weights_from_disk(other_checkpoint).success
        changed = answers_of(engine)
        assert engine.update_weights_from_disk(core_checkpoint).success
        assert answers_of(engine) == before
        send_weights(engine, other_checkpoint)
        assert answers_of(engine) == changed
    assert all(one["output_ids"] != other["output_ids"] for one, other in zip(before, changed, strict=True))


def answers_of(engine: Engine) -> list[dict[str, Any]]:
    """Ask for one prompt after the other: by XLA the last bit of a log-prob may depend on the rest of a batch."""
    answers = [
        engine.generate(
            input_ids=prompt,
            ignore_eos=True,
            temperature=0.0,
            max_new_tokens=12,
            return_logprob=True,
            return_routed_experts=True,
        )
        for prompt in PROMPTS
    ]
    return [
        {"output_ids": answer["output_ids"]}
        | {name: answer["meta_info"][name] for name in ("output_token_logprobs", "routed_experts")}
        for answer in answers
    ]
