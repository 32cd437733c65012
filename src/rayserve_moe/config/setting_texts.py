"""Descriptions of settings, read from the source of `settings`: for help on the command line and for the docs."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from rayserve_moe.config.settings import Settings

SECRETS = frozenset({"api_key", "admin_api_key", "journal_key"})
"""Settings whose values are never printed."""


@dataclass(frozen=True)
class SettingText:
    """A setting as documented."""

    names: tuple[str, ...]
    """Key, then aliases."""
    type: str
    default: Any
    bounds: tuple[float, float] | None
    """Inclusive; None for settings that are no numbers."""
    choices: tuple[str, ...]
    """All values of a setting of fixed words."""
    text: str


@dataclass(frozen=True)
class SectionText:
    """A section of settings as documented."""

    name: str
    title: str
    settings: tuple[SettingText, ...]


def sections() -> Iterator[SectionText]:
    """Yield all sections in their order."""
    for section in dataclasses.fields(Settings):
        kind = type(getattr(Settings(), section.name))
        texts = field_texts(kind)
        settings = tuple(_setting(field, texts[field.name]) for field in dataclasses.fields(kind))
        yield SectionText(section.name, inspect.getdoc(kind) or "", settings)


@cache
def field_texts(section: type) -> dict[str, str]:
    """Return the docstring below each field of a section; empty for a field without one."""
    (node,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(node, ast.ClassDef)
    found = {}
    for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            found[statement.target.id] = " ".join(str(text).split())
    return found


def setting_names() -> Iterator[tuple[str, ...]]:
    """Yield key and aliases of all settings, without reading their texts."""
    for section in dataclasses.fields(Settings):
        for field in dataclasses.fields(type(getattr(Settings(), section.name))):
            yield _names(field)


def _setting(field: dataclasses.Field[Any], text: str) -> SettingText:
    stated = field.metadata
    return SettingText(
        _names(field), str(field.type), field.default, stated.get("bounds"), stated.get("choices", ()), text
    )


def _names(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((field.metadata.get("key", field.name), *field.metadata.get("aliases", ()))))
