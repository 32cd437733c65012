"""The page of settings, written from `config/settings.py` by `python -m tests.architecture.settings_page`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rayserve_moe.config.load import ENVIRONMENT_KEYS
from rayserve_moe.config.setting_texts import SectionText, SettingText, sections

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"
INTRODUCTION = """# Settings

Written from `src/rayserve_moe/config` by `python -m tests.architecture.settings_page`. A setting is a key
under `args` of a Serve config, or a keyword argument of `Engine` and `LLM`. An unknown key, a value of another type and
a value out of range are refused at the start; the error names the key, and the nearest known one.
"""


def page() -> str:
    """Return the page's text."""
    return "\n".join([INTRODUCTION, *(line for section in sections() for line in _section(section)), *_environment()])


def _section(section: SectionText) -> Iterator[str]:
    yield from (f"## `{section.name}`", "", section.title, "")
    yield from (
        "| setting | type | default | values | meaning |",
        "|---|---|---|---|---|",
        *map(_row, section.settings),
    )
    yield ""


def _row(setting: SettingText) -> str:
    names = ", ".join(f"`{name}`" for name in setting.names)
    default = setting.default
    default = "[]" if default == () else str(default).lower() if setting.type == "bool" else default
    cells = (names, f"`{setting.type}`", f"`{default}`" if default != "" else "", _values(setting), setting.text)
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def _values(setting: SettingText) -> str:
    if setting.choices:
        return ", ".join(f"`{choice}`" for choice in setting.choices)
    return "{:,} to {:,}".format(*setting.bounds) if setting.bounds else ""


def _environment() -> Iterator[str]:
    yield from ("## From the environment", "", "A key that is given wins over its variable.", "")
    yield from ("| variable | setting |", "|---|---|")
    yield from (f"| `{variable}` | `{key}` |" for variable, key in ENVIRONMENT_KEYS.items())
    yield ""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
