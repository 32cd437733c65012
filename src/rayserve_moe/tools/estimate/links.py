"""Time of collectives over the links of a slice, limited by the slowest cut and by the links of each chip."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rayserve_moe.tools.estimate.chips import Chip
from rayserve_moe.tools.hlo_text import Instruction

_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]+\})\}")
_BY_SHAPE = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")

Coordinates = tuple[int, ...]


@dataclass(frozen=True)
class Slice:
    """The chips of a topology and the coordinates of each device of a program; devices may share a chip."""

    chip: Chip
    devices: tuple[Coordinates, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(max(place) + 1 for place in zip(*self.devices, strict=True))

    def cuts(self) -> list[tuple[set[int], int]]:
        """Return, for each plane between two chips, the devices on one side and the number of links that cross it."""
        found = []
        for axis, size in enumerate(self.shape):
            links = math.prod(self.shape) // size * (2 if size > 2 and self.chip.is_ring(self.shape, axis) else 1)
            found += [(self._below(axis, border), links) for border in range(1, size)]
        return found

    def _below(self, axis: int, border: int) -> set[int]:
        return {number for number, place in enumerate(self.devices) if place[axis] < border}

    def min_chip_links(self) -> int:
        """Return the number of links of the chip with the fewest: one at the end of an axis, two within it."""
        axes = range(len(self.shape))
        return sum(min(self.shape[axis] - 1, 2 if self.chip.is_ring(self.shape, axis) else 1) for axis in axes)

    def seconds(self, operation: str, num_bytes: int, *, groups: Sequence[Sequence[int]]) -> float:
        """Return the time of a collective among `groups`; 0 if it crosses no link.

        The bound is the narrowest cut, or the chip that sends or receives most over its own links.

        `num_bytes` is a device's contribution: its shard for a gather, its array for a reduction, its rows for an
        exchange, which are assumed to be spread evenly.
        """
        worst = 0.0
        for side, links in self.cuts():
            crossing = sum(_crossing_bytes(operation, num_bytes, group, side) for group in groups)
            worst = max(worst, crossing / links)
        links = self.min_chip_links()
        return (
            max(worst, self._chip_bytes(operation, num_bytes, groups) / links if links else 0.0) / self.chip.link_bytes
        )

    def _chip_bytes(self, operation: str, num_bytes: int, groups: Sequence[Sequence[int]]) -> float:
        """Return the bytes that the busiest chip sends or receives in a collective whose algorithm wastes none."""
        of_chips: defaultdict[Coordinates, float] = defaultdict(float)
        for group in groups:
            members = Counter(self.devices[device] for device in group)
            for chip, num_here in members.items():
                of_chips[chip] += _bytes_of_chip(operation, num_bytes, num_here=num_here, num_all=len(group))
        return max(of_chips.values(), default=0.0)


def groups_of(instruction: Instruction, *, num_devices: int) -> list[list[int]]:
    """Return the groups of devices that exchange with each other; a single group of all devices by default."""
    listed, shaped = _LISTED.search(instruction.attributes), _BY_SHAPE.search(instruction.attributes)
    if shaped:
        groups, dims, turned = ([int(size) for size in (text or "").split(",") if size] for text in shaped.groups())
        ids = np.arange(math.prod(dims)).reshape(dims)
        return (ids.transpose(turned) if turned else ids).reshape(groups).tolist()
    if listed:
        return [[int(one) for one in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed.group(1))]
    return [list(range(num_devices))]


def _bytes_of_chip(operation: str, num_bytes: int, *, num_here: int, num_all: int) -> float:
    """Return a group's bytes from and to a chip with `num_here` of its devices, in the busier direction.

    Devices of a chip receive a gathered shard once, and add up before they send.
    """
    others = num_all - num_here
    match operation:
        case "all-gather":
            return num_bytes * others
        case "all-reduce":
            num_chips = num_all / num_here
            return 2 * num_bytes * (num_chips - 1) / num_chips
        case "reduce-scatter":
            return num_bytes * others / num_all
        case "all-to-all" | "ragged-all-to-all":
            return num_bytes * num_here * others / num_all
    return 0.0


def _crossing_bytes(operation: str, num_bytes: int, group: Sequence[int], side: set[int]) -> float:
    """Return a group's bytes over a cut, in the busier direction."""
    here = sum(device in side for device in group)
    there = len(group) - here
    if not here or not there:
        return 0.0
    match operation:
        case "all-gather":
            return num_bytes * max(here, there)
        case "all-reduce":
            return num_bytes
        case "reduce-scatter":
            return num_bytes * max(here, there) / len(group)
        case "all-to-all" | "ragged-all-to-all":
            return num_bytes * here * there / len(group)
    return num_bytes
