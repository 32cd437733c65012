"""A small real engine for the benchmarks to measure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rayserve_moe.inprocess.engine import Engine
from tests.support.engine.shared_settings import CORE


@pytest.fixture(scope="package")
def engine(quick_checkpoint: Path) -> Iterator[Engine]:
    with Engine(str(quick_checkpoint), **CORE) as engine:
        yield engine
