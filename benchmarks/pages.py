"""The tables in docs/figures, rewritten in place from the results: `python -m benchmarks.pages [PAGE.md ...]`.

A page marks each table with the result that it shows:

    <!-- from kill_repeats.json -->
    <!-- from kill_repeats.json: rows | requests | p50_s as median, s -->

The first form shows what `benchmarks.table` prints for the file. The second one has a row for each entry of an object
in the file and a column for each of its keys; of several runs it shows the median. `<!-- end -->` ends both.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

from benchmarks.markdown import markdown_table
from benchmarks.table import RESULTS, tables

PAGES = Path(__file__).resolve().parents[1] / "docs" / "figures"
MARKED = re.compile(
    r"(?m)^<!-- from (?P<file>[\w.-]+?\.json)(?:: (?P<columns>[^>]+?))? -->\n.*?^<!-- end -->$", re.DOTALL
)


OF_ONE_TABLE = ("|", "**", "`")
"""First words of paragraphs kept with their table: its rows, title, load or conditions."""


def page(text: str) -> str:
    """Return a page with the content of every mark written anew; the rest is unchanged.

    A plain sentence, such as the build of a peer, is not repeated on a page; what belongs to one table is.
    """
    sentences: set[str] = set()

    def rewritten(found: re.Match[str]) -> str:
        result = json.loads((RESULTS / found["file"]).read_text(encoding="utf-8"))
        shown = entries(result, found["columns"]) if found["columns"] else tables(result)
        parts = [part for part in shown.split("\n\n") if part not in sentences]
        sentences.update(part for part in parts if not part.startswith(OF_ONE_TABLE))
        return "\n\n".join([found[0].split("\n", 1)[0], *parts, "<!-- end -->"])

    return MARKED.sub(rewritten, text)


def entries(result: Mapping[str, Any], columns: str) -> str:
    """Return a table of an object's entries.

    Args: columns: the object's key, then the columns, separated by `|`; a column is `key` or `key as title`, and a dot
    in a key leads into an object. Raises: KeyError if the result has no such key.
    """
    where, *wanted = (part.strip() for part in columns.split("|"))
    named = [part.partition(" as ") for part in wanted]
    rows = [[name, *(_cell(each, key) for key, _, _ in named)] for name, each in _items(_under(result, where))]
    return markdown_table(["", *(title or key for key, _, title in named)], rows)


def _under(value: Any, path: str) -> Any:
    return reduce(lambda inner, key: inner[key], path.split("."), value)


def _items(rows: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> list[tuple[str, Any]]:
    """Return names and entries; an entry of a list is named by its first value."""
    if isinstance(rows, Mapping):
        return list(rows.items())
    return [(str(next(iter(each.values()))), each) for each in rows]


def _cell(entry: Any, key: str) -> str:
    if isinstance(entry, list):
        return _number(statistics.median(_under(run, key) for run in entry))
    return _number(_under(entry, key)) if isinstance(entry, Mapping) else _number(entry)


def _number(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or value == round(value):
        return f"{value:,.0f}"
    digits = 1 if abs(value) >= 10 else 2
    return f"{value:.1e}" if abs(value) < 1e-3 else f"{value:,.{digits}f}" if abs(value) >= 0.1 else f"{value:.2g}"


def main() -> None:
    """Rewrite the named pages, or all."""
    for file in map(Path, sys.argv[1:]) if sys.argv[1:] else sorted(PAGES.glob("*.md")):
        file.write_text(page(file.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
