"""The table of programs compiled for TPU slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.markdown import markdown_table

Program = Mapping[str, Any]


def compile_gate(cases: Mapping[str, Any]) -> str:
    """Render a row per case, then the programs that did not compile; GB are 1e9 bytes of one device."""
    heading = ["case", "programs", "decode step, GB", "largest program", "its peak, GB", "limit, GB", "temporaries, GB"]
    heading += ["weights or KV copied, bytes", "compiled in, s", "of processors, s"]
    rows = [[f"{case}, {each['num_layers']} layers", *_row(each["programs"])] for case, each in cases.items()]
    failed = [[case, found["name"], found["error"]] for case, found in _failed(cases)]
    shown = [markdown_table(heading, rows)]
    return "\n\n".join([*shown, *([markdown_table(["case", "program", "error"], failed)] if failed else [])])


def _failed(cases: Mapping[str, Any]) -> list[tuple[str, Program]]:
    return [(case, found) for case, each in cases.items() for found in each["programs"] if not found["memory"]]


def _row(programs: Sequence[Program]) -> list[object]:
    compiled = [found for found in programs if found["memory"]]
    if not compiled:
        return [len(programs), *[""] * 8]
    largest = max(compiled, key=_peak)
    decode = max(filter(_is_decode_step, compiled), key=_peak, default=None)
    return [
        len(programs),
        "" if decode is None else f"{_peak(decode) / 1e9:.2f}",
        largest["name"],
        f"{_peak(largest) / 1e9:.2f}",
        f"{largest['memory']['limit'] / 1e9:.2f}",
        f"{max(found['memory']['temporaries'] for found in compiled) / 1e9:.2f}",
        f"{max(sum(found['copied_bytes'].values()) for found in compiled):,}",
        f"{sum(found['compile_s'] for found in compiled):,.0f}",
        _processor_seconds(compiled),
    ]


def _processor_seconds(compiled: Sequence[Program]) -> str:
    """Return the CPU seconds of a compilation, which hardly depend on load; empty in older results."""
    if not all("compile_cpu_s" in found for found in compiled):
        return ""
    return f"{sum(found['compile_cpu_s'] for found in compiled):,.0f}"


def _peak(program: Program) -> int:
    return program["memory"]["peak"]


def _is_decode_step(program: Program) -> bool:
    """Return True for a program that computes and samples a decode step."""
    return program["name"].startswith("decode") and not program["name"].endswith("_forward")
