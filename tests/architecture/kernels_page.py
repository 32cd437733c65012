"""The page of kernels, written from the tables of kernels by `python -m tests.architecture.kernels_page`."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rayserve_moe.experts.backends import EXPERT_BACKENDS
from rayserve_moe.kernels.candidates import Candidate, Operation, supports_all
from rayserve_moe.kernels.operations import Kernels
from rayserve_moe.kernels.table import (
    BLOCK_ATTENTION,
    CPU,
    CPU_NATIVE,
    GPU,
    GROUPED_ATTENTION,
    LATENT_ATTENTION,
    LATENT_PRODUCTS,
    SPARSE_ATTENTION,
    TPU,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"
TABLES = (CPU, TPU, GPU, CPU_NATIVE)
INTRODUCTION = """# Kernels

Look here to see which implementations an operation of a step has, in which order they are tried, and why one of them
does not take a call ("N" stands for a size of the call). Written from `kernels/table.py` and `experts/backends.py` by
`python -m tests.architecture.kernels_page`; [add a kernel](add_a_kernel.md) says how a choice is made.

A server logs its choices at its start, with the reasons against the candidates before them. "Log" is the name of the
operation there and in `kernels` of `/server_info`; operations without one have a single implementation per table. If no
candidate of a fused operation takes a call, its parts are computed by themselves (`separate`).

"""
LOG_NAMES = {
    "add_norm": "add_norm",
    "attention.norm_and_project": "norm_and_project",
    "attention.project": "project",
    "attention.project_and_write": "project_and_write",
    "attention.products": "products",
    "experts.choose": "router",
    "experts.results": "expert_product",
    "experts.sums": "expert_product",
    "recurrence.advance": "recurrence",
}
"""Names in the log by field of a table."""
Described = dict[str, list[str]]


def page() -> str:
    """Return the page's text."""
    parts = [INTRODUCTION, *_table_of_operations()]
    parts.append(
        "\n## How tokens reach experts\n\nThe backends of `experts/backends.EXPERT_BACKENDS`; log: `experts`.\n\n"
    )
    parts += _listed(EXPERT_BACKENDS)
    parts.append("\n## Attention by the format of its pool\n\nLog: `attention` and the kind of mixer.\n\n")
    tables = {
        "grouped-query": GROUPED_ATTENTION,
        "latent": LATENT_ATTENTION,
        "sparse latent": SPARSE_ATTENTION,
        "block-sparse grouped-query": BLOCK_ATTENTION,
    }
    for title, choices in tables.items():
        for table, candidates in choices.items():
            parts += _listed(candidates, before=f"{title}, `{table}`: ")
    parts.append(
        "\nProducts per head of latent attention on TPUs, in order of preference. Log: the name and the mixer.\n\n"
    )
    for name, product in LATENT_PRODUCTS.items():
        parts += _listed(product.candidates, before=f"`{name}`: ")
    parts.append("\nOther tables have their own `attention` only.\n")
    return "".join(parts)


def _table_of_operations() -> Iterator[str]:
    described = {table.name: dict(_operations(table)) for table in TABLES}
    yield "| operation | log | " + " | ".join(f"`{name}`" for name in described) + " |\n"
    yield "|---|---|" + "---|" * len(described) + "\n"
    for name in dict.fromkeys(name for operations in described.values() for name in operations):
        log = f"`{LOG_NAMES[name]}`" if name in LOG_NAMES else ""
        cells = ["<br>".join(operations.get(name, ())) for operations in described.values()]
        if not any(cells):
            continue  # bound for models with latents only
        yield f"| `{name}` | {log} | " + " | ".join(cells) + " |\n"


def _operations(record: Any, prefix: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield each operation of a table with a line per candidate."""
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, Operation):
            yield prefix + field.name, [_candidate(each) for each in value.candidates]
        elif isinstance(value, Candidate):
            yield prefix + field.name, [_candidate(value)]
        elif is_dataclass(value) and not isinstance(value, Kernels):
            yield from _operations(value, f"{prefix}{field.name}.")
        elif callable(value):
            yield prefix + field.name, [f"`{_named(value)}`"]


def _listed(candidates: Sequence[Candidate[Any]], *, before: str = "") -> Iterator[str]:
    for candidate in candidates:
        yield f"- {before}{_candidate(candidate)}\n"


def _candidate(candidate: Candidate[Any]) -> str:
    """Return the name of a candidate, the function with its reasons, and these, unless it takes all calls."""
    reason = candidate.unsupported_reason
    if reason is supports_all:
        return f"**{candidate.name}**"
    reasons = "; ".join(dict.fromkeys(_reasons(_unbound(reason))))
    return f"**{candidate.name}** (`{_named(reason)}`), unless {reasons}"


def _reasons(function: Callable[..., Any]) -> Iterator[str]:
    """Yield the reasons in the source of a function and of the functions of reasons that it calls."""
    known = inspect.getclosurevars(function).globals
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.Return) and node.value is not None:
            yield from _texts(node.value, known)
        elif isinstance(node, ast.Call):
            called = known.get(node.func.id) if isinstance(node.func, ast.Name) else None
            if callable(called) and called.__name__.startswith("unsupported"):
                yield from _reasons(called)


def _texts(value: ast.expr, known: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of a returned value that are not empty; "N" stands for what a call has."""
    if isinstance(value, ast.IfExp):
        yield from _texts(value.body, known)
        yield from _texts(value.orelse, known)
    elif isinstance(value, ast.Constant) and value.value:
        yield str(value.value)
    elif isinstance(value, ast.JoinedStr):
        yield "".join(_text(part, known) for part in value.values)


def _text(part: ast.expr, known: Mapping[str, Any]) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    assert isinstance(part, ast.FormattedValue), ast.dump(part)
    names = {node.id for node in ast.walk(part.value) if isinstance(node, ast.Name)}
    return str(eval(ast.unparse(part.value), dict(known))) if names <= known.keys() else "N"


def _unbound(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, partial):
        inner = [each for each in function.args if callable(each)]
        function = inner[0] if inner else function.func
    return function


def _named(function: Callable[..., Any]) -> str:
    plain = _unbound(function)
    return f"{plain.__module__.removeprefix('rayserve_moe.')}.{plain.__name__}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
