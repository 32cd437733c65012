"""What a compiled graph returns outlives the buffer of the channel that it came in."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from rayserve_moe.balancing.migration import FailedFetch
from rayserve_moe.cluster.step_transport import _owned
from rayserve_moe.requests.columns import Columns, Ragged
from rayserve_moe.scheduling.step_plan import StepResult


def likeliest(count: int) -> Columns:
    ids, logprobs = np.arange(3 * count, dtype=np.int32).reshape(count, 3), np.full((count, 3), -0.5, np.float32)
    return {"top_ids": ids, "top_logprobs": logprobs}


WHOLE = StepResult(
    7,
    token_ids=np.arange(4, dtype=np.int32),
    logprobs=np.full(4, -0.25, np.float32),
    ranks=np.ones(4, np.int32),
    routing=np.arange(24, dtype=np.uint8).reshape(4, 3, 2),
    pack_s=0.1,
    device_s=0.2,
    columns=likeliest(4) | {"mask_ids": Ragged(np.array([1, 2, 1], np.int32), np.arange(4, dtype=np.int32))},
    probed=likeliest(2) | {"logprobs": np.full(2, -0.125, np.float32), "hidden": np.ones((2, 5), np.float32)},
    expert_counts=np.arange(6, dtype=np.int32).reshape(2, 3),
    tally=np.arange(4, dtype=np.int64),
    failed_fetch=FailedFetch(1, 2),
    drafts=np.arange(8, dtype=np.int32).reshape(4, 2),
    row_parts={"index": Ragged(np.array([2, 0, 1, 1], np.int32), np.arange(4, dtype=np.uint8))},
)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Holder:
    held: Any


def arrays_in(value: Any) -> Iterator[np.ndarray]:
    if isinstance(value, np.ndarray):
        yield value
    elif dataclasses.is_dataclass(value):
        yield from arrays_in(tuple(vars(value).values()))
    elif isinstance(value, tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from arrays_in(part)


@pytest.mark.parametrize(
    "value",
    [WHOLE, Holder((np.arange(3), Holder(np.arange(4)))), Pair(np.arange(3), Pair(1, (np.arange(2),)))],
    ids=["a result", "tuples", "named tuples"],
)
def test_no_array_stays_in_the_buffer_that_it_came_in(value: Any):
    """All of it is copied, at any depth, and is what it was once the buffer holds something else."""
    parts: list[pickle.PickleBuffer] = []
    message = pickle.dumps(value, protocol=5, buffer_callback=parts.append)
    buffers = [bytearray(part.raw()) for part in parts]
    arrived = pickle.loads(message, buffers=buffers)
    owned = _owned(arrived)
    theirs, ours, wanted = (list(arrays_in(each)) for each in (arrived, owned, value))
    assert len(ours) == len(buffers) > 0 and type(owned) is type(value)
    for array, original in zip(ours, theirs, strict=True):
        assert not original.flags.owndata and not np.shares_memory(array, original)
    for buffer in buffers:
        buffer[:] = b"\xff" * len(buffer)
    for array, expected in zip(ours, wanted, strict=True):
        assert array.dtype == expected.dtype and np.array_equal(array, expected)


def test_the_result_above_has_everything_that_one_may_have():
    for field in dataclasses.fields(StepResult):
        assert getattr(WHOLE, field.name) is not None, f"give it some `{field.name}`"
