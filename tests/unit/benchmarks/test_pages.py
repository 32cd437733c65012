"""Pages of figures show what the result files hold, and their summary is drawn from the pages."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks import pages

SUMMARY = (pages.PAGES.parent / "figures.md").read_text(encoding="utf-8")
ROWS = re.findall(r"(?m)^\| (?!figure)(.+?) \| (.+?) \| (`.+?`) \| \[.+?\]\((.+?)\) \|$", SUMMARY)
RESULT = {"rows": {"a": {"count": 1280, "inner": {"s": 0.0123}}, "b": {"count": 5, "inner": {"s": 15.86}}}}


@pytest.mark.parametrize("file", sorted(pages.PAGES.glob("*.md")), ids=lambda file: file.stem)
def test_the_tables_of_a_page_are_those_of_its_results(file):
    """`python -m benchmarks.pages` writes them anew."""
    text = file.read_text(encoding="utf-8")
    assert text.count("<!-- from ") == len(pages.MARKED.findall(text))
    assert pages.page(text) == text


def test_the_summary_has_at_most_25_rows_of_one_number():
    assert 20 <= len(ROWS) <= 25
    assert [value for _, value, _, _ in ROWS if not re.fullmatch(r"[\d.,]+", value)] == []


@pytest.mark.parametrize(("name", "value", "page"), [(name, value, page) for name, value, _, page in ROWS])
def test_a_figure_of_the_summary_stands_on_its_page(name, value, page):
    cells = (pages.PAGES.parent / page).read_text(encoding="utf-8").split("|")
    assert value in {word.strip("()") for cell in cells for word in cell.split()}, name


def test_entries_become_rows_and_named_keys_become_columns():
    table = pages.entries(RESULT, "rows | count | inner.s as time, s")
    assert re.sub(r" +", " ", table).splitlines() == [
        "| | count | time, s |",
        "|---|-------|---------|",
        "| a | 1,280 | 0.012 |",
        "| b | 5 | 15.9 |",
    ]


def test_several_runs_of_an_entry_are_shown_by_their_median():
    table = pages.entries({"runs": {"cold": [{"s": 3}, {"s": 1}, {"s": 2}]}}, "runs | s")
    assert table.splitlines()[-1].split() == ["|", "cold", "|", "2", "|"]


def test_a_key_that_the_result_lacks_is_an_error():
    with pytest.raises(KeyError, match="gone"):
        pages.entries(RESULT, "rows | gone")


def test_text_outside_of_the_marks_is_kept(tmp_path, monkeypatch):
    (tmp_path / "a.json").write_text('{"rows": {"x": {"n": 1}}}')
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    text = "before\n\n<!-- from a.json: rows | n -->\nstale\n<!-- end -->\n\nafter\n"
    written = pages.page(text)
    assert written.startswith("before\n") and written.endswith("\nafter\n")
    assert "stale" not in written and "| x" in written and pages.page(written) == written


def test_a_sentence_of_an_earlier_table_is_not_repeated(tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    monkeypatch.setattr(pages, "tables", lambda result: f"**{result['title']}**\n\n| {result['n']} |\n\nbuilt with -O3")
    for name, title, n in (("a", "idle", 1), ("b", "busy", 1), ("c", "idle", 2)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"title": title, "n": n}))
    written = pages.page("\n".join(f"<!-- from {name}.json -->\n<!-- end -->\n" for name in "abc"))
    assert [written.count(part) for part in ("**idle**", "**busy**", "| 1 |", "| 2 |", "-O3")] == [2, 1, 2, 1, 1]
    assert pages.page(written) == written
