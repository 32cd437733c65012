"""Weights of every family change while an engine serves: those that come back answer as they did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayserve_moe import Engine
from rayserve_moe.checkpoints.synthetic import write_checkpoint
from rayserve_moe.checkpoints.synthetic_models import SyntheticModel
from rayserve_moe.model import families
from tests.support.engines import CORE
from tests.support.family_cases import FAMILY_CASES, FamilyCase

CASES = [
    pytest.param(case, id=case.name, marks=() if case.family == "gpt_oss" else pytest.mark.slow)
    for case in FAMILY_CASES
    if not case.variant
]
SPREAD: dict[str, Any] = {"devices_per_host": 4, "data_parallel_size": 2, "num_redundant_experts": 4}
PROMPTS = [list(range(3, 3 + length)) for length in (5, 40)]


@pytest.mark.parametrize("case", CASES)
def test_weights_that_come_back_answer_as_they_did(tmp_path: Path, case: FamilyCase):
    config = {**case.config, "architectures": [getattr(families, case.family).ARCHITECTURE], "vocab_size": 264}
    model = SyntheticModel(config, scale=0.2, norm_jitter=0.2)
    first, second = (write_checkpoint(tmp_path / str(seed), model, seed=seed, dtype="float32") for seed in (1, 2))
    with Engine(str(first), **CORE, **SPREAD) as engine:
        before = _answers(engine)
        assert engine.update_weights_from_disk(second).success
        changed = _answers(engine)
        assert engine.update_weights_from_disk(first).success
        assert _answers(engine) == before
    assert all(one["output_ids"] != other["output_ids"] for one, other in zip(before, changed, strict=True))


def _answers(engine: Engine) -> list[dict[str, Any]]:
    answers = engine.generate(
        input_ids=PROMPTS,
        ignore_eos=True,
        temperature=0.0,
        max_new_tokens=12,
        return_logprob=True,
        return_routed_experts=True,
    )
    return [
        {"output_ids": answer["output_ids"]}
        | {name: answer["meta_info"][name] for name in ("output_token_logprobs", "routed_experts")}
        for answer in answers
    ]
