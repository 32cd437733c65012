"""Scripted edits: data that adds a toy feature to a scratch copy of the package, and what a process finds there.

The number of files that an edit touches is a budget of change (`tests/architecture/test_edits.py`, docs/adr/0040).
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import rayserve_moe

PACKAGE = Path(rayserve_moe.__file__).parent
ROOT = Path(__file__).resolve().parents[2]
"""Root of the work tree, which has `benchmarks`."""
TIMEOUT_S = 600.0


class AnchorError(LookupError):
    """An anchor of an edit that does not occur exactly once in its file."""


class Insertion(NamedTuple):
    """Text to insert right after an anchor, which occurs once in its file."""

    anchor: str
    text: str


@dataclass(frozen=True)
class Edit:
    """A toy feature as changes of source files; paths are relative to the package."""

    insertions: Mapping[str, tuple[Insertion, ...]] = field(default_factory=dict)
    new_files: Mapping[str, str] = field(default_factory=dict)
    listings: Mapping[str, tuple[Insertion, ...]] = field(default_factory=dict)
    """Lines of tables that list a new file. Their files do not count."""

    @property
    def num_files(self) -> int:
        """Number of files that the feature touches."""
        return len(self.insertions.keys() | self.new_files.keys())

    def edited_files(self, package: Path) -> dict[str, str]:
        """Return the new text of every touched file, tables included.

        Raises: AnchorError for an anchor that does not occur exactly once, FileExistsError for a new file that exists.
        """
        texts: dict[str, str] = {}
        for file, insertions in (*self.insertions.items(), *self.listings.items()):
            text = texts.get(file) or (package / file).read_text(encoding="utf-8")
            for anchor, inserted in insertions:
                if (count := text.count(anchor)) != 1:
                    raise AnchorError(f"{file}: found {count} times instead of once: {anchor!r}")
                text = text.replace(anchor, anchor + inserted)
            texts[file] = text
        for file, text in self.new_files.items():
            if (package / file).exists():
                raise FileExistsError(f"{file}: exists already")
            texts[file] = text
        return texts


def edit_of(name: str) -> Edit:
    """Return the `EDIT` of a module of this package."""
    return importlib.import_module(f"benchmarks.edits.{name}").EDIT


def edited_copy(edits: Iterable[Edit], folder: Path) -> Path:
    """Copy the package into a folder, apply edits to the copy one after the other, and return the folder."""
    copy = folder / PACKAGE.name
    shutil.copytree(PACKAGE, copy)
    for edit in edits:
        for file, text in edit.edited_files(copy).items():
            (copy / file).write_text(text, encoding="utf-8")
    return folder


def observed(
    names: Sequence[str], source: Path, *, flags: str = "", module: str = "benchmarks.edits.scratch"
) -> dict[str, Any]:
    """Return by name what `observe()` of modules of this package return in one process, and the imported package.

    The process runs `main` of this file by `module`, imports the package under `source`, and starts XLA with `flags`.
    """
    paths = {"PYTHONPATH": os.pathsep.join([str(source), str(ROOT)]), "XLA_FLAGS": flags}
    command = [sys.executable, "-m", module, *names]
    process = subprocess.run(
        command, cwd=source, env=os.environ | paths, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if process.returncode:
        raise RuntimeError(f"{', '.join(names)} over {source}:\n{process.stderr}")
    *_, answer = process.stdout.splitlines()
    return json.loads(answer)


def main() -> None:
    """Print as JSON what the modules that are named on the command line observe, and the imported package."""
    modules = {name: importlib.import_module(f"benchmarks.edits.{name}") for name in sys.argv[1:]}
    found = {name: module.observe() for name, module in modules.items()}
    print(json.dumps({"package": str(PACKAGE), **found}))


if __name__ == "__main__":
    main()
