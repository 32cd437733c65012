"""An adapter that is merged while an engine serves answers as a checkpoint with the merged weights, for every family
and layout, on four devices with redundant experts; unloading brings the first answers back to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayserve_moe import Engine
from tests.pipelines.families.conftest import families
from tests.pipelines.families.test_weights import SPREAD, answers_of
from tests.support.checkpoints.adapters import LAYOUTS, make_adapter
from tests.support.engine.shared_settings import CORE
from tests.support.models.families import FamilyCase

pytestmark = [pytest.mark.slow, families()]
WITHOUT_GATE = ("per_expert", "shared_outer")
"""Layouts of experts without gates. The other layouts hold gate and up together."""


def test_a_merged_adapter_answers_as_its_checkpoint_and_unloads_to_the_bit(
    core_checkpoint: Path, case: FamilyCase, kernel_settings: dict[str, str], tmp_path: Path
):
    with Engine(str(core_checkpoint), **CORE, **SPREAD, **kernel_settings) as engine:
        before = answers_of(engine)
        for seed, layout in enumerate(WITHOUT_GATE if case.family == "nemotron_h" else LAYOUTS):
            made = make_adapter(core_checkpoint, layout, seed=seed)
            assert engine.update_weights_from_disk(made.write_merged(core_checkpoint, tmp_path / layout)).success
            wanted = answers_of(engine)
            assert engine.update_weights_from_disk(core_checkpoint).success
            outcome = engine.load_lora_adapter(made.write(tmp_path / f"adapter-{layout}"), lora_name=layout)
            assert outcome.success, outcome.message
            assert outcome.max_rounding is not None and outcome.max_rounding > 0
            _assert_alike(answers_of(engine), wanted)
            assert np.abs(np.subtract(_logprobs(before), _logprobs(wanted))).max() > 1e-3, "the adapter changes answers"
        assert engine.unload_lora_adapter(layout).success
        assert answers_of(engine) == before


def _logprobs(answers: list[dict[str, Any]]) -> list[list[float]]:
    return [[row[0] for row in answer["output_token_logprobs"]] for answer in answers]


def _assert_alike(ours: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Tokens and rows are equal, and log-probs within 1e-5: sums of adapters are rounded to the dtype of files."""
    for one, other in zip(ours, wanted, strict=True):
        assert one["output_ids"] == other["output_ids"]
        assert one["routed_experts"] == other["routed_experts"]
    np.testing.assert_allclose(_logprobs(ours), _logprobs(wanted), atol=1e-5, rtol=0)
