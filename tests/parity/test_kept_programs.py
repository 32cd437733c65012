"""Programs that a start finds on disk answer as those that it would compile: the same tokens, log-probs and rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rayserve_moe import Engine
from tests.parity import comparison
from tests.parity.cases import NUM_NEW_TOKENS, ParityCase, load_golden, prompts_of

SETTINGS = {
    "enable_return_routed_experts": True,
    "dtype": "float32",
    "max_running_requests": 8,
    "num_pages": 256,
    "max_step_tokens": 128,
    "precompile_bs_paddings": [8],
    "structured_output": False,
}
SAID = ("output_token_logprobs", "routed_experts", "routed_experts_info")


def answers_one_by_one(engine: Engine, case: ParityCase) -> list[dict[str, Any]]:
    """Greedy continuations; prompts that come together meet in other steps each time, and float32 shows it."""
    sampling = {"max_new_tokens": NUM_NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    shown = {"return_routed_experts": True, "return_logprob": True}
    return [engine.generate(input_ids=prompt, sampling_params=sampling, **shown) for prompt in prompts_of(case)]


@pytest.mark.slow
@pytest.mark.usefixtures("programs_as_for_users")
def test_loaded_programs_answer_as_fresh_ones(case: ParityCase, checkpoint: Path, tmp_path: Path) -> None:
    answers, found = [], []
    for _ in range(2):
        with Engine(model_path=str(checkpoint), compile_cache=str(tmp_path), **SETTINGS) as engine:
            report = engine.loop.start_report
            found.append((report.num_programs_found, report.num_programs))
            answers.append(answers_one_by_one(engine, case))
    assert found == [(0, report.num_programs), (report.num_programs, report.num_programs)]
    fresh, loaded = answers
    assert [each["output_ids"] for each in loaded] == [each["output_ids"] for each in fresh]
    for one, other in zip(loaded, fresh, strict=True):
        assert {name: one["meta_info"][name] for name in SAID} == {name: other["meta_info"][name] for name in SAID}
    comparison.assert_same_ids(load_golden(case), loaded)
