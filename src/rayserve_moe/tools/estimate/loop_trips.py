"""How often a program's loops run, as far as constants and even routing say it."""

from __future__ import annotations

import re

from rayserve_moe.tools.hlo_text import Instruction, ProgramText, condition_of

_INDEX = re.compile(r"index=(\d+)")
_CONSTANT = re.compile(r"^(-?\d+)\)")


def trips_of(program: ProgramText, loop: Instruction, *, beside: dict[str, Instruction]) -> int:
    """Trips of a `while`: the constant it counts to, or those that it takes until its counter is one.

    What only a run knows are rounds: one is enough where routing is even, so a loop that counts from one has none.
    `beside` are the instructions of the loop's computation by name.
    """
    trips = program.trips(loop)
    return trips if trips is not None else max(0, 1 - _counts_from(program, loop, beside))


def _counts_from(program: ProgramText, loop: Instruction, beside: dict[str, Instruction]) -> int:
    """The constant that a loop's counter starts from; 0 where there is none."""
    condition = {part.name: part for part in program.computations[condition_of(loop)]}
    root = next(part for part in condition.values() if part.is_root)
    counter = condition.get(root.operands[0]) if root.operands else None
    index = _INDEX.search(counter.attributes) if counter else None
    state = beside.get(loop.operands[0])
    if index is None or state is None or state.opcode != "tuple":
        return 0
    start = beside.get(state.operands[int(index.group(1))])
    while start is not None and start.opcode == "copy":
        start = beside.get(start.operands[0])
    value = _CONSTANT.match(start.attributes) if start is not None and start.opcode == "constant" else None
    return int(value.group(1)) if value else 0
