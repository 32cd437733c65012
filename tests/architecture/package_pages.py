"""The README of each package, and the first sentence of each of its files."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "rayserve_moe"
MAX_LINES = 14
UNCOMMENTED = {
    "chat_template.jinja": "The calculator's chat template",
    "config.json": "The calculator's architecture",
    "generation_config.json": "Greedy, a newline ends an answer",
    "model.safetensors": "The calculator's weights in bfloat16, as `examples/train_calculator.py` wrote them",
    "tokenizer.json": "256 ids, one for each byte",
    "tokenizer_config.json": "Which two of them are special",
    "chat.html": "The page `/`: a chat with the experts of each token",
    "docs.html": "The page `/docs`: the API, read from its description",
    "experts.html": "The page `/experts`: heat map, loads of the ranks, plans",
    "header.html": "The head of every page: model, state, links",
    "page.css": "The style of every page",
    "page.js": "The code that pages share: address, key, model, state",
    "haproxy.cfg.j2": "HAProxy's configuration, over the servers that Ray Serve lists",
}
"""Files that cannot say what they hold."""


def packages() -> list[Path]:
    """Return the folders of all packages."""
    return sorted(folder for folder in PACKAGE.iterdir() if (folder / "__init__.py").is_file())


def faults(folder: Path, imported: set[str]) -> list[str]:
    """Return what is wrong with a package's README, in sentences.

    Args: imported: the packages that its modules import.
    """
    page = folder / "README.md"
    if not page.is_file():
        return ["there is no README.md"]
    text = page.read_text(encoding="utf-8")
    title, *lines = text.splitlines()
    found = [f"its title is {title!r}"] * (title != f"# {folder.name}")
    found += [f"it has more than {MAX_LINES} lines"] * (len(lines) >= MAX_LINES)
    listed = re.search(r"(?ms)^Imports (.+?)\.$", text)
    stated = set(re.findall(r"`(\w+)`", listed[1])) if listed else set()
    found += [f"it states the imports {sorted(stated)}, the code has {sorted(imported)}"] * (stated != imported)
    begin = re.findall(r"(?m)^- `([^`]+)`: .+$", text)
    found += ["it names no file to begin with"] * (not begin)
    return found + [f"it names the missing file {name}" for name in begin if not (folder / name).is_file()]


def first_sentence(file: Path) -> str:
    """Return the first sentence of a file about itself; empty for an empty marker and for an unknown kind of file."""
    if file.suffix == ".py":
        said = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    elif file.suffix in (".h", ".cc"):
        comment = re.match(r"(?://.*\n)*", file.read_text(encoding="utf-8"))
        said = re.sub(r"^// ?", "", comment[0], flags=re.MULTILINE) if comment else ""
    elif file.suffix in (".yaml", ".txtpb"):
        comment = re.match(r"(?:#.*\n)*", file.read_text(encoding="utf-8"))
        said = re.sub(r"^# ?", "", comment[0], flags=re.MULTILINE) if comment else ""
    elif file.parent.name == "presets":
        said = f"Config of {file.stem}, without weights, for the compile check"
    else:
        said = UNCOMMENTED.get(file.name, "")
    return re.split(r"(?<=[\w`)])\. (?=[A-Z`])", " ".join(said.split("\n\n")[0].split()))[0].rstrip(".")
