"""Step plans and results as bytes: pickles without what both ends know.

In most steps most of a plan is empty, and most of a plain pickle of it are names of fields. Without them both ends need
a third of the time to write and to read.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any

import numpy as np

from rayserve_moe.scheduling.step_plan import (
    NO_BLOCK_WORK,
    NO_NEW_ROWS,
    NO_PAGE_CHANGES,
    BlockWork,
    PageTableChanges,
    RoutingRows,
    RowAdjustment,
    RowSampling,
    StepPlan,
    StepResult,
    StepTimes,
    TokenScores,
)

RECORDS = (
    StepPlan,
    PageTableChanges,
    RowSampling,
    RowAdjustment,
    BlockWork,
    StepResult,
    RoutingRows,
    StepTimes,
    TokenScores,
)
NOTHING = (NO_PAGE_CHANGES, NO_NEW_ROWS, NO_BLOCK_WORK)
"""Values of plans that change nothing: sent as their index here."""

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


def dumps(message: object) -> memoryview:
    """A plan, a result, or anything else that pickles. Arrays come out of `loads` read-only."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(message)
    return buffer.getbuffer()


loads = pickle.loads


def _reduced_array(array: np.ndarray) -> Reduced:
    return _array, (array.tobytes(), array.dtype.str, array.shape)


def _array(values: bytes, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.frombuffer(values, dtype).reshape(shape)


def _nothing(place: int) -> object:
    return NOTHING[place]


def _reduction(record: Any) -> Callable[[object], Reduced]:
    """How to write a record: by the values of its fields, in their order."""
    values_of = attrgetter(*(field.name for field in fields(record)))
    places = {id(nothing): place for place, nothing in enumerate(NOTHING)}

    def reduced(value: object) -> Reduced:
        place = places.get(id(value))
        return (record, values_of(value)) if place is None else (_nothing, (place,))

    return reduced


class _Pickler(pickle.Pickler):
    """Writes numpy arrays and the records of steps in its own way; all else as pickle does."""

    dispatch_table = {np.ndarray: _reduced_array, **{record: _reduction(record) for record in RECORDS}}  # noqa: RUF012
