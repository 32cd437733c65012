"""`make test` runs one in so many variants of a matrix, and every value of every parameter among them."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.sampled import mark_others_slow


class Variant:
    """A test with parameters, as far as marking looks at it."""

    def __init__(self, test: str, params: dict[str, Any], *marks: pytest.MarkDecorator) -> None:
        self.nodeid, self.callspec = f"{test}[{len(params)}]", SimpleNamespace(params=params)
        self.marks = {mark.name: mark.mark for mark in marks}

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.marks.get(name)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks[mark.name] = mark.mark


def matrix(test: str, sizes: tuple[int, ...], *marks: pytest.MarkDecorator) -> list[Variant]:
    """All combinations of values, which are objects of their own and as such neither equal nor hashed."""
    values = [[{"value": value} for value in range(size)] for size in sizes]
    return [Variant(test, dict(zip("abcd", chosen, strict=False)), *marks) for chosen in product(*values)]


def kept_of(items: list[Variant]) -> list[tuple[int, ...]]:
    kept = [item for item in items if "slow" not in item.marks]
    return [tuple(value["value"] for value in item.callspec.params.values()) for item in kept]


@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("sizes", [(6, 12), (4, 8), (3, 4, 4), (3, 3, 2, 2), (2, 2, 6)])
def test_one_in_so_many_has_every_value_of_every_parameter(sizes: tuple[int, ...], every: int):
    items = matrix("test_a", sizes, pytest.mark.sampled(every))
    mark_others_slow(items)
    kept = kept_of(items)
    assert abs(len(kept) - len(items) / every) < 1
    for parameter, size in enumerate(sizes):
        assert {values[parameter] for values in kept} == set(range(size))


def test_parameters_that_change_together_count_once():
    items = matrix("test_a", (8,), pytest.mark.sampled(2))
    for item in items:
        item.callspec.params["other"] = item.callspec.params["a"]
    mark_others_slow(items)
    assert [values[0] for values in kept_of(items)] == [0, 2, 4, 6]


def test_every_test_is_a_matrix_of_its_own_and_others_are_left_alone():
    first, others = matrix("test_a", (5,), pytest.mark.sampled(3)), matrix("test_b", (5,))
    second = matrix("test_c", (5,), pytest.mark.sampled(3))
    mark_others_slow([*first, *others, *second])
    assert kept_of(first) == kept_of(second) == [(0,), (3,)] and len(kept_of(others)) == 5
