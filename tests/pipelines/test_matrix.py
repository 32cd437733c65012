"""The independence laws over whole matrices of settings: every combination, not just one knob at a time."""

from __future__ import annotations

import pytest

from tests.support.engine.engine_store import EngineStore
from tests.support.engine.outputs import Outcomes, assert_all_same
from tests.support.engine.run_requests import Way, preempt_every, run_together
from tests.support.engine.workload import mixed_workload

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("num_pages", [29, 200])
@pytest.mark.parametrize("preempted_every", [None, 14, 20])
@pytest.mark.parametrize("chunk_tokens", [16, 64, 256])
@pytest.mark.parametrize("num_rows", [2, 5, 16])
def test_scheduling_does_not_show(engine, alone: Outcomes, num_rows, chunk_tokens, preempted_every, num_pages):
    way = Way(
        num_rows=num_rows,
        chunk_tokens=chunk_tokens,
        num_pages=num_pages,
        intervene=preempt_every(preempted_every) if preempted_every else None,
    )
    assert_all_same(run_together(engine.runner, engine.card, mixed_workload(), way=way), alone)


@pytest.mark.parametrize("batch", [4, 16])
@pytest.mark.parametrize("page_size", [4, 16, 64])
@pytest.mark.parametrize(
    "num_devices",
    [1, *(pytest.param(count, marks=pytest.mark.float32("devices add up parts of sums")) for count in (2, 4))],
)
def test_devices_pages_and_buckets_do_not_show(
    engine_with: EngineStore, alone: Outcomes, num_devices: int, page_size: int, batch: int
):
    num_pages = 3200 // page_size
    spread = engine_with(
        devices_per_host=num_devices,
        page_size=page_size,
        num_pages=num_pages,
        precompile_bs_paddings=[batch],
        max_running_requests=batch,
        max_step_tokens=64,
    )
    for intervene in (None, preempt_every(16)):
        way = Way(
            num_rows=batch,
            step_tokens=64,
            chunk_tokens=64,
            page_size=page_size,
            num_pages=num_pages,
            intervene=intervene,
        )
        assert_all_same(run_together(spread.runner, spread.card, mixed_workload(), way=way), alone)
