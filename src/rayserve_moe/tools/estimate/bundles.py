"""Reading one schedule that libtpu dumped: VLIW bundles, the loops around them, and what they copy from and to HBM.

A bundle is one cycle of one core; what it says nothing about is waiting. Predicated regions count as executed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rayserve_moe.tools.estimate.trip_counts import ScalarDefinitions

GRANULE_BYTES = 32
PIPELINE_FILL = 2
"""Trips that a pipelined loop runs beyond its iterations: to load the first block and to store the last one."""

_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+(?:[A-Z]{2}\s*)?: ?[ >]*\{(.*)$")
_STARTS = re.compile(r"Start region (\d+)")
_EMPTY = re.compile(r"Start/End empty region (\d+)")
_BRANCH = re.compile(r"sbr\.rel (?:\((!?)%(\w+)\) )?target = \$region(\d+)")
_COPY = re.compile(r"= dma\.(hbm_to_[vs]mem|[vs]mem_to_hbm|hbm_to_hbm) [^\n]*?size_in_granules=\*/(%?\w+)")
_STAGE = re.compile(r"iteration index, stage = (\d+)")
_BOUNDS_CHECK = re.compile(r"/\* BoundsCheck.*?(?:\*/ \}|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Loop:
    """Bundles `first` to `last`, and how often they run each time the loop is entered; None: known at run time only.

    A pipelined loop that runs `trips` times in all has `fill` of them before its first or after its last iteration.
    """

    first: int
    last: int
    trips: int | None
    fill: int = 0

    @property
    def iterations(self) -> int | None:
        """Trips without those that only fill or empty the pipeline."""
        return None if self.trips is None else max(1, self.trips - self.fill)

    def holds(self, other: Loop) -> bool:
        return self != other and self.first <= other.first and other.last <= self.last


@dataclass(frozen=True)
class Transfer:
    """A copy between HBM and the memories of a core, started by the bundle at `address`; None: of a size known late."""

    address: int
    num_bytes: int | None


@dataclass(frozen=True)
class Spent:
    """What an op takes of its core and of HBM in one execution.

    `is_least`: a loop counts once because only a run knows its trips. `hbm_bytes` is None where the schedule does not
    know how much it copies.
    """

    bundles: float
    hbm_bytes: float | None
    is_least: bool


@dataclass(frozen=True)
class Schedule:
    """All bundles of one op or kernel; loops are listed outer before inner."""

    num_bundles: int
    loops: tuple[Loop, ...] = ()
    transfers: tuple[Transfer, ...] = ()

    def spent(self, *, iterations: int = 0, open_trips: Sequence[float] = ()) -> Spent:
        """Count bundles and bytes as often as their loops run them.

        `iterations` > 0 is what XLA says of its outermost pipelined loop. `open_trips` are the trips in all of nested
        loops that only a run can count, the innermost last.
        """
        runs = [1.0] * self.num_bundles
        is_least = False
        for loop, count in zip(self.loops, self._counts(iterations), strict=True):
            entered = runs[loop.first]
            depth = sum(other.trips is None and other.holds(loop) for other in self.loops)
            place = len(open_trips) - self._open_depth + depth
            if count is None and 0 <= place < len(open_trips):
                count = open_trips[place] / entered
            is_least = is_least or count is None
            runs[loop.first : loop.last + 1] = [run * (count or 1) for run in runs[loop.first : loop.last + 1]]
        sizes = [transfer.num_bytes for transfer in self.transfers]
        known = sum(size * runs[transfer.address] for size, transfer in zip(sizes, self.transfers, strict=True) if size)
        return Spent(sum(runs), None if None in sizes else known, is_least)

    @property
    def _open_depth(self) -> int:
        """How deep loops that only a run can count are nested."""
        open_loops = [loop for loop in self.loops if loop.trips is None]
        return max((1 + sum(other.holds(loop) for other in open_loops) for loop in open_loops), default=0)

    def _counts(self, iterations: int) -> list[int | None]:
        """Iterations of each loop per entry; XLA knows best those of the first pipelined one that no other holds."""
        counts = [loop.iterations for loop in self.loops]
        pipelined = [
            place
            for place, loop in enumerate(self.loops)
            if loop.fill and not any(other.holds(loop) for other in self.loops)
        ]
        if iterations and pipelined:
            counts[pipelined[0]] = iterations
        return counts


def read_schedule(text: str) -> Schedule:
    """Parse a file of `final_bundles`. ValueError where there is no bundle in it."""
    bundles: list[list[str]] = []
    for line in text.splitlines():
        found = _BUNDLE.match(line)
        if found:
            if int(found.group(1), 16) != len(bundles):
                raise ValueError(f"bundle {found.group(1)} of a schedule stands in place {len(bundles)}")
            bundles.append([found.group(2)])
        elif bundles:
            bundles[-1].append(line)
    if not bundles:
        raise ValueError("no bundle in the text of a schedule")
    texts = ["\n".join(lines) for lines in bundles]
    return Schedule(len(texts), tuple(_loops(texts)), tuple(_transfers(texts)))


def _loops(texts: list[str]) -> list[Loop]:
    """Loops are branches back to the start of a region; two branches to one start are one loop."""
    starts: dict[str, int] = {}
    for address, text in enumerate(texts):
        starts.update(dict.fromkeys(_STARTS.findall(text), address))
        for region in _EMPTY.findall(text):
            starts.setdefault(region, address)
    back: dict[int, tuple[int, str]] = {}
    for address, text in enumerate(texts):
        for is_exit, predicate, region in _BRANCH.findall(text):
            first = starts.get(region, address + 1)
            if first <= address:
                back[first] = max(back.get(first, (0, "")), (address, predicate if is_exit else ""))
    if not back:
        return []
    known = ScalarDefinitions(texts)
    loops = []
    for first, (last, predicate) in sorted(back.items(), key=lambda loop: (loop[0], -loop[1][0])):
        stages = [int(stage) for text in texts[first : last + 1] for stage in _STAGE.findall(text)]
        fill = PIPELINE_FILL if max(stages, default=0) > 0 else 0
        loops.append(Loop(first, last, known.trips(predicate), fill))
    return loops


def _transfers(texts: list[str]) -> list[Transfer]:
    found = []
    for address, text in enumerate(texts):
        for _, granules in _COPY.findall(_BOUNDS_CHECK.sub("", text)):
            found.append(Transfer(address, int(granules) * GRANULE_BYTES if granules.isdigit() else None))
    return found
