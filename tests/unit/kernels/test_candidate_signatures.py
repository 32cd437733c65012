"""Candidates of the kernel tables: what decides whether a call is supported takes every argument of the call."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest

from rayserve_moe.kernels.candidates import Candidate, Operation, supports_all
from rayserve_moe.kernels.table import KERNELS


def candidates_in(value: Any) -> Iterator[Candidate]:
    """Yield the candidates of all operations in a table or in one of its records."""
    if isinstance(value, Operation):
        yield from value.candidates
    elif is_dataclass(value):
        for field in fields(value):
            yield from candidates_in(getattr(value, field.name))


def named_arguments(function: Any) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    return {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}


def takes_any(function: Any) -> bool:
    return any(each.kind is each.VAR_KEYWORD for each in inspect.signature(function).parameters.values())


DECIDED = {
    f"{table}-{each.name}": each
    for table, kernels in KERNELS.items()
    for each in candidates_in(kernels)
    if each.unsupported_reason is not supports_all and callable(each.run)
}


@pytest.mark.parametrize("name", DECIDED)
def test_a_reason_takes_the_named_arguments_of_its_kernel(name):
    """`bound` gives both functions the same named arguments, as an interpreter of kernels does."""
    reason = DECIDED[name].unsupported_reason
    assert takes_any(reason) or named_arguments(DECIDED[name].run) <= named_arguments(reason)


def test_the_kernel_of_recurrences_is_among_them():
    assert "tpu-delta_rule" in DECIDED and len(DECIDED) > 5
