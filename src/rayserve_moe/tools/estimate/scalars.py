"""Values of scalar registers in a schedule, as far as constants determine them: the trips of its loops."""

from __future__ import annotations

import re
from collections import defaultdict
from operator import and_, lshift, mul, rshift
from typing import NamedTuple

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
