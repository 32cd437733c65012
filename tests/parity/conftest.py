"""A checkpoint and an engine for each case, made once; after the run, how near the families came."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.terminal import TerminalReporter

from rayserve_moe import Engine
from tests.parity.cases import CASES, ParityCase, make_checkpoint

FIGURES = {
    "logit difference": max,
    "logit difference of the reference in float32": max,
    "greedy ids": sum,
    "routing rows at ties": sum,
    "choices of an index at ties": sum,
    "choices of an index": sum,
    "routing rows": sum,
    "knobs turned": sum,
    "least move of a knob": min,
}
"""What tests over families record, and what one figure of all their models is."""

SLOW = [pytest.param(case, id=case.name, marks=pytest.mark.slow) for case in CASES[1:]]


@pytest.fixture(scope="session", params=[pytest.param(CASES[0], id=CASES[0].name), *SLOW])
def case(request: pytest.FixtureRequest) -> ParityCase:
    return request.param


@pytest.fixture(scope="session")
def checkpoint(case: ParityCase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(case, tmp_path_factory.mktemp("parity"))


@pytest.fixture(scope="session")
def engine(checkpoint: Path) -> Iterator[Engine]:
    # Fewer tokens per step than the longest prompt, so that prompts are cut into chunks and mix with decoding.
    with Engine(
        model_path=str(checkpoint),
        enable_return_routed_experts=True,
        dtype="float32",
        max_running_requests=8,
        num_pages=256,
        max_step_tokens=64,
        precompile_bs_paddings=[8],
        structured_output=False,
    ) as running:
        yield running


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """State over how many models the families were compared, and how near they came."""
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.getreports(outcome)]
    recorded = [pair for report in reports if report.when == "call" for pair in report.user_properties]
    for name, over in FIGURES.items():
        if values := [value for recorded_name, value in recorded if recorded_name == name]:
            terminalreporter.write_line(f"{name}: {over(values):g} ({over.__name__} of {len(values)} tests)")
