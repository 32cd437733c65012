"""Copies of pages to host memory and back compile for TPUs without a copy of a pool, for every kind of state."""

from __future__ import annotations

import pytest

from rayserve_moe.tools.compile_check import check
from rayserve_moe.tools.served_cases import case_of_model

SLOW = [
    pytest.param(model, "v6e:4x4", marks=pytest.mark.slow)
    for model in ("gpt-oss-120b", "mimo-v2-flash", "deepseek-v3.2", "kimi-linear-48b-a3b", "nemotron-3-nano-30b-a3b")
]


@pytest.mark.parametrize(("model", "topology"), [("qwen3-30b-a3b", "v6e:2x4"), ("qwen3.5-35b-a3b", "v6e:2x4"), *SLOW])
def test_pages_leave_and_return_in_place(model: str, topology: str):
    values = {"host_cache_mib": 1024, "max_running_requests": 32, "max_model_len": 16384}
    report = check(
        case_of_model(model, topology, tp=2, num_layers=8, values=values), names=("read_pages", "write_pages")
    )
    assert not report.faults
    assert [program.copies for program in report.programs] == [[], []]
