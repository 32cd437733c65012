"""How large the package is to a reader: lines, files, places of request flags, and the types of one HTTP completion.

python -m benchmarks.house after      into benchmarks/results/house.json, under that name
PYTHONPATH=<another work tree>/src:. python -m benchmarks.house before      the same of another commit
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

import rayserve_moe
from benchmarks.tracer import Tracer, names_of
from rayserve_moe import Engine
from rayserve_moe.config.settings import ServerSettings
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.http import create_api

OUT = Path(__file__).parent / "results" / "house.json"
PACKAGE = Path(rayserve_moe.__file__).parent
ROOT = PACKAGE.parents[1]
"""Of the work tree that is measured."""
FLAGS = ("num_top_logprobs", "cache_salt", "stream_routed_experts")
SETTINGS = {"max_running_requests": 8, "max_step_tokens": 64, "precompile_bs_paddings": [8], "max_model_len": 512}
BODY = {"model": "tiny", "prompt": "one completion", "max_tokens": 4, "temperature": 0}


def main() -> None:
    """Measure the package that is imported, and keep it under the name that is given."""
    (name,) = sys.argv[1:]
    kept = json.loads(OUT.read_text(encoding="utf-8"))["house"] if OUT.exists() else {}
    kept[name] = {"commit": _commit(), **size_of(ROOT), "completion": completion()}
    OUT.write_text(json.dumps({"house": kept}, indent=1) + "\n", encoding="utf-8")
    print(OUT)


def size_of(root: Path) -> dict[str, Any]:
    """Lines by package, files, the largest class, places of the flags, words of the README, lines of the tests."""
    package = root / "src" / "rayserve_moe"
    files = sorted(package.rglob("*.py"))
    texts = {file.relative_to(package).as_posix(): file.read_text(encoding="utf-8") for file in files}
    lines: dict[str, dict[str, int]] = {}
    for path, text in texts.items():
        total = lines.setdefault(path.partition("/")[0], {})
        for kind, count in {"files": 1, **lines_of(text)}.items():
            total[kind] = total.get(kind, 0) + count
    classes = [
        (node.end_lineno - node.lineno + 1, node.name)
        for text in texts.values()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
    ]
    return {
        "lines": lines,
        "files": len(texts),
        "types": len(classes),
        "largest_class": max(classes)[::-1],
        "flags": {flag: _places(flag, texts) for flag in FLAGS},
        "readme_words": len((root / "README.md").read_text(encoding="utf-8").split()),
        "test_lines": sum(
            len(file.read_text(encoding="utf-8").splitlines()) for file in (root / "tests").rglob("*.py")
        ),
    }


def lines_of(text: str) -> dict[str, int]:
    """Count the lines of a file by kind: code, docstrings, comments that stand alone, blank."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documented |= set(range(node.lineno, node.end_lineno + 1))
    counts = {"code": 0, "docstrings": len(documented), "comments": 0, "blank": 0}
    for number, line in enumerate(text.splitlines(), 1):
        if number not in documented:
            stripped = line.strip()
            counts["comments" if stripped.startswith("#") else "code" if stripped else "blank"] += 1
    return counts


def completion() -> dict[str, Any]:
    """Trace one warm `/v1/completions` over an engine of this process: packages, functions, types."""
    tracer = Tracer()
    with tracer.installed(), Engine("synthetic:tiny", enable_return_routed_experts=True, **SETTINGS) as engine:
        api = create_api(ApiState(engine.loop, engine.tokenizer, ServerSettings()))
        asyncio.run(_complete(api))
        with tracer.recording() as trace:
            asyncio.run(_complete(api))
    return {
        "packages": trace.packages,
        "functions": len(trace.functions),
        "types": trace.types,
        "created": names_of(trace.created),
    }


async def _complete(api: Any) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://here", timeout=600) as client:
        answer = await client.post("/v1/completions", json=BODY)
        answer.raise_for_status()


def _places(name: str, texts: dict[str, str]) -> dict[str, int]:
    found = [len(re.findall(rf"\b{name}\b", text)) for text in texts.values()]
    return {"places": sum(found), "files": sum(count > 0 for count in found)}


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
