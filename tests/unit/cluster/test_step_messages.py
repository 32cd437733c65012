"""Step messages: what comes out is what went in, whatever a step asks or tells, in few bytes where it is little."""

from __future__ import annotations

import pickle
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest

from rayserve_moe.balancing.migration import FailedFetch, LayerSwap, MigrationPiece, SlotFetch
from rayserve_moe.balancing.placement import identity_placement
from rayserve_moe.cluster import step_transport
from rayserve_moe.requests.columns import Ragged
from rayserve_moe.scheduling.step_plan import (
    NO_BLOCK_WORK,
    NO_NEW_ROWS,
    NO_PAGE_CHANGES,
    BlockWork,
    Chunks,
    PageTableChanges,
    RowAdjustment,
    RowSampling,
    StepPlan,
    StepResult,
)
from rayserve_moe.scheduling.token_probe import TokenProbe

INTS = np.arange(6, dtype=np.int32)
TOP = {"top_ids": INTS.reshape(3, 2), "top_logprobs": INTS.reshape(3, 2) / np.float32(7)}
PIECE = MigrationPiece(
    3,
    SlotFetch(1, INTS.reshape(2, 3), INTS.reshape(2, 3)[::-1]),
    LayerSwap(1, identity_placement(1, 8, ep_size=2), INTS > 2),
)
DECODING = StepPlan(7, Chunks(INTS.astype(np.intp), INTS.astype(np.int64), INTS, INTS, INTS >= 0), wants_routing=True)
FULL = StepPlan(
    8,
    Chunks(INTS.astype(np.intp), INTS.astype(np.int64), INTS, INTS, INTS % 2 == 0, max_drafts=3),
    pages=PageTableChanges(INTS[:2], INTS[2:4], INTS[4:]),
    sampling=RowSampling(INTS[:1], np.ones((1, 6), np.float32), np.ones((1, 5), np.uint32)),
    adjustments=(RowAdjustment(4, INTS, INTS[:0], INTS, INTS / np.float32(3)),),
    block_work=BlockWork(INTS, INTS, np.zeros((6, 2, 2), np.int16)),
    columns=("top_ids", "top_logprobs"),
    probe=TokenProbe(INTS, INTS, INTS.reshape(3, 2), 2, ("logprobs", "hidden")),
    migration=PIECE,
    wants_expert_counts=True,
    wants_drafts=True,
    next_ids=INTS,
)
RESULT = StepResult(
    7,
    INTS,
    INTS / np.float32(2),
    INTS,
    np.arange(24, dtype=np.uint8).reshape(6, 2, 2).transpose(0, 2, 1),
    {"gates": np.ones((6, 2, 2), np.float32)},
    pack_s=0.1,
    device_s=0.2,
    columns=TOP | {"mask_ids": Ragged(INTS[:3], INTS)},
    probed=TOP | {"logprobs": INTS / np.float32(5), "ranks": INTS},
    expert_counts=INTS.reshape(2, 3),
    tally=np.arange(4),
    failed_fetch=FailedFetch(2, 1),
    drafts=INTS.reshape(2, 3),
    draft_s=0.3,
)


def assert_same(got: Any, expected: Any) -> None:
    assert type(got) is type(expected)
    if isinstance(expected, np.ndarray):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)
    elif is_dataclass(expected):
        for field in fields(expected):
            assert_same(getattr(got, field.name), getattr(expected, field.name))
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for name, value in expected.items():
            assert_same(got[name], value)
    elif isinstance(expected, tuple):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    else:
        assert got == expected


@pytest.mark.parametrize(
    "message",
    [StepPlan(0), DECODING, FULL, RESULT, StepResult(1, INTS, INTS, INTS), None, "a failure's words"],
    ids=str,
)
def test_what_comes_out_is_what_went_in(message: object) -> None:
    assert_same(step_transport.loads(step_transport.dumps(message)), message)


def test_what_a_plan_leaves_out_is_not_sent() -> None:
    got = step_transport.loads(step_transport.dumps(DECODING))
    assert got.pages is NO_PAGE_CHANGES
    assert got.sampling is NO_NEW_ROWS
    assert got.block_work is NO_BLOCK_WORK
    assert len(step_transport.dumps(DECODING)) < 0.6 * len(pickle.dumps(DECODING, pickle.HIGHEST_PROTOCOL))
