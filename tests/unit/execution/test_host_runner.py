"""A runner starts under any sensible limits, and brings results in order. What it computes is in `tests/pipelines`."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from rayserve_moe.config.settings import (
    CacheSettings,
    ModelSettings,
    ReplaySettings,
    SchedulerSettings,
    StructuredSettings,
)
from rayserve_moe.execution.runner import HostRunner
from rayserve_moe.execution.served_model import RunnerSettings
from rayserve_moe.parallel.mesh import plan_for
from rayserve_moe.scheduling.step_plan import LAST_SAMPLED, Chunks, PageTableChanges, StepPlan


def prepared(path: Path, *, max_model_len: int, max_step_tokens: int = 64, page_size: int = 16) -> HostRunner:
    settings = RunnerSettings(
        ModelSettings(path=str(path), max_model_len=max_model_len, dtype="bfloat16"),
        SchedulerSettings(max_running_requests=2, max_step_tokens=max_step_tokens, decode_batch_sizes=(2,)),
        CacheSettings(page_size=page_size, num_pages=16),
        ReplaySettings(enabled=True),
        structured=StructuredSettings(enabled=False),
    )
    runner = HostRunner(settings, plan_for(jax.devices()[:1]))
    runner.prepare(runner.load())
    return runner


def single(step_id: int, position: int, token_id: int, *, wants_routing: bool = False) -> StepPlan:
    """One token of the sequence in row 0, whose first page is 1."""
    chunk = (np.array([value]) for value in (0, position, 1))
    page = PageTableChanges(*(np.array([value]) for value in (0, 0, 1)))
    tokens = np.array([token_id], np.int32)
    return StepPlan(step_id, Chunks(*chunk, tokens, np.array([True])), page, wants_routing=wants_routing)


@pytest.mark.parametrize("max_model_len", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_a_context_of_any_length_can_be_warmed_up(core_checkpoint, max_model_len):
    runner = prepared(core_checkpoint, max_model_len=max_model_len)
    assert runner.num_compilations_since_start == 0
    assert (runner.expert_counts() == 0).all(), "warming up is not counted"
    assert runner.execute(StepPlan(3)) is None, "what warming up brought is forgotten"

    assert runner.execute(single(4, 0, 7, wants_routing=True)) is None, "there is no step before it"
    first = runner.execute(single(5, 1, LAST_SAMPLED))
    second = runner.execute(StepPlan(6))
    assert first is not None and second is not None
    assert (first.step_id, second.step_id) == (4, 5) and runner.execute(StepPlan(7)) is None
    assert first.routing is not None
    assert first.routing.shape == (1, *runner.config.spec.routing_layout.row_shape)
    assert second.routing is None, "nobody wanted it"

    runner.execute(single(8, 1, int(first.token_ids[0])))
    told = runner.execute(StepPlan(9))
    assert told is not None
    np.testing.assert_array_equal(told.token_ids, second.token_ids)
    np.testing.assert_array_equal(told.logprobs, second.logprobs)
    assert runner.num_compilations_since_start == 0
