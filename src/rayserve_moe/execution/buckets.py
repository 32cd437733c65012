"""Which step shapes are compiled, and which of them a plan runs in."""

from __future__ import annotations

from rayserve_moe.config.settings import SchedulerSettings
from rayserve_moe.execution.step_types import StepShape
from rayserve_moe.scheduling.step_plan import PREFILL_BLOCK_TOKENS

DECODE_GROWTH = 4
PREFILL_GROWTH = 4


def step_shapes(scheduler: SchedulerSettings) -> tuple[StepShape, ...]:
    """All shapes to compile, smallest first.

    Decode-only shapes grow fourfold up to the number of rows; mixed shapes hold every row as a single token beside
    prefill blocks that grow fourfold up to the step's budget.
    """
    rows = scheduler.max_running_requests
    decode_sizes = scheduler.decode_batch_sizes or _grow(1, rows, DECODE_GROWTH)
    prefill_sizes = _grow(PREFILL_BLOCK_TOKENS * 2, scheduler.max_step_tokens, PREFILL_GROWTH)
    decode = [StepShape(size, 0, PREFILL_BLOCK_TOKENS) for size in sorted(set(decode_sizes))]
    mixed = [
        StepShape(max(decode_sizes), -(-size // PREFILL_BLOCK_TOKENS), PREFILL_BLOCK_TOKENS) for size in prefill_sizes
    ]
    return (*decode, *mixed)


def choose_shape(shapes: tuple[StepShape, ...], *, num_singles: int, num_blocks: int) -> StepShape:
    """Take the shape with the fewest tokens that holds the plan; the scheduler never plans more than the largest."""
    fitting = [s for s in shapes if s.num_singles >= num_singles and s.num_blocks >= num_blocks]
    assert fitting, f"no compiled shape holds {num_singles} single tokens and {num_blocks} prefill blocks"
    return min(fitting, key=lambda s: s.num_tokens)


def _grow(first: int, last: int, factor: int) -> list[int]:
    sizes = [min(first, last)]
    while sizes[-1] < last:
        sizes.append(min(sizes[-1] * factor, last))
    return sizes
