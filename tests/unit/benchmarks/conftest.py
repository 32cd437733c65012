"""A small real engine for the benchmarks to measure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rayserve_moe.inprocess.engine import Engine


@pytest.fixture(scope="package")
def engine(core_checkpoint: Path) -> Iterator[Engine]:
    settings = {"max_running_requests": 4, "max_step_tokens": 64, "num_pages": 120, "precompile_bs_paddings": [4]}
    with Engine(str(core_checkpoint), enable_return_routed_experts=True, **settings) as engine:
        yield engine
