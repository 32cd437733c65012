"""`make test` runs one in so many variants of a matrix, and of parameters that others vary with it every value."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.session.sampled_variants import leave_to_native_kernels, mark_others_slow


class Variant:
    """A test with parameters, as far as marking looks at it."""

    def __init__(self, params: dict[str, Any], *marks: pytest.MarkDecorator) -> None:
        self.nodeid, self.callspec = "test_it[values]", SimpleNamespace(params=params)
        self.marks = [mark.mark for mark in marks]

    def iter_markers(self, name: str) -> Iterator[pytest.Mark]:
        return (mark for mark in self.marks if mark.name == name)

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next(self.iter_markers(name), None)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.mark)

    @property
    def is_slow(self) -> bool:
        return self.get_closest_marker("slow") is not None


def matrix(every: int, *sizes: int) -> list[Variant]:
    """All combinations of values, which are neither equal to others nor hashed."""
    values = {name: [{"value": value} for value in range(size)] for name, size in zip("abcd", sizes, strict=False)}
    marks = [pytest.mark.parametrize(name, own) for name, own in values.items()]
    chosen = product(*values.values())
    return [Variant(dict(zip(values, one, strict=True)), *marks, pytest.mark.sampled(every)) for one in chosen]


def kept_of(items: list[Variant]) -> list[tuple[int, ...]]:
    return [tuple(one["value"] for one in item.callspec.params.values()) for item in items if not item.is_slow]


@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("sizes", [(6, 12), (4, 8), (3, 4, 4), (3, 3, 2, 2), (2, 2, 6)])
def test_one_in_so_many_has_every_value_of_every_parameter(sizes: tuple[int, ...], every: int):
    items = matrix(every, *sizes)
    mark_others_slow(items)
    kept = kept_of(items)
    assert abs(len(kept) - len(items) / every) < 1
    for parameter, size in enumerate(sizes):
        assert {values[parameter] for values in kept} == set(range(size))


def test_of_one_parameter_one_in_so_many_values_is_left():
    items = matrix(3, 8)
    mark_others_slow(items)
    assert kept_of(items) == [(0,), (3,), (6,)]


def test_which_are_left_depends_on_no_other_variant():
    for together, alone in zip(items := matrix(2, 3, 4), matrix(2, 3, 4), strict=True):
        mark_others_slow([alone])
        if together is items[0]:
            mark_others_slow(items)
        assert together.is_slow == alone.is_slow


def test_places_are_among_the_values_that_are_not_slow_and_those_of_names_together_are_one():
    values = [(place, -place) for place in range(300, 308)]  # objects of their own: larger than what Python keeps
    sets = [pytest.param(*one, marks=pytest.mark.slow if one[0] % 2 else ()) for one in values]
    marks = pytest.mark.parametrize(("first", "second"), sets), pytest.mark.sampled(2)
    items = [Variant(dict(zip(("first", "second"), one.values, strict=True)), *marks) for one in sets]
    mark_others_slow(items)
    assert [item.callspec.params["first"] for item in items[::2] if not item.is_slow] == [300, 304]


def test_other_tests_are_left_alone():
    item = Variant({"a": 1}, pytest.mark.parametrize("a", [0, 1]))
    mark_others_slow([item])
    assert not item.is_slow


@pytest.mark.parametrize("mark", [pytest.mark.sampled, pytest.mark.sampled(0), pytest.mark.sampled(0.5)])
def test_a_mark_that_says_nothing_names_the_test(mark: pytest.MarkDecorator):
    with pytest.raises(pytest.UsageError, match=r"test_it\[values\]: sampled takes"):
        mark_others_slow([Variant({"a": 1}, pytest.mark.parametrize("a", [0, 1]), mark)])


def test_a_test_without_parameters_is_not_sampled():
    with pytest.raises(pytest.UsageError, match=r"test_it\[values\]: a test without"):
        mark_others_slow([Variant({}, pytest.mark.sampled(2))])


def test_what_is_left_to_native_kernels_is_slow():
    left, other = Variant({}, pytest.mark.natively), Variant({}, pytest.mark.float32("reason"))
    leave_to_native_kernels([left, other])
    assert left.is_slow and not other.is_slow
