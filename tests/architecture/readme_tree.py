"""The file tree of the README against the files there are.

The tree is a fenced block in which some entry begins with `src/`: one entry per line, nested by indentation or by
box-drawing characters, directories end in `/`, and what follows the name is its description.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

FENCE = re.compile(r"^ *```[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
BRANCHES = str.maketrans("│├└─┬", "     ")


def tree_problems(readme: str, root: Path) -> list[str]:
    """List what the README's tree misses, repeats, invents or leaves undescribed; `root` is the repository."""
    entries = [entry for block in FENCE.findall(readme) if _is_tree(block) for entry in _entries(block)]
    if not entries:
        return ["README has no file tree (a fenced block with an entry that begins with src/)"]
    listed = Counter(path for path, _ in entries)
    sources = {file.relative_to(root).as_posix() for file in _source_files(root)}
    problems = [f"{path}: not in the tree" for path in sorted(sources - set(listed))]
    problems += [f"{path}: listed {count} times" for path, count in listed.items() if count > 1]
    problems += [f"{path}: does not exist" for path in listed if not (root / path).exists()]
    return problems + [f"{path}: no description" for path, text in entries if path in sources and not text]


def _is_tree(block: str) -> bool:
    return any(path.startswith("src/") for path, _ in _entries(block))


def _entries(block: str) -> list[tuple[str, str]]:
    """Read (path from the repository's root, description) off each line."""
    parents: list[tuple[int, str]] = []
    entries = []
    for line in block.splitlines():
        plain = line.translate(BRANCHES)
        name, _, text = plain.strip().partition(" ")
        if not name or name.startswith("#"):
            continue
        indent = len(plain) - len(plain.lstrip())
        while parents and parents[-1][0] >= indent:
            parents.pop()
        path = (parents[-1][1] if parents else "") + name.removeprefix("./")
        entries.append((path.rstrip("/"), text.strip(" #-")))
        if name.endswith("/"):
            parents.append((indent, path if name != "./" else ""))
    return [(path, text) for path, text in entries if path]


def _source_files(root: Path) -> list[Path]:
    """Every file under src/ but byte code, build metadata and empty package markers."""
    files = [file for file in (root / "src").rglob("*") if file.is_file() and file.suffix != ".pyc"]
    return [
        file for file in files if ".egg-info" not in str(file) and (file.name != "__init__.py" or file.stat().st_size)
    ]
