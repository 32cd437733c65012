"""Distributions that an engine sampled from, computed over whole rollouts at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from examples.rollouts import Size, sample, serve, served_distributions
from tests.support.engine.outputs import LOGPROB_TOLERANCE, RECURRENT_TOLERANCE
from tests.support.models.families import FAMILY_CASES, write_family

SIZE = Size(num_prompts=3, prompt_len=50, num_new_tokens=30)
"""A rollout passes 64 tokens, at which recurrent layers write an entry."""
CASES = [
    pytest.param(case, id=case.name, marks=() if case.name == "qwen3_5_moe_text-0" else pytest.mark.slow)
    for case in FAMILY_CASES
    if case.name in ("qwen3_5_moe_text-0", "qwen3_next-1", "gpt_oss-0")
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_whole_rollout_has_the_log_probs_that_were_sampled_with(case, tmp_path: Path):
    checkpoint = write_family(case, tmp_path / case.name, seed=5)
    with serve(checkpoint, dtype="float32", size=SIZE) as llm:
        rollouts = sample(llm, SIZE, seed=0)
        served = served_distributions(llm.engine.runner, longest=SIZE.prompt_len + SIZE.num_new_tokens)
        pairs = zip(rollouts.fed_ids, rollouts.rows, strict=True)
        logprobs = np.stack([served(ids, rows)[SIZE.prompt_len - 1 :] for ids, rows in pairs])
    of_samples = np.take_along_axis(logprobs, rollouts.sampled_ids[..., None], axis=-1)[..., 0]
    tolerance = LOGPROB_TOLERANCE if case.family == "gpt_oss" else RECURRENT_TOLERANCE
    np.testing.assert_allclose(of_samples, rollouts.logprobs, rtol=0, atol=tolerance)
    assert np.ptp(of_samples) > 1, "the samples do not differ"
