"""Parser of a schedule dumped by libtpu: VLIW bundles, the loops around them, and their copies from and to HBM.

A bundle takes a cycle of a core; waiting is not in a schedule. Predicated regions count as executed, unless the caller
knows how often a region runs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rayserve_moe.tools.estimate.scalars import ScalarDefinitions

GRANULE_BYTES = 32
PIPELINE_FILL = 2
"""Trips of a pipelined loop beyond its iterations: to load the first block and to store the last block."""

_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+(?:[A-Z]{2}\s*)?: ?[ >]*\{(.*)$")
_STARTS = re.compile(r"Start region (\d+)")
_EMPTY = re.compile(r"Start/End empty region (\d+)")
_BRANCH = re.compile(r"sbr\.rel (?:\((!?)%(\w+)\) )?target = \$region(\d+)")
_COPY = re.compile(r"= dma\.(hbm_to_[vs]mem|[vs]mem_to_hbm|hbm_to_hbm) [^\n]*?size_in_granules=\*/(%?\w+)")
_STAGE = re.compile(r"iteration index, stage = (\d+)")
_WAIT = re.compile(r"= (?:dma\.done\.wait|vwait)\b")
_MATRIX_OP = re.compile(r"= vmatmul\.")
LARGE_BYTES = 256 << 10
"""Minimum bytes of a copy that a kernel streams; smaller ones are indices and rows."""
_BOUNDS_CHECK = re.compile(r"/\* BoundsCheck.*?(?:\*/ \}|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Loop:
    """A loop over bundles."""

    first: int
    """First bundle."""
    last: int
    """Last bundle."""
    trips: int | None
    """Executions per entry of the loop; None: known only at run time."""
    fill: int = 0
    """Trips of a pipelined loop before its first or after its last iteration."""

    @property
    def iterations(self) -> int | None:
        """Return the trips without those that fill or empty the pipeline."""
        return None if self.trips is None else max(1, self.trips - self.fill)

    def holds(self, other: Loop) -> bool:
        return self != other and self.first <= other.first and other.last <= self.last


@dataclass(frozen=True)
class Transfer:
    """A copy between HBM and a core's memories."""

    address: int
    """The bundle that starts it."""
    num_bytes: int | None
    """None: known only at run time."""
    to_hbm: bool = False


@dataclass(frozen=True)
class Region:
    """Bundles that a branch may skip."""

    first: int
    """First bundle."""
    last: int
    """Last bundle."""

    def holds(self, other: Region) -> bool:
        return self != other and self.first <= other.first and other.last <= self.last


@dataclass(frozen=True)
class RegionRuns:
    """Executions of a region that has a copy of `num_bytes`, and copies of any size in the given directions alone.

    Of several such regions it is the outermost, or the innermost if it reads and writes.
    """

    num_bytes: int
    reads: bool
    writes: bool
    runs: float
    """Executions in all."""


@dataclass(frozen=True)
class Spent:
    """Cost of an op's execution."""

    bundles: float
    hbm_bytes: float | None
    """None if the schedule does not give a size."""
    is_least: bool
    """True if a loop with unknown trips was counted once."""
    lead_bundles: float = 0.0
    """Bundles before the first large copy from HBM starts; 0 without such a copy."""
    num_waits: int = 0
    """Waits that no copy hides: outside loops over copies, and not beside the first large copy."""
    visits: float = 1.0
    """Copies from HBM that follow each other, those of several arrays at a time counted once."""
    matrix_ops: float = 0.0
    """Instructions of all matrix units."""


@dataclass(frozen=True)
class Schedule:
    """All bundles of an op or kernel; loops are listed outer before inner."""

    num_bundles: int
    loops: tuple[Loop, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    regions: tuple[Region, ...] = ()
    waits: tuple[int, ...] = ()
    """Bundles that wait for a copy or for another device."""
    matrix_ops: tuple[int, ...] = ()
    """Bundles of matrix instructions, once for each instruction."""

    def spent(
        self,
        *,
        iterations: int = 0,
        open_trips: Sequence[float] = (),
        trips_each: Sequence[float] = (),
        region_runs: Sequence[RegionRuns] = (),
    ) -> Spent:
        """Count bundles and bytes with the trips of their loops.

        `iterations` > 0 is XLA's count for the outermost pipelined loop. `open_trips` are the total trips of nested
        loops whose trips are known only at run time, innermost last. `trips_each` are those per entry instead, of every
        such loop in order. `region_runs` are in order too; a region that is not among them is executed.
        """
        runs = [1.0] * self.num_bundles
        counts: dict[Loop, float | None] = dict(zip(self.loops, self._counts(iterations), strict=True))
        still_open = [loop for loop in self.loops if counts[loop] is None]
        if len(trips_each) == len(still_open):
            counts |= dict(zip(still_open, trips_each, strict=True))
        executed, is_least = self._known_runs(region_runs), False
        for part in sorted([*self.loops, *executed], key=lambda part: (part.first, -part.last)):
            entered = runs[part.first]
            count = counts[part] if isinstance(part, Loop) else executed[part] / (entered or 1.0)
            if isinstance(part, Loop) and count is None:
                place = len(open_trips) - self._open_depth + self._depth_of(part)
                count = open_trips[place] / (entered or 1.0) if 0 <= place < len(open_trips) else None
                is_least = is_least or count is None
            times = 1.0 if count is None else count
            runs[part.first : part.last + 1] = [run * times for run in runs[part.first : part.last + 1]]
        sizes = [transfer.num_bytes for transfer in self.transfers]
        known = sum(size * runs[transfer.address] for size, transfer in zip(sizes, self.transfers, strict=True) if size)
        reads = [transfer for transfer in self.transfers if not transfer.to_hbm]
        copying = [loop for loop in self.loops if any(loop.first <= read.address <= loop.last for read in reads)]
        hidden = [*copying, *self._beside_first_copy(copying)]
        return Spent(
            sum(runs),
            None if None in sizes else known,
            is_least,
            lead_bundles=self._lead(runs),
            num_waits=sum(not any(part.first <= at <= part.last for part in hidden) for at in self.waits),
            visits=max((runs[read.address] for read in reads), default=1.0),
            matrix_ops=sum(runs[at] for at in self.matrix_ops),
        )

    def _beside_first_copy(self, copying: Sequence[Loop]) -> list[Region]:
        """Return the bundles from the first large copy to the loop over later ones, if it stands ahead of that loop."""
        large = [one.address for one in self.transfers if not one.to_hbm and (one.num_bytes or 0) >= LARGE_BYTES]
        after = [loop.first for loop in copying if large and large[0] < loop.first <= large[-1]]
        return [Region(large[0], min(after))] if after else []

    def _lead(self, runs: Sequence[float]) -> float:
        """Return the bundles that run before the first large copy from HBM starts for the first time."""
        copies = (one for one in self.transfers if not one.to_hbm and (one.num_bytes or 0) >= LARGE_BYTES)
        address = next((copy.address for copy in copies), 0)
        repeated = min((loop.first for loop in self.loops if loop.first <= address <= loop.last), default=address)
        return sum(runs[:repeated]) + sum(runs[repeated:address]) / (runs[address] or 1.0)

    def _known_runs(self, wanted: Sequence[RegionRuns]) -> dict[Region, float]:
        """Return the executions of regions that the caller knows."""
        found: dict[Region, float] = {}
        for runs in wanted:
            place = next((region for region in self._copying(runs) if region not in found), None)
            if place is not None:
                found[place] = runs.runs
        return found

    def _copying(self, wanted: RegionRuns) -> list[Region]:
        """Return the regions whose copies are those of `wanted`, in order."""

        def is_wanted(region: Region) -> bool:
            inside = [one for one in self.transfers if region.first <= one.address <= region.last]
            sides = {one.to_hbm for one in inside}
            has_size = any(one.num_bytes == wanted.num_bytes for one in inside)
            return has_size and (False in sides, True in sides) == (wanted.reads, wanted.writes)

        alike = [region for region in self.regions if is_wanted(region)]
        if wanted.reads and wanted.writes:
            return [region for region in alike if not any(region.holds(other) for other in alike)]
        return [region for region in alike if not any(other.holds(region) for other in alike)]

    @property
    def _open_depth(self) -> int:
        """Return the nesting depth of loops whose trips are known only at run time."""
        return max((1 + self._depth_of(loop) for loop in self.loops if loop.trips is None), default=0)

    def _depth_of(self, loop: Loop) -> int:
        """Return the number of loops around a loop whose trips are known only at run time."""
        return sum(other.trips is None and other.holds(loop) for other in self.loops)

    def _counts(self, iterations: int) -> list[int | None]:
        """Return the iterations of each loop per entry; XLA's count replaces the first outermost pipelined loop's."""
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
    """Parse a file of `final_bundles`. Raises ValueError if it contains no bundle."""
    bundles: list[list[str]] = []
    for line in text.splitlines():
        found = _BUNDLE.match(line)
        if found:
            if int(found.group(1), 16) != len(bundles):
                raise ValueError(f"bundle {found.group(1)} of a schedule is at index {len(bundles)}")
            bundles.append([found.group(2)])
        elif bundles:
            bundles[-1].append(line)
    if not bundles:
        raise ValueError("no bundle in the text of a schedule")
    texts = ["\n".join(lines) for lines in bundles]
    starts = _region_starts(texts)
    return Schedule(
        len(texts),
        tuple(_loops(texts, starts)),
        tuple(_transfers(texts)),
        tuple(_regions(texts, starts)),
        waits=tuple(address for address, text in enumerate(texts) if _WAIT.search(text)),
        matrix_ops=tuple(address for address, text in enumerate(texts) for _ in _MATRIX_OP.findall(text)),
    )


def _region_starts(texts: list[str]) -> dict[str, int]:
    """Return the first bundle of each region by its number."""
    starts: dict[str, int] = {}
    for address, text in enumerate(texts):
        starts.update(dict.fromkeys(_STARTS.findall(text), address))
        for region in _EMPTY.findall(text):
            starts.setdefault(region, address)
    return starts


def _regions(texts: list[str], starts: dict[str, int]) -> list[Region]:
    """Return what branches forward with a predicate may skip, outer regions before inner ones."""
    found = {
        Region(address + 1, starts[region] - 1)
        for address, text in enumerate(texts)
        for _, predicate, region in _BRANCH.findall(text)
        if predicate and starts.get(region, 0) > address + 1
    }
    return sorted(found, key=lambda region: (region.first, -region.last))


def _loops(texts: list[str], starts: dict[str, int]) -> list[Loop]:
    """Return the loops: branches back to the start of a region. Two branches to the same start are one loop."""
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
        for way, granules in _COPY.findall(_BOUNDS_CHECK.sub("", text)):
            num_bytes = int(granules) * GRANULE_BYTES if granules.isdigit() else None
            found.append(Transfer(address, num_bytes, to_hbm=way.endswith("to_hbm")))
    return found
