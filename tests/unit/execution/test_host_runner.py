"""A runner starts under any sensible limits. What it computes is the business of `tests/pipelines`."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from rayserve_moe.config.settings import CacheSettings, ModelSettings, ReplaySettings, SchedulerSettings
from rayserve_moe.execution.host_runner import HostRunner, RunnerSettings
from rayserve_moe.parallel.mesh import plan_for
from rayserve_moe.scheduling.step_plan import StepPlan


def prepared(path: Path, *, max_model_len: int, max_step_tokens: int = 64, page_size: int = 16) -> HostRunner:
    settings = RunnerSettings(
        ModelSettings(path=str(path), max_model_len=max_model_len),
        SchedulerSettings(max_running_requests=2, max_step_tokens=max_step_tokens, decode_batch_sizes=(2,)),
        CacheSettings(page_size=page_size, num_pages=16),
        ReplaySettings(enabled=True),
    )
    runner = HostRunner(settings, plan_for(jax.devices()[:1]))
    runner.prepare(runner.load())
    return runner


@pytest.mark.parametrize("max_model_len", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_a_context_of_any_length_can_be_warmed_up(core_checkpoint, max_model_len):
    runner = prepared(core_checkpoint, max_model_len=max_model_len)
    assert runner.num_compilations_since_start == 0
    assert (runner.expert_counts() == 0).all(), "warming up is not counted"
    result = runner.execute(StepPlan(3))
    assert result.step_id == 3 and len(result.token_ids) == 0, "a plan without chunks computes nothing"
    assert result.routing is None, "rows of warming up are forgotten"
