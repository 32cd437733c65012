"""Tables in Markdown, with columns as wide as their widest cell."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(heading: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Render a heading and rows of as many cells; cells are written as `str` writes them."""
    cells = [list(heading), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
