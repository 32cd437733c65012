"""The page of settings, written from `config/settings.py` by `python -m tests.architecture.settings_page`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rayserve_moe.config.load import ENVIRONMENT_KEYS
from rayserve_moe.config.settings import Settings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"
INTRODUCTION = """# Settings

Written from `src/rayserve_moe/config` by `python -m tests.architecture.settings_page`. A setting is a key
under `args` of a Serve config, or a keyword argument of `Engine` and `LLM`. An unknown key, a value of another type and
a value out of range are refused at the start; the error names the key, and the nearest known one.
"""


def page() -> str:
    """Return the page's text."""
    sections = [section for field in dataclasses.fields(Settings) for section in _section(field.name)]
    return "\n".join([INTRODUCTION, *sections, *_environment()])


def field_texts(section: type) -> dict[str, str]:
    """The docstring below every field of a section; nothing for a field without one."""
    (node,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(node, ast.ClassDef)
    found = {}
    for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            found[statement.target.id] = " ".join(str(text).split())
    return found


def _section(name: str) -> Iterator[str]:
    section = type(getattr(Settings(), name))
    texts = field_texts(section)
    rows = [_row(field, texts[field.name]) for field in dataclasses.fields(section)]
    yield from (f"## `{name}`", "", inspect.getdoc(section) or "", "")
    yield from ("| setting | type | default | values | meaning |", "|---|---|---|---|---|", *rows, "")


def _row(field: dataclasses.Field[Any], text: str) -> str:
    stated = field.metadata
    key, aliases = stated.get("key", field.name), stated.get("aliases", ())
    names = ", ".join(f"`{name}`" for name in dict.fromkeys((key, *aliases)))
    default = "[]" if field.default == () else str(field.default).lower() if field.type == "bool" else field.default
    cells = (names, f"`{field.type}`", f"`{default}`" if default != "" else "", _values(stated), text)
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _values(stated: Any) -> str:
    if "choices" in stated:
        return ", ".join(f"`{choice}`" for choice in stated["choices"])
    return "{:,} to {:,}".format(*stated["bounds"]) if "bounds" in stated else ""


def _environment() -> Iterator[str]:
    yield from ("## From the environment", "", "A key that is given wins over its variable.", "")
    yield from ("| variable | setting |", "|---|---|")
    yield from (f"| `{variable}` | `{key}` |" for variable, key in ENVIRONMENT_KEYS.items())
    yield ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
