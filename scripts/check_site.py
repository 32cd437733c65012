"""Check a built site: no page loads anything from another host.

python scripts/check_site.py build/site
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LOADED = re.compile(
    r"""(?:<(?:script|img|iframe|source)\b[^>]*?\bsrc|<link\b(?![^>]*\brel=["']?canonical)[^>]*?\bhref)\s*=\s*["']?"""
    r"""(?P<tag>(?:https?:)?//[^"'\s>]+)|(?:url\(|@import\s+)\s*["']?(?P<css>(?:https?:)?//[^"')\s]+)""",
    re.IGNORECASE,
)


def foreign_assets(text: str) -> list[str]:
    """Return the addresses on other hosts from which a page or style sheet loads something when it is viewed."""
    return [found["tag"] or found["css"] for found in LOADED.finditer(text)]


def main() -> int:
    """Print each foreign asset; return 1 if there is one."""
    site = Path(sys.argv[1])
    files = [file for file in site.rglob("*") if file.suffix in (".html", ".css")]
    found = [(file, address) for file in files for address in foreign_assets(file.read_text(encoding="utf-8"))]
    for file, address in found:
        sys.stderr.write(f"{file.relative_to(site)}: {address}\n")
    if not files:
        sys.stderr.write(f"{site}: no page\n")
    return 1 if found or not files else 0


if __name__ == "__main__":
    sys.exit(main())
