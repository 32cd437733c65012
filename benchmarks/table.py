"""Markdown tables from result files: those named, or all that are kept in benchmarks/results.

python -m benchmarks.table [benchmarks/results/small.json ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.figures import BUSY_LOAD, load_before
from benchmarks.sections import SECTIONS

RESULTS = Path(__file__).parent / "results"
TRUST = f"Above {BUSY_LOAD}, trust only the ratios of neighbouring repeats."


def main() -> None:
    """Print the tables of every file; under its name where none was named."""
    if files := sys.argv[1:]:
        print("\n\n".join(tables(_read(Path(name))) for name in files))
    else:
        found = {file.name: tables(_read(file)) for file in sorted(RESULTS.glob("*.json"))}
        print("\n\n".join(f"### {name}\n\n{text}" for name, text in found.items() if text))


def tables(result: dict[str, Any]) -> str:
    """Render one result: what ran where, then a table of everything that it holds; empty where it is none of ours."""
    sections = [section(result[name]) for name, section in SECTIONS.items() if name in result]
    if sections and "machine" in result:
        sections.insert(0, _conditions(result))
    if sections and (load := load_before(result)) > BUSY_LOAD:
        sections.insert(0, f"**Busy machine**: load average {load:.1f} before the start. {TRUST}")
    return "\n\n".join(sections)


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def _conditions(result: dict[str, Any]) -> str:
    machine = result["machine"]
    versions = machine["versions"]
    ours, size = result["ours"], f"{result['num_parameters'] / 1e6:,.0f} M parameters"
    devices = f"{ours['devices']} {machine['device']} {'device' if ours['devices'] == 1 else 'devices'}"
    peer = f"; {_peer(result['theirs'], versions)}" if "theirs" in result else ""
    return (
        f"`{result['size']}` checkpoint ({size}), {machine['cpu']}, {machine['cores']} cores; "
        f"ours computes in {ours['dtype']} on {devices} (jax {versions['jax']}){peer}. "
        f"Medians of {result['repeats']} repeats (min-max); "
        f"load average before the start {machine['load_before']:.1f}."
    )


def _peer(theirs: dict[str, Any] | None, versions: dict[str, str]) -> str:
    if not theirs:
        return "transformers was not run"
    return (
        f"transformers {versions['transformers']} `generate` in {theirs['dtype']} "
        f"({theirs['experts']}, {theirs['threads']} threads, torch {versions['torch']})"
    )


if __name__ == "__main__":
    main()
