"""Code blocks of the documentation's guides, and the marks that say what checks them.

    <!-- checked by tests/http/test_journal.py -->      this file runs the block, or something like it
    <!-- checked: schema -->                            the readers of `block_readers` take every command of the block
    <!-- checked: not run: it needs a registry -->      nothing runs it, for this reason

A mark holds for the blocks below it, up to a heading or to text after a block.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
SCHEMA = "schema"
WITHOUT_TEST = (SCHEMA, "dry run", "by hand on a real cluster")
NOT_RUN = "not run: "
FENCE, INDENT = "```", "    "
_MARK = re.compile(r"<!-- checked(?: by (?P<file>\S+)|: (?P<how>.+?)) -->")
_OWN_COMMAND = re.compile(r"(?:rayserve-moe|make) ([a-z-]+)")
_OPTION = re.compile(r"--([a-z]+(?:-[a-z]+)+)")
_TERM = re.compile(
    r"-m ([\w.]+)|(?:localhost:8000|\$URL)(/[\w/]+)|^ *(?:import|from) ([\w.]+)"
    r"|\b(\w+_\w+)(?:\b\"?:|\()|^([A-Z_]{6,})=",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    language: str
    """Empty for an indented block."""
    text: str
    file: str = ""
    """Path of the file that runs it, from its mark."""
    how: str = ""
    """Kind of check without a test, from its mark."""


class _NavLoader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags name Python objects, as plain values."""


_NavLoader.add_multi_constructor("", lambda loader, suffix, node: None)


def pages_of(section: str) -> list[Path]:
    """Return the pages below a section of the navigation, in its order."""
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=_NavLoader)["nav"]
    return [DOCS / name for entry in nav for name in _names(entry.get(section, []))]


def _names(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    for part in entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ():
        yield from _names(part)


def blocks_of(text: str) -> list[Block]:
    """Return the code blocks of a page with the marks that hold for them."""
    found, lines, number = [], text.splitlines(), 0
    mark: re.Match[str] | None = None
    is_after_block = False
    while number < len(lines):
        line = lines[number]
        if (end := _end_of_block(lines, number)) > number:
            is_fenced = line.startswith(FENCE)
            language, content = (
                (line.strip("` "), lines[number + 1 : end - 1]) if is_fenced else ("", lines[number:end])
            )
            said = mark.groupdict("") if mark else {"file": "", "how": ""}
            shown = "\n".join(one if is_fenced else one.removeprefix(INDENT) for one in content).rstrip()
            found.append(Block(language, shown, said["file"], said["how"]))
            number, is_after_block = end, True
            continue
        if stated := _MARK.fullmatch(line):
            mark, is_after_block = stated, False
        elif line.startswith("#") or (is_after_block and line.strip()):
            mark, is_after_block = None, False
        number += 1
    return found


def _end_of_block(lines: list[str], start: int) -> int:
    """Return the number of the line after a block that begins at `start`; `start` itself if none does."""
    if lines[start].startswith(FENCE):
        return 1 + next(at for at in range(start + 1, len(lines)) if lines[at].startswith(FENCE))
    if not lines[start].startswith(INDENT) or (start and lines[start - 1].strip()):
        return start
    after = range(start, len(lines))
    return next((at for at in after if lines[at].strip() and not lines[at].startswith(INDENT)), len(lines))


def fault_of_mark(block: Block, page: str) -> str:
    """Return the fault of a block's mark; empty without one. `page` is the page's file name."""
    if block.file:
        path = ROOT / block.file
        if not path.is_file():
            return f"no file {block.file}"
        text = path.read_text(encoding="utf-8")
        known = {page, f"docs.{page.removesuffix('.md')}"} | terms_of(block)
        is_found = any(re.search(rf"(?<!\w){re.escape(term)}(?!\w)", text) for term in known)
        return "" if is_found else f"{block.file} has nothing of this block"
    if block.how.startswith(NOT_RUN):
        return "" if len(block.how.removeprefix(NOT_RUN).split()) > 1 else "no reason"
    if block.how in WITHOUT_TEST:
        return ""
    return f"unknown mark {block.how!r}" if block.how else "no mark"


def terms_of(block: Block) -> set[str]:
    """Return commands, options, modules, routes, keys and variables of a block: a test of it contains one of them."""
    commands = set(_OWN_COMMAND.findall(block.text))
    terms = {spelled for name in commands for spelled in (f"rayserve-moe {name}", f'"{name}"')}
    terms |= {name.replace("-", "_") for name in _OPTION.findall(block.text)}
    terms |= {term for found in _TERM.finditer(block.text) for term in found.groups() if term}
    return terms | {term.replace(".", "/") for term in terms}
