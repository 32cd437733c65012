"""Hooks of the documentation site: links to files of the repository that the site does not hold become plain names."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)#:\s]+)(?:#[^)]*)?\)")
ROOT = Path(__file__).resolve().parents[1]


def without_outside_links(text: str, page: str) -> str:
    """Return a page's text with each link that leaves `docs` replaced by its text and the path in the repository.

    Args: page: the page's path below `docs`. Raises: ValueError if the repository has no such file.
    """

    def replaced(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), found["target"]))
        if path.startswith("docs/"):
            return found[0]
        if path.startswith("../") or not (ROOT / path).exists():
            raise ValueError(f"{page}: a link to {path}, which does not exist")
        return f"`{path}`" if found["text"].strip("`") == path else f"{found['text']} (`{path}`)"

    return LINK.sub(replaced, text)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page before mkdocs renders it."""
    return without_outside_links(markdown, page.file.src_uri)
