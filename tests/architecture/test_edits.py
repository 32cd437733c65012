"""Budgets of change that scripted edits count: files of a new sampling parameter, output, family and layer kind.

Edits of `benchmarks/edits` are applied to a scratch copy of the package, and the features have to work there, each
beside the others. Budgets only go down: a count below its budget has to become the budget (docs/adr/0040).
"""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.edits import layer_kind, model_family, sampling_parameter, scratch
from benchmarks.edits.scratch import AnchorError, Edit, Insertion
from tests.support.session.xla_flags import flags_of_children

BUDGETS = {"sampling_parameter": 3, "token_output": 3, "model_family": 1, "layer_kind": 2}
"""Files of the package. Those of a layer kind are its own and the family that has it."""
PAGES = {"sampling_parameter": "add_a_request_flag.md", "token_output": "add_an_output.md"}
CLOSE = {"rel": 0, "abs": 1e-5}


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return by name what each edit's module observes in a copy of the package with all edits."""
    folder = tmp_path_factory.mktemp("edited")
    source = scratch.edited_copy(map(scratch.edit_of, BUDGETS), folder)
    module = "tests.support.session.observe_edits"
    found = scratch.observed(tuple(BUDGETS), source, flags=flags_of_children(), module=module)
    assert Path(found["package"]) == folder / scratch.PACKAGE.name, "the scratch copy is what was imported"
    return found


@pytest.mark.parametrize("name", BUDGETS)
def test_an_edit_touches_as_many_files_as_its_budget(name: str) -> None:
    edit = scratch.edit_of(name)
    assert edit.num_files <= BUDGETS[name], "the change costs every later feature of its kind"
    assert edit.num_files >= BUDGETS[name], "it became cheaper: lower the budget"
    for text in edit.edited_files(scratch.PACKAGE).values():
        ast.parse(text)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_every_file_and_line_of_its_edit(name: str) -> None:
    page = (scratch.ROOT / "docs" / PAGES[name]).read_text(encoding="utf-8")
    edit = scratch.edit_of(name)
    lines = [line for each in edit.insertions.values() for _, text in each for line in text.splitlines()]
    assert [file for file in edit.insertions if f"`{file}`" not in page] == []
    assert [line for line in lines if line.strip() not in page] == []


@pytest.mark.parametrize(("text", "count"), [("b = 2\n", 0), ("a = 1\na = 1\n", 2)])
def test_an_anchor_that_is_gone_or_ambiguous_is_named_with_its_file(tmp_path: Path, text: str, count: int) -> None:
    (tmp_path / "rows.py").write_text(text)
    edit = Edit({"rows.py": (Insertion("a = 1\n", "c = 3\n"),)})
    with pytest.raises(AnchorError, match=rf"rows\.py: found {count} times.*'a = 1\\n'"):
        edit.edited_files(tmp_path)


def test_a_new_file_that_exists_is_named_and_a_table_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "table.py").write_text("a = 1\n")
    edit = Edit(new_files={"rows.py": ""}, listings={"table.py": (Insertion("a = 1\n", "b = 2\n"),)})
    assert edit.num_files == 1
    assert edit.edited_files(tmp_path) == {"table.py": "a = 1\nb = 2\n", "rows.py": ""}
    (tmp_path / "rows.py").touch()
    with pytest.raises(FileExistsError, match=r"rows\.py"):
        edit.edited_files(tmp_path)


@pytest.mark.slow
def test_top_a_removes_what_it_has_to_and_changes_nothing_without_it(observed: dict[str, Any]) -> None:
    before, after = json.loads(json.dumps(sampling_parameter.observe())), observed["sampling_parameter"]
    assert after["plain"] == before["plain"] and "with_top_a" not in before
    assert not all(map(_is_allowed, after["plain"])), "the limit matters for these outputs"
    assert all(map(_is_allowed, after["with_top_a"]))
    for output, mask in zip(after["with_top_a"], after["masks"], strict=True):
        distances = {i: logprob - _floor(output) for i, logprob in output["likeliest"]}
        assert {i for i, distance in distances.items() if distance > CLOSE["abs"]} <= set(mask)
        assert {i for i, distance in distances.items() if distance < -CLOSE["abs"]}.isdisjoint(mask)


@pytest.mark.slow
def test_margins_are_differences_of_log_probs_wherever_they_are_read(observed: dict[str, Any]) -> None:
    found = observed["token_output"]
    expected = [best - second for best, second in found["likeliest"]]
    assert len(expected) == sampling_parameter.SAMPLING["max_new_tokens"] and max(expected) > 0.1
    assert set(found["margins"]) == {"engine", "stream", "journal", "http"}
    for margins in found["margins"].values():
        assert margins == pytest.approx(expected, **CLOSE)
    assert "output_token_entropy" in found["others"] and "output_token_margin" not in found["others"]


@pytest.mark.slow
def test_a_family_of_one_file_generates_and_its_knob_moves_log_probs(observed: dict[str, Any]) -> None:
    found = observed["model_family"]
    toy, mixtral = ([logprob for logprob, _ in found[name]] for name in model_family.ARCHITECTURES)
    assert len(toy) == len(mixtral) == 8 and all(map(math.isfinite, toy))
    assert max(abs(one - other) for one, other in zip(toy, mixtral, strict=True)) > 1e-3


@pytest.mark.slow
def test_a_layer_kind_with_a_pool_of_its_own_is_served_beside_attention(observed: dict[str, Any]) -> None:
    found = observed["layer_kind"]
    for name, count in layer_kind.PROMPTS.items():
        of_prompt = found[name]
        assert of_prompt["served"] == pytest.approx(of_prompt["reference"], rel=0, abs=1e-4), name
        assert (of_prompt["cached"] > count / 2) == (name == "cached")


def _floor(output: dict[str, Any]) -> float:
    """Return the log-prob that top-a keeps at least; of near ties either may be kept."""
    return math.log(sampling_parameter.TOP_A) + 2 * output["likeliest"][0][1]


def _is_allowed(output: dict[str, Any]) -> bool:
    return output["logprob"] >= _floor(output) - CLOSE["abs"]
