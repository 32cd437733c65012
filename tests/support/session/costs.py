"""CPU seconds of tests, which depend little on the load of the machine: `pytest --costs 40`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

SECONDS = "cpu_s"


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


class Costs:
    """Records the seconds of each test with its first use of fixtures, and shows the `max_num_shown` largest."""

    def __init__(self, max_num_shown: int) -> None:
        self._max_num_shown = max_num_shown

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None]:
        before = cpu_seconds()
        try:
            return (yield)
        finally:
            item.user_properties.append((SECONDS, cpu_seconds() - before))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None]:
        before = cpu_seconds()
        try:
            return (yield)
        finally:
            item.user_properties.append((SECONDS, cpu_seconds() - before))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Show the tests that cost most, and the sum of all."""
        costs: Counter[str] = Counter()
        for report in (one for kind in terminalreporter.stats.values() for one in kind if hasattr(one, "when")):
            if report.when == "call":
                costs[report.nodeid] += sum(value for name, value in report.user_properties if name == SECONDS)
        terminalreporter.section(f"{sum(costs.values()):.0f} CPU seconds in {len(costs)} tests")
        by_cost = sorted(costs.items(), key=lambda entry: -entry[1])
        for name, seconds in by_cost[: self._max_num_shown]:
            terminalreporter.line(f"{seconds:8.2f} {name}")
