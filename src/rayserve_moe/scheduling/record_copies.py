"""Copies of frozen records in which some fields differ, for records that every step copies."""

from __future__ import annotations

from typing import Any, TypeVar

Record = TypeVar("Record")


def with_fields(record: Record, /, **fields: Any) -> Record:
    """Return a copy of a frozen dataclass with other values of some fields, as `dataclasses.replace`.

    The constructor is not called: it sets each field by a call, which for the largest records takes longer than a mask.
    """
    copy = object.__new__(type(record))
    values = vars(copy)
    values.update(vars(record))
    assert fields.keys() <= values.keys(), "a record has no other fields than those of its class"
    values.update(fields)
    return copy
