"""A checkpoint and an engine for each case, made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rayserve_moe import Engine
from tests.parity.cases import CASES, ParityCase, make_checkpoint

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
        max_step_tokens=128,
        precompile_bs_paddings=[1, 8],
    ) as running:
        yield running
