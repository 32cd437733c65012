"""Transcripts of commands in a page of the docs, and what a terminal shows held against them.

    ```console
    $ rayserve-moe serve nosuch.yaml
    rayserve-moe serve: nosuch.yaml: no such file or directory
    ```

Numbers, and the folders of the machine, may differ. A line `...` stands for any lines, even some like the next one.
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
    parts: list[list[str]] = [[]]
    for line in _lines(entry.shown):
        parts = [*parts, []] if line == ANY else [*parts[:-1], [*parts[-1], line]]
    lines, place = list(_lines(shown)), 0
    for number, part in enumerate(parts, 1):
        last = len(lines) - len(part)
        starts = range(last if number == len(parts) else place, last + 1) if number > 1 else range(1)
        found = [at for at in starts if place <= at and lines[at : at + len(part)] == part]
        if not found or (number == len(parts) and found[0] != last):
            return f"expected {part} from line {place + 1} on, in:\n{shown}"
        place = found[0] + len(part)
    return ""


def _lines(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if plain := " ".join(_NUMBER.sub("N", line).split()):
            yield plain
