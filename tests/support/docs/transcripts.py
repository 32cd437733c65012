"""Transcripts of commands in a page of the docs, and what a terminal shows held against them.

    ```console
    $ rayserve-moe serve nosuch.yaml
    rayserve-moe serve: nosuch.yaml: no such file or directory
    ```

Numbers, and the folders of the machine, may differ. A line `...` stands for any lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parents[3] / "docs" / "transcripts.md"
_BLOCK = re.compile(r"^## (?P<heading>.+?)$|^```console\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"\d[\d,]*(\.\d+)?")
ANY = "..."


@dataclass(frozen=True)
class Entry:
    """A command of a transcript, with what it shows."""

    section: str
    command: str
    shown: str


def entries() -> list[Entry]:
    """Return the commands of the page in their order."""
    found, section = [], ""
    for block in _BLOCK.finditer(PAGE.read_text(encoding="utf-8")):
        section = block["heading"] or section
        for part in re.split(r"^\$ ", block["text"] or "", flags=re.MULTILINE)[1:]:
            command, _, shown = part.partition("\n")
            found.append(Entry(section, command, shown))
    return found


def of_section(section: str) -> list[Entry]:
    """Return the commands below a heading."""
    return [entry for entry in entries() if entry.section == section]


def difference(entry: Entry, shown: str, *, folders: Mapping[str, str]) -> str:
    """Return how output differs from a transcript; empty if it does not.

    `folders` are names of the page by paths of this machine.
    """
    for path, name in folders.items():
        shown = shown.replace(path, name)
    wanted, lines = list(_lines(entry.shown)), list(_lines(shown))
    place = 0
    for number, line in enumerate(wanted):
        if line == ANY:
            continue
        after_any = number > 0 and wanted[number - 1] == ANY
        places = [at for at in range(place, len(lines)) if lines[at] == line]
        if not places or not (after_any or places[0] == place):
            found = lines[place] if place < len(lines) else "(the end)"
            return f"expected {line!r}, found {found!r} in:\n{shown}"
        place = places[0] + 1
    rest = lines[place:]
    return "" if not rest or (wanted and wanted[-1] == ANY) else f"unexpected {rest[0]!r} in:\n{shown}"


def _lines(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if plain := " ".join(_NUMBER.sub("N", line).split()):
            yield plain
