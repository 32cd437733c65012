"""Budgets of change: modules and functions of a request, modules with a single importer, wide records (docs/adr/0040).

Budgets go down: a figure below its budget has to become the budget. A new family is one module that its table alone
imports, and adds one. A command whose arguments are checked before its work is loaded adds one too: a module for each.
"""

from __future__ import annotations

import ast
from typing import Any

import pytest

from benchmarks import house

BUDGETS = {"modules": 65, "functions": 391, "one_importer": 134}
SLACK = {"functions": 5}
"""Number of functions whose call depends on how the threads of a request take turns."""
WIDE_CLASSES: dict[str, int] = {
    "BalancingView": 19,
    "GenerationRequest": 18,
    "GroupedAttention": 21,
    "HostRunner": 17,
    "ModelCard": 18,
    "Op": 17,
    "Rollout": 21,
    "ServerSettings": 17,
    "StepPlan": 18,
}
"""Attributes of each class wider than `house.MAX_ATTRIBUTES`; no other class may be wider."""


@pytest.fixture(scope="module")
def size() -> dict[str, Any]:
    return house.size_of(house.PACKAGE)


@pytest.fixture(scope="module")
def figures(size: dict[str, Any]) -> dict[str, int]:
    return house.figures_of(house.completion()) | {"one_importer": size["one_importer"]}


@pytest.mark.parametrize("name", BUDGETS)
def test_a_figure_is_its_budget(figures: dict[str, int], name: str) -> None:
    slack = SLACK.get(name, 0)
    assert figures[name] <= BUDGETS[name] + slack, "the change costs every later reader"
    assert figures[name] >= BUDGETS[name] - slack, "it became cheaper: lower the budget"


def test_no_class_is_wider_than_it_was(size: dict[str, Any]) -> None:
    assert size["wide_classes"] == WIDE_CLASSES


@pytest.mark.parametrize("count", [house.MAX_ATTRIBUTES, house.MAX_ATTRIBUTES + 1])
def test_fields_and_assigned_attributes_are_counted_once_each(count: int) -> None:
    fields = "".join(f"    a{i}: int\n" for i in range(count - 1))
    body = f"class Row:\n{fields}    def move(self):\n        self.a0 = self.last = 1\n        other.b = 2\n"
    assert list(house.wide_classes(ast.parse(body))) == [("Row", count)] * (count > house.MAX_ATTRIBUTES)


def test_modules_with_one_importer_are_found(tmp_path) -> None:
    package = tmp_path / "rayserve_moe"
    package.mkdir()
    texts = {
        "a": "from rayserve_moe.b import f",
        "b": "import rayserve_moe.c",
        "c": "",
        "d": "from rayserve_moe import c",
    }
    for name, text in texts.items():
        (package / f"{name}.py").write_text(text)
    trees = {file: ast.parse(file.read_text()) for file in package.glob("*.py")}
    assert house.imported_once(package, trees) == ["rayserve_moe.b"]
