"""Decisions beside rows equal a plain run's on every path, bit by bit."""

from __future__ import annotations

import pytest

from benchmarks.decision_paths import NEW_TOKENS, PATHS, compare_paths
from rayserve_moe.checkpoints.model_path import resolve_model_path
from rayserve_moe.config.load import default_cache_directory
from tests.support.kernels.native_kernels import need_native_kernels

SAMPLES = 32


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_every_part_equals_a_plain_run(path: str):
    need_native_kernels()
    model = resolve_model_path("trained:calculator", cache_directory=default_cache_directory())
    counts = dict(compare_paths(model, samples={path: SAMPLES}))[path]
    masked = {} if path == "drafts" else {"masks", "sampling log-probs"}
    assert {"gates", "log-probs", *masked} <= {part for part, each in counts.items() if each["equal"]}
    assert all(each["differing"] == each["missing"] == 0 for each in counts.values())
    assert counts["log-probs"]["equal"] == SAMPLES * NEW_TOKENS
