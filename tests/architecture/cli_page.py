"""The page of the command line, written from the parsers by `python -m tests.architecture.cli_page`."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from rayserve_moe.cli import COMMANDS
from rayserve_moe.config.setting_texts import sections

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
INTRODUCTION = """# Command line

Look here for every command of `rayserve-moe` and its arguments. Written from the parsers by
`python -m tests.architecture.cli_page`. `rayserve-moe serve` takes every [setting](settings.md) as an option too.
"""


def page() -> str:
    """Return the page's text."""
    return "\n".join([INTRODUCTION, *(line for name in COMMANDS for line in _section(name))])


def _section(name: str) -> Iterator[str]:
    module, meaning = COMMANDS[name]
    parser = argparse.ArgumentParser(prog=f"rayserve-moe {name}", add_help=False)
    importlib.import_module(f"rayserve_moe.{module}").add_arguments(parser)
    actions = [action for action in parser._actions if action.dest != "help" and action.help != argparse.SUPPRESS]
    yield from (f"## `rayserve-moe {name}`", "", f"{meaning[0].upper()}{meaning[1:]}.", "")
    if actions:
        yield from ("| argument | default | meaning |", "|---|---|---|", *map(_row, actions), "")


def _row(action: argparse.Action) -> str:
    flags = ", ".join(f"`{flag}`" for flag in action.option_strings) or f"`{(action.metavar or action.dest)}`"
    is_plain = action.default not in (None, "", False, [], argparse.SUPPRESS)
    text = action.help or _settings().get(action.dest, "")
    meaning = " ".join(text.replace("%(default)s", str(action.default)).split())
    if action.choices is not None:
        meaning = f"{meaning} ({', '.join(f'`{choice}`' for choice in action.choices)})".strip()
    cells = (flags, f"`{action.default}`" if is_plain else "", meaning.replace("%%", "%"))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


@cache
def _settings() -> dict[str, str]:
    """Return the first clause of each setting's text, by name; `serve` reads these texts when it prints help."""
    settings = (setting for section in sections() for setting in section.settings)
    return {name: re.split(r"[.;:](?:\s|$)", each.text, maxsplit=1)[0] for each in settings for name in each.names}


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
