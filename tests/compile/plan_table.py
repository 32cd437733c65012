"""The table of plans in docs/operate/size_a_slice.md, written by `python -m tests.compile.plan_table`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.tools.plan_slice.candidates import Assumptions, Candidate, Traffic, candidate
from rayserve_moe.tools.plan_slice.command import best_of, ranked, split_of
from rayserve_moe.tools.served_cases import case_of_config

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "operate" / "size_a_slice.md"
TRAFFIC = Traffic(1024, 1024, 256)
HEADING = "| config | slice | split, rows | GB per device: weights, KV | decode, prefill ms | at once | tok/s |"


def table() -> str:
    """Of each config the row of its own settings, and the row that the command says to take."""
    configs = sorted((ROOT / "configs").glob("*_v[0-9]*.yaml"), key=lambda path: (len(path.name), path.name))
    return (
        "\n".join([HEADING, "|---|---|---|---|---|---|---|", *(row for path in configs for row in _rows(path))]) + "\n"
    )


def written(page: str) -> str:
    """The page with this table in place of its own."""
    before, rest = page.split(HEADING)
    _, after = rest.split("\n\n", 1)
    return before + table() + "\n" + after


def _rows(path: Path) -> Iterator[str]:
    case = case_of_config(str(path), topology="", model="")
    spec = spec_from_config(case.model)
    given = replace(Assumptions(), prefill_tokens=case.settings.scheduler.max_step_tokens)
    own = candidate(spec, split_of(case), traffic=TRAFFIC, given=given)
    assert own is not None, f"{path.name} fits its slice"
    best = best_of(own, {"": ranked(spec, [case.topology], traffic=TRAFFIC, given=given)}, traffic=TRAFFIC)
    assert best is not None
    yield f"| `{path.stem}` | {case.topology} | {_split(own)} | {_numbers(own, of_gb=True)}"
    yield f"| | | {_split(best)} | {_numbers(best, of_gb=False)}"


def _split(one: Candidate) -> str:
    replicas = f", {one.split.redundant} replicas" if one.split.redundant else ""
    return f"{one.split.dp} x {one.split.tp}, {one.split.rows}{replicas}"


def _numbers(one: Candidate, *, of_gb: bool) -> str:
    memory = f"{one.weights_gb:.1f}, {one.kv_gb:.1f}" + (f" of {one.capacity_gb:.1f}" if of_gb else "")
    steps = f"{one.decode.seconds * 1e3:.1f}, {one.prefill.seconds * 1e3:.1f}"
    return f"{memory} | {steps} | {one.served} | {one.tokens_per_s:,.0f} |"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
