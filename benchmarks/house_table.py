"""The size of the package to a reader, before and after, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.markdown import markdown_table

KINDS = ("code", "docstrings", "comments", "blank")


def house(measured: Mapping[str, Any]) -> str:
    """One row per figure and one column per commit, then the lines of every package, and what each step of work did."""
    return f"{_figures(measured)}\n\n{_lines(measured)}\n\n{_steps(measured)}"


def _figures(measured: Mapping[str, Any]) -> str:
    columns = [_figures_of(each) for each in measured.values()]
    rows = [[name, *(figures[name] for figures in columns)] for name in columns[0]]
    return markdown_table(["", *(f"{name} ({each['commit']})" for name, each in measured.items())], rows)


def _figures_of(each: Mapping[str, Any]) -> dict[str, str]:
    lines, completion = each["lines"].values(), each["completion"]
    totals = {kind: sum(of_package[kind] for of_package in lines) for kind in KINDS}
    name, length = each["largest_class"]
    flags = {
        f"places (files) of `{flag}`": f"{found['places']} ({found['files']})" for flag, found in each["flags"].items()
    }
    return {
        "lines of src": f"{sum(totals.values()):,}",
        **{f"of them {kind}": f"{count:,}" for kind, count in totals.items()},
        "files": str(each["files"]),
        "types": str(each["types"]),
        "largest class, lines": f"{length} (`{name}`)",
        **flags,
        "one HTTP completion: packages": str(len(completion["packages"])),
        "functions that it calls": str(completion["functions"]),
        "types that it creates": str(len(completion["created"])),
        "types that it creates or calls methods of": str(len(completion["types"])),
        "words of the README": f"{each['readme_words']:,}",
        "lines of the tests": f"{each['test_lines']:,}",
    }


def _steps(measured: Mapping[str, Any]) -> str:
    steps = [step for each in measured.values() for step in each.get("steps", ())]
    return markdown_table(["step", "lines of src"], [[step["step"], f"{step['lines']:+}"] for step in steps])


def _lines(measured: Mapping[str, Any]) -> str:
    packages = sorted({package for each in measured.values() for package in each["lines"]})
    rows = []
    for package in packages:
        row: list[object] = [f"`{package}`"]
        for each in measured.values():
            counts = each["lines"].get(package)
            row += [counts["files"], counts["code"], counts["docstrings"]] if counts else ["", "", ""]
        rows.append(row)
    columns = [f"{kind}, {name}" for name in measured for kind in ("files", "code", "docstrings")]
    return markdown_table(["package", *columns], rows)
