"""Adapters beside the weights answer as checkpoints with merged weights, for every family, on one device and two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayserve_moe import Engine
from tests.pipelines.families.conftest import families
from tests.support.checkpoints.adapters import MadeAdapter, make_adapter_beside
from tests.support.engine.run_requests import tolerance_of
from tests.support.engine.shared_settings import CORE

pytestmark = [pytest.mark.slow, families()]
PROMPTS = [list(range(3, 3 + length)) for length in (5, 40)]


@pytest.mark.parametrize("num_devices", [1, 2])
def test_an_adapter_beside_the_weights_answers_as_its_merged_checkpoint(
    core_checkpoint: Path, kernel_settings: dict[str, str], is_native: bool, tmp_path: Path, num_devices: int
):
    """Compare in float32: equal ids and routing, and log-probs of prompts and outputs within the model's bound."""
    if is_native:
        pytest.skip("merged weights are rounded to bfloat16")
    with Engine(
        str(core_checkpoint), **CORE, **kernel_settings, devices_per_host=num_devices, max_loras=2, max_lora_rank=4
    ) as engine:
        made = [make_adapter_beside(core_checkpoint, seed=seed, rank=rank) for seed, rank in ((1, 4), (2, 3))]
        check_merged(engine, made, core_checkpoint, tmp_path)


def check_merged(engine: Engine, made: list[MadeAdapter], checkpoint: Path, tmp_path: Path) -> None:
    """Check that adapters answer as merged checkpoints, and that the base model's answers do not change.

    Ids and rows are equal, and log-probs are within 1e-5, or within the bound of models with recurrent layers. The
    engine ends with the last merged checkpoint.
    """
    for number, adapter in enumerate(made):
        outcome = engine.load_lora_adapter(adapter.write(tmp_path / f"{number}"), lora_name=f"a{number}")
        assert outcome.success, outcome.message
    base = answers_of(engine, None)
    ours = [answers_of(engine, f"a{number}") for number in range(len(made))]
    assert answers_of(engine, None) == base
    bound = tolerance_of(engine.runner)
    for number, adapter in enumerate(made):
        merged = adapter.write_merged(checkpoint, tmp_path / f"merged {number}")
        assert engine.update_weights_from_disk(merged).success
        wanted = answers_of(engine, None)
        for (ids, logprobs, rows), (wanted_ids, wanted_logprobs, wanted_rows) in zip(ours[number], wanted, strict=True):
            assert ids == wanted_ids and rows == wanted_rows
            np.testing.assert_allclose(logprobs, wanted_logprobs, atol=bound, rtol=0)
        assert any(largest(wanted[place][1], base[place][1]) > 100 * bound for place in range(len(PROMPTS)))


def largest(logprobs: list[float], others: list[float]) -> float:
    """Return the largest difference of log-probs."""
    return float(np.abs(np.subtract(logprobs, others)).max())


def answers_of(engine: Engine, name: str | None) -> list[tuple[Any, ...]]:
    """Answer prompts one by one; return ids, log-probs of prompt and outputs, and rows."""
    found = []
    for prompt in PROMPTS:
        answer = engine.generate(
            input_ids=prompt,
            lora_path=name,
            ignore_eos=True,
            temperature=0.0,
            max_new_tokens=12,
            return_logprob=True,
            logprob_start_len=0,
            return_routed_experts=True,
        )
        assert isinstance(answer, dict)
        meta = answer["meta_info"]
        logprobs = [row[0] for row in (*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"])]
        found.append((answer["output_ids"], logprobs, meta["routed_experts"]))
    return found
