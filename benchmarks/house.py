"""Costs of a package change to a reader: modules of a request, modules with a single importer, wide classes, lines.

    python -m benchmarks.house [NAME]                                        into benchmarks/results/house.json, as NAME
    PYTHONPATH=<another work tree>/src:. python -m benchmarks.house before   the same of another commit

`tests/architecture/test_budgets.py` holds the package to budgets of these figures.
"""

from __future__ import annotations

import ast
import asyncio
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

import rayserve_moe
from benchmarks.tracer import Trace, Tracer
from rayserve_moe import Engine
from rayserve_moe.config.settings import ServerSettings
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.http import create_api

OUT = Path(__file__).parent / "results" / "house.json"
PACKAGE = Path(rayserve_moe.__file__).parent
ROOT = PACKAGE.parents[1]
"""Root of the measured work tree."""
BESIDE = ("rollouts", "tools")
"""Packages that the server does not import."""
MAX_ATTRIBUTES = 16
"""Attributes of a class above which it counts as wide."""
SETTINGS = {"max_running_requests": 8, "max_step_tokens": 64, "precompile_bs_paddings": [8], "max_model_len": 512}
BODY = {"model": "tiny", "prompt": "one completion", "max_tokens": 4, "temperature": 0}


def main() -> None:
    """Measure the imported package and save the figures under a name, by default `today`."""
    name = (sys.argv[1:] or ["today"])[0]
    kept = json.loads(OUT.read_text(encoding="utf-8"))["house"] if OUT.exists() else {}
    kept[name] = {"commit": _commit(), **size_of(PACKAGE), "completion": figures_of(completion())}
    OUT.write_text(json.dumps({"house": kept}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(kept[name], indent=1))


def size_of(package: Path) -> dict[str, Any]:
    """Return lines and files by package, the number of modules with a single importer, and the wide classes."""
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in sorted(package.rglob("*.py"))}
    lines: dict[str, dict[str, int]] = defaultdict(lambda: {"files": 0, "lines": 0})
    for file in trees:
        total = lines[file.relative_to(package).parts[0].removesuffix(".py")]
        total["files"] += 1
        total["lines"] += len(file.read_text(encoding="utf-8").splitlines())
    return {
        "lines": dict(lines),
        "server_lines": sum(total["lines"] for name, total in lines.items() if name not in BESIDE),
        "one_importer": len(imported_once(package, trees)),
        "wide_classes": {name: count for tree in trees.values() for name, count in wide_classes(tree)},
    }


def imported_once(package: Path, trees: dict[Path, ast.Module]) -> list[str]:
    """Return the sorted names of modules with exactly one importer."""
    modules = {_module(package, file): tree for file, tree in trees.items()}
    importers: dict[str, set[str]] = defaultdict(set)
    for importer, tree in modules.items():
        for node in ast.walk(tree):
            for name in _imported(node):
                found = name if name in modules else name.rpartition(".")[0]
                if found in modules:
                    importers[found].add(importer)
    return sorted(name for name, users in importers.items() if len(users) == 1)


def wide_classes(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the name and the number of attributes of each class with more than `MAX_ATTRIBUTES`.

    Attributes are fields of the class body and names that a method assigns to `self`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and (count := len(set(_attributes(node)))) > MAX_ATTRIBUTES:
            yield node.name, count


def completion() -> Trace:
    """Return the trace of a warm `/v1/completions` request to an engine of this process."""
    tracer = Tracer()
    with tracer.installed(), Engine("synthetic:tiny", enable_return_routed_experts=True, **SETTINGS) as engine:
        api = create_api(ApiState(engine.loop, engine.tokenizer, ServerSettings()))
        asyncio.run(_complete(api))
        with tracer.recording() as trace:
            asyncio.run(_complete(api))
    return trace


def figures_of(trace: Trace) -> dict[str, Any]:
    """Return the numbers of modules, functions and created types in a trace, and its packages."""
    return {
        "modules": len(trace.modules),
        "functions": len(trace.functions),
        "types_created": len(trace.created),
        "packages": trace.packages,
    }


def _attributes(node: ast.ClassDef) -> Iterator[str]:
    for child in node.body:
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            yield child.target.id
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            for inner in ast.walk(child):
                is_stored = isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)
                if is_stored and isinstance(inner.value, ast.Name) and inner.value.id == "self":
                    yield inner.attr


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom) and node.module:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def _module(package: Path, file: Path) -> str:
    path = file.relative_to(package.parent).with_suffix("").as_posix()
    return path.replace("/", ".").removesuffix(".__init__")


async def _complete(api: Any) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://here", timeout=600) as client:
        answer = await client.post("/v1/completions", json=BODY)
        answer.raise_for_status()


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
