"""HBM bytes of an op by the shapes of its operands and results, where its schedule does not say what it copies."""

from __future__ import annotations

from rayserve_moe.tools.hlo_report import HBM
from rayserve_moe.tools.hlo_text import Instruction, ProgramText

_TAKES_A_PART = {"gather", "dynamic-slice", "slice"}
_WRITES_A_PART = {"dynamic-update-slice": 1, "scatter": 2}
"""Operations that change a part of their first operand in place, and which operand is as large as that part."""


def bytes_by_shape(program: ProgramText, instruction: Instruction, *, operands: list[Instruction]) -> int:
    """Bytes that an op reads from HBM and writes to it: operands and results that lie there, once each.

    Of an operand that only a gather or slice looks at, as much as it takes; of one that is changed in place, as much as
    changes.
    """
    inside = {part.name: part for part in program.fused(instruction)} if instruction.opcode == "fusion" else {}
    parameters = {int(part.attributes.split(")")[0]): part for part in inside.values() if part.opcode == "parameter"}
    total = 0
    for place, operand in enumerate(operands):
        whole = sum(shape.num_bytes for shape in operand.shapes if shape.space == HBM)
        parameter = parameters.get(place)
        total += min(whole, _part_of(parameter, inside)) if parameter else whole
    written = sum(shape.num_bytes for shape in instruction.shapes if shape.space == HBM)
    parts = [_num_bytes(inside.get(part.operands[_WRITES_A_PART[part.opcode]])) for part in _changes(inside)]
    return total + (min(written, sum(parts)) if parts else written)


def _part_of(parameter: Instruction, inside: dict[str, Instruction]) -> int:
    """Bytes that a fusion looks at of one of its parameters."""
    users = [part for part in inside.values() if parameter.name in part.operands]
    if all(user.opcode in _TAKES_A_PART and user.operands[0] == parameter.name for user in users):
        return sum(_num_bytes(user) for user in users)
    if all(user.opcode in _WRITES_A_PART and user.operands[0] == parameter.name for user in users):
        return 0
    return _num_bytes(parameter)


def _changes(inside: dict[str, Instruction]) -> list[Instruction]:
    return [part for part in inside.values() if part.opcode in _WRITES_A_PART and len(part.operands) > 1]


def _num_bytes(instruction: Instruction | None) -> int:
    return sum(shape.num_bytes for shape in instruction.shapes) if instruction else 0
