"""Within a layout of devices a token has the same bits in any step, and on any rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engine.host_runners import TWO_SHAPES, card_of, prepared_runner
from tests.support.engine.outputs import assert_identical
from tests.support.engine.run_requests import Way, preempt_every, run_alone, run_together
from tests.support.engine.workload import mixed_workload

pytestmark = pytest.mark.slow
LAYOUTS = {"two data ranks": (2, 1), "two devices of a tensor group": (1, 2), "four devices": (2, 2)}
SETTINGS = {
    **TWO_SHAPES,
    "invariant_products": "on",
    "precompile_bs_paddings": [1, 16],
    "max_step_tokens": 64,
    "enable_return_routed_experts": True,
}
WAY = Way(num_rows=16, step_tokens=64, chunk_tokens=64)


@pytest.mark.parametrize("backend", ["auto", "all_to_all"])
@pytest.mark.parametrize("mesh", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_steps_and_ranks_do_not_show_in_any_bit(
    core_checkpoint: Path, mesh: tuple[int, int], backend: str, is_native: bool
):
    """Alone a request is on the first rank; together requests are on all ranks."""
    kernels = {"cpu_kernels": "native" if is_native else "off", "expert_backend": backend}
    runner = prepared_runner(core_checkpoint, mesh=mesh, **SETTINGS, **kernels)
    card = card_of(core_checkpoint)
    expected = run_alone(runner, card, mixed_workload(), way=WAY)
    assert_identical(run_together(runner, card, mixed_workload(), way=WAY), expected)
    other = Way(num_rows=5, step_tokens=64, chunk_tokens=7, intervene=preempt_every(9, forgets=True))
    assert_identical(run_together(runner, card, mixed_workload(), way=other), expected)
