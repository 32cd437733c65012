"""The result of starting an executor, and that of hosts that start in parallel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rayserve_moe.balancing.placement import ExpertPlacement
from rayserve_moe.config.derive import PageGroup


@dataclass(frozen=True)
class StartReport:
    """The result of starting an executor: KV pages of one data rank, how experts are spread, and seconds of each part.

    `page_groups` are the groups of layers, where there are several or some have a window.
    `compile_s` is by the wall; `compile_sum_s` adds up `num_programs` programs that are compiled beside each other, of
    which `num_programs_found` were on disk. `first_run_s` is running every program once. `dtype` is that of
    the weights, but for tensors by the names of `float32_tensors`, in which `*` stands for numbers. Experts lie where
    `placement` says, None: in their own order.
    """

    num_pages: int
    load_s: float = 0.0
    compile_s: float = 0.0
    compile_sum_s: float = 0.0
    first_run_s: float = 0.0
    num_programs: int = 0
    num_programs_found: int = 0
    num_expert_ranks: int = 1
    num_redundant_experts: int = 0
    page_groups: tuple[PageGroup, ...] = ()
    dtype: str = ""
    float32_tensors: tuple[str, ...] = ()
    placement: ExpertPlacement | None = None

    def __str__(self) -> str:
        windowed = "".join(f", {size} for a window of {window}" for window, size in self.page_groups if window)
        return (
            f"{self.num_pages} KV pages per data rank{windowed}; weights loaded in {self.load_s:.1f} s, "
            f"{self.num_programs} programs compiled in {self.compile_s:.1f} s ({self.compile_sum_s:.1f} s one by one, "
            f"{self.num_programs_found} found on disk), each run in {self.first_run_s:.1f} s"
        )

    def statistics(self) -> dict[str, float]:
        """All but the pages and how experts are spread, by name."""
        numbers = {name: value for name, value in asdict(self).items() if isinstance(value, int | float)}
        left_out = ("num_pages", "num_expert_ranks", "num_redundant_experts")
        return {f"start_{name}": float(value) for name, value in numbers.items() if name not in left_out}


def slowest_start(reports: Sequence[StartReport]) -> StartReport:
    """Combine the reports of hosts that started in parallel: the worst of each number."""
    columns = zip(*(asdict(report).items() for report in reports), strict=True)
    least = ("num_pages", "num_programs_found")
    worst = {
        column[0][0]: (min if column[0][0] in least else max)(value for _, value in column)
        for column in columns
        if column[0][1] is not None
    }
    return StartReport(**worst)
