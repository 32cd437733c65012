"""The Python of the guides for trainers, parted by what it needs to run."""

from __future__ import annotations

import re
from pathlib import Path

GUIDES = sorted((Path(__file__).resolve().parents[3] / "docs" / "rl").glob("*.md"))
SERVER_SECTIONS = (
    "From rollouts to the next weights",
    "Fields of a sample",
    "Updates",
    "Weights that travel without a disk",
)
"""Titles of the sections whose Python asks a server."""
_SECTION = re.compile(r"^## (.*)$", re.MULTILINE)
_SNIPPET = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def guide_text() -> str:
    """Return the text of all guides."""
    return "\n".join(guide.read_text(encoding="utf-8") for guide in GUIDES)


def guide_snippets() -> tuple[list[str], list[str]]:
    """Return all snippets, each in one of the lists: those that need no server, and those that do."""
    parts = ["", *_SECTION.split(guide_text())]
    offline: list[str] = []
    against_server: list[str] = []
    for title, text in zip(parts[::2], parts[1::2], strict=True):
        (against_server if title in SERVER_SECTIONS else offline).extend(_SNIPPET.findall(text))
    return offline, against_server
