"""The page of source files, written from their first sentences by `python -m tests.architecture.files_page`.

Packages stand bottom up, as the import contract has them. Those that share the layer of `serving` stand in a part of
their own: the contract keeps everything that serves from importing them.
"""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "rayserve_moe"
PAGE = ROOT / "docs" / "files.md"
INTRODUCTION = """# Files

Written from the first sentence of every file by `python -m tests.architecture.files_page`. Packages are listed bottom
up: each may import only those above it in this list (`make check` enforces it).

# What serves
"""
BESIDE = """# Beside the server (never imported by it)
"""
UNCOMMENTED = {
    "chat_template.jinja": "The calculator's chat template",
    "config.json": "The calculator's architecture",
    "generation_config.json": "Greedy, a newline ends an answer",
    "model.safetensors": "The calculator's weights in bfloat16, as `examples/train_calculator.py` wrote them",
    "tokenizer.json": "256 ids, one for each byte",
    "tokenizer_config.json": "Which two of them are special",
    "experts_page.html": "The page `/experts`: heat map, loads of the ranks, history; one file",
}
"""Files that cannot say what they hold."""


def page() -> str:
    """Return the page's text."""
    serves, beside = packages()
    parts = [INTRODUCTION, *_section("rayserve_moe", _files_in(PACKAGE)), *map(_package, serves)]
    return "\n".join([*parts, BESIDE, *map(_package, beside)])


def packages() -> tuple[list[str], list[str]]:
    """Packages bottom up, in two lists: what serves, and those that share the layer of `serving`."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = next(contract["layers"] for contract in contracts["contracts"] if "layers" in contract)
    names = [[name for name in re.findall(r"\w+", layer) if (PACKAGE / name).is_dir()] for layer in reversed(layers)]
    beside = [name for layer in names if "serving" in layer for name in layer if name != "serving"]
    return [name for layer in names for name in layer if name not in beside], beside


def _package(name: str) -> str:
    return "\n".join(_section(name, sorted((PACKAGE / name).rglob("*"))))


def _section(title: str, files: list[Path]) -> list[str]:
    rows = [
        f"| `{file.relative_to(PACKAGE if title == 'rayserve_moe' else PACKAGE / title).as_posix()}` | {said} |"
        for file in files
        if (said := first_sentence(file))
    ]
    return [f"## {title}", "", "| file | |", "|---|---|", *rows, ""]


def _files_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.is_file())


def first_sentence(file: Path) -> str:
    """What a file says of itself; nothing for what is no source file, or an empty package marker."""
    if file.suffix == ".py":
        said = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    elif file.suffix in (".h", ".cc"):
        comment = re.match(r"(?://.*\n)*", file.read_text(encoding="utf-8"))
        said = re.sub(r"^// ?", "", comment[0], flags=re.MULTILINE) if comment else ""
    elif file.suffix == ".yaml":
        comment = re.match(r"(?:#.*\n)*", file.read_text(encoding="utf-8"))
        said = re.sub(r"^# ?", "", comment[0], flags=re.MULTILINE) if comment else ""
    elif file.parent.name == "presets":
        said = f"Config of {file.stem}, without weights, for the compile check"
    else:
        said = UNCOMMENTED.get(file.name, "")
    paragraph = " ".join(said.split("\n\n")[0].split())
    return re.split(r"(?<=[\w`)])\. (?=[A-Z`])", paragraph)[0].rstrip(".").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
