"""Parser of a schedule dumped by libtpu: VLIW bundles, the loops around them, and their copies from and to HBM.

A bundle takes a cycle of a core; waiting is not in a schedule. Predicated regions count as executed, unless the caller
knows how often a region runs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import and_, lshift, mul, rshift
from typing import NamedTuple

GRANULE_BYTES = 32
PIPELINE_FILL = 2
"""Trips of a pipelined loop beyond its iterations: to load the first block and to store the last block."""

_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+(?:[A-Z]{2}\s*)?: ?[ >]*\{(.*)$")
_STARTS = re.compile(r"Start region (\d+)")
_EMPTY = re.compile(r"Start/End empty region (\d+)")
_BRANCH = re.compile(r"sbr\.rel (?:\((!?)%(\w+)\) )?target = \$region(\d+)")
_COPY = re.compile(r"= dma\.(hbm_to_[vs]mem|[vs]mem_to_hbm|hbm_to_hbm) [^\n]*?size_in_granules=\*/(%?\w+)")
_STAGE = re.compile(r"iteration index, stage = (\d+)")
_BOUNDS_CHECK = re.compile(r"/\* BoundsCheck.*?(?:\*/ \}|\Z)", re.DOTALL)
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_DEFINITION = re.compile(r"%([sp]\w+) = ([\w.]+)\s+(?:\(!?%?\w+\),?)?\s*([^;}]*)")
_SPILLED = re.compile(r"= sst \[smem:\[(#allocation\d+_spill)\]\]\s+(?:\(!?%?\w+\),?)?\s*%(\w+)")
_RELOADED = re.compile(r"\[smem:\[(#allocation\d+_spill)\]\]")
_ALLOCATION = re.compile(r"\[(#allocation\d+\w*)(?: \+ \$(0x[0-9a-f]+))?\]")
_NUMBER = re.compile(r"-?\d+$")
_MAX_STEPS = 40
_ADDED = {"sadd.s32", "scalar_lea.vmem", "scalar_lea.smem", "scalar_lea.hbm"}
_MOVED = {"smov", "pmov"}
_ARITHMETIC = {"smul.u32": mul, "sshll.u32": lshift, "sshrl.u32": rshift, "sand.u32": and_}


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
    """Executions of a region that is known by its copies of a size.

    It is the largest region that only reads such arrays, or only writes them, or the smallest one that does both.
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


@dataclass(frozen=True)
class Schedule:
    """All bundles of an op or kernel; loops are listed outer before inner."""

    num_bundles: int
    loops: tuple[Loop, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    regions: tuple[Region, ...] = ()

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
                count = open_trips[place] / entered if 0 <= place < len(open_trips) else None
                is_least = is_least or count is None
            times = 1.0 if count is None else count
            runs[part.first : part.last + 1] = [run * times for run in runs[part.first : part.last + 1]]
        sizes = [transfer.num_bytes for transfer in self.transfers]
        known = sum(size * runs[transfer.address] for size, transfer in zip(sizes, self.transfers, strict=True) if size)
        return Spent(sum(runs), None if None in sizes else known, is_least)

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
        of_size = [transfer for transfer in self.transfers if transfer.num_bytes == wanted.num_bytes]
        sides = (wanted.reads, wanted.writes)

        def sides_of(region: Region) -> tuple[bool, bool]:
            inside = [one.to_hbm for one in of_size if region.first <= one.address <= region.last]
            return False in inside, True in inside

        alike = [region for region in self.regions if sides_of(region) == sides]
        if all(sides):
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
    return Schedule(len(texts), tuple(_loops(texts, starts)), tuple(_transfers(texts)), tuple(_regions(texts, starts)))


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


class Place(NamedTuple):
    """A number, or an offset from an address."""

    of: str
    """Allocation or operand whose address it is relative to; empty for a plain number."""
    offset: int


class Definition(NamedTuple):
    """An instruction that writes a register or a spilled register: its opcode and operands."""

    opcode: str
    operands: tuple[str, ...]


class ScalarDefinitions:
    """All writes of scalar and predicate registers in a schedule; `texts` are its bundles.

    Values are computed from constants: numbers, or offsets from the address of an allocation or operand. Trips are
    known if a loop's exit compares a constant with a value that grows by a constant.
    """

    def __init__(self, texts: list[str]) -> None:
        self._writes: dict[str, list[Definition]] = defaultdict(list)
        for text in texts:
            bare = _COMMENT.sub("", text)
            for name, opcode, operands in _DEFINITION.findall(bare):
                spilled = _RELOADED.match(operands) if opcode == "sld" else None
                split = (
                    (spilled.group(1),) if spilled else tuple(part.strip().lstrip("%") for part in operands.split(","))
                )
                self._writes[name].append(Definition("smov" if spilled else opcode, split))
            for slot, name in _SPILLED.findall(bare):
                self._writes[slot].append(Definition("smov", (name,)))

    def trips(self, predicate: str) -> int | None:
        """Return the trips of a loop that exits when `predicate` becomes true; None unless constants determine them."""
        exit_test = self._behind(predicate)
        if exit_test is not None and exit_test.opcode == "pmov":
            return 1 if exit_test.operands[0] == "1" else None
        if exit_test is None or not exit_test.opcode.startswith(("scmp.ge", "scmp.gt", "scmp.eq")):
            return None
        counted, limit = exit_test.operands[:2]
        grown, bound = self._single(counted), self._value(limit)
        if grown is None or bound is None or grown.opcode not in _ADDED:
            return None
        begin, step = self._begin_and_step(grown)
        if begin is None or step <= 0 or begin.of != bound.of:
            return None
        length = bound.offset - begin.offset + (1 if exit_test.opcode.startswith("scmp.gt") else 0)
        return max(1, -(-length // step))

    def _begin_and_step(self, grown: Definition) -> tuple[Place | None, int]:
        """Return the start value of a counter and its increment."""
        for counter, step in (grown.operands[:2], grown.operands[1::-1]):
            by, before = self._value(step), self._phi(counter)
            if by is not None and by.of == "" and before is not None:
                return self._value(before.operands[0]), by.offset
        return None, 0

    def _phi(self, name: str) -> Definition | None:
        for _ in range(_MAX_STEPS):
            writes = self._writes.get(name, [])
            phi = next((write for write in writes if write.opcode == "sphi"), None)
            if phi is not None or len(writes) != 1 or writes[0].opcode not in _MOVED:
                return phi
            name = writes[0].operands[0]
        return None

    def _single(self, name: str) -> Definition | None:
        writes = self._writes.get(name, [])
        return writes[0] if len(writes) == 1 else None

    def _behind(self, name: str) -> Definition | None:
        """Return the instruction that computes a register, seen through copies."""
        for _ in range(_MAX_STEPS):
            write = self._single(name)
            if write is None or write.opcode not in _MOVED or _NUMBER.match(write.operands[0]):
                return write
            name = write.operands[0]
        return None

    def _value(self, text: str, *, steps: int = _MAX_STEPS) -> Place | None:
        if _NUMBER.match(text):
            number = int(text)
            return Place("", number - (1 << 32) if number >= 1 << 31 else number)
        allocation = _ALLOCATION.match(text)
        if allocation:
            return Place(allocation.group(1), int(allocation.group(2) or "0", 16))
        write = self._single(text)
        if write is None or steps == 0:
            return None
        if write.opcode.startswith("inlined_call_operand"):
            return Place(text, 0)
        values = [self._value(operand, steps=steps - 1) for operand in write.operands[:2]]
        return _computed(write.opcode, values)


def _computed(opcode: str, values: list[Place | None]) -> Place | None:
    """Return the result of an instruction on known operands; None unless it is a number or an offset."""
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    match (opcode, known):
        case (op, [value]) if op in _MOVED:
            return value
        case (op, [one, other]) if op in _ADDED and "" in (one.of, other.of):
            return Place(one.of or other.of, one.offset + other.offset)
        case ("ssub.s32", [one, other]) if other.of in ("", one.of):
            return Place("" if other.of else one.of, one.offset - other.offset)
        case (op, [Place("", one), Place("", other)]) if op in _ARITHMETIC and min(one, other) >= 0:
            return Place("", _ARITHMETIC[op](one, other))
    return None
