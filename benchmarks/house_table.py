"""Tables of the costs of a package change to a reader, with a column per measured commit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.markdown import markdown_table


def house(measured: Mapping[str, Any]) -> str:
    """Return a table with a row per figure, then a table of lines by package."""
    heading = ["", *(f"{name} ({each['commit']})" for name, each in measured.items())]
    columns = [_figures_of(each) for each in measured.values()]
    rows = [[name, *(figures[name] for figures in columns)] for name in columns[0]]
    packages = sorted({package for each in measured.values() for package in each["lines"]})
    lines = [[f"`{package}`", *(_lines_of(each, package) for each in measured.values())] for package in packages]
    return f"{markdown_table(heading, rows)}\n\n{markdown_table(['lines (files)', *heading[1:]], lines)}"


def _figures_of(each: Mapping[str, Any]) -> dict[str, str]:
    widest = max(each["wide_classes"].items(), key=lambda item: item[1], default=("", 0))
    return {
        "one plain completion: modules": str(each["completion"]["modules"]),
        "functions that it calls": str(each["completion"]["functions"]),
        "types that it creates": str(each["completion"]["types_created"]),
        "modules with one importer": str(each["one_importer"]),
        "classes of more than 16 attributes": str(len(each["wide_classes"])),
        "the widest": f"{widest[0]}, {widest[1]}" if widest[1] else "none",
        "lines of the server": f"{each['server_lines']:,}",
    }


def _lines_of(each: Mapping[str, Any], package: str) -> str:
    total = each["lines"].get(package)
    return f"{total['lines']:,} ({total['files']})" if total else ""
