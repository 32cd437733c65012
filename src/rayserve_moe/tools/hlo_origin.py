"""Origins of a value in an optimised program: the arguments that it is taken from without computing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from rayserve_moe.tools.hlo_text import Instruction, ProgramText

HANDED_ON = {
    "bitcast",
    "copy",
    "copy-start",
    "copy-done",
    "async-start",
    "async-done",
    "slice-start",
    "slice-done",
    "dynamic-slice",
    "slice",
    "transpose",
    "reshape",
    "convert",
    "optimization-barrier",
    "fusion",
}
"""Opcodes whose result is their first operand, whole or in part, in this or another form."""
_INDEX = re.compile(r"index=(\d+)")


@dataclass(frozen=True)
class Origins:
    """Looks up origins in one program.

    A loop's state is followed to what it started as; what a loop replaces is no argument any more, but nothing that is
    only read is replaced.
    """

    program: ProgramText

    def arguments(self, computation: str, instruction: Instruction) -> list[Instruction]:
        """The entry parameters among what the operands of an instruction are taken from."""
        found = (self._argument(computation, name, path=()) for name in instruction.operands)
        return [parameter for parameter in found if parameter is not None]

    def _argument(self, computation: str, name: str, *, path: tuple[int, ...]) -> Instruction | None:
        """The entry parameter behind a value, where `path` leads into a tuple, outermost index first."""
        instruction = self._by_name[computation].get(name)
        if instruction is None:
            return None
        match instruction.opcode:
            case "parameter":
                return self._outside(computation, instruction, path=path)
            case "get-tuple-element":
                index = _INDEX.search(instruction.attributes)
                assert index is not None, f"{name} names no index"
                return self._argument(computation, instruction.operands[0], path=(int(index.group(1)), *path))
            case "tuple" if path:
                return self._argument(computation, instruction.operands[path[0]], path=path[1:])
            case "while":
                return self._argument(computation, instruction.operands[0], path=path)
            case opcode if opcode in HANDED_ON and instruction.operands:
                return self._argument(computation, instruction.operands[0], path=())
        return None

    def _outside(self, computation: str, parameter: Instruction, *, path: tuple[int, ...]) -> Instruction | None:
        """Follow a computation's parameter to its caller; in the entry computation it is an argument."""
        if computation == self.program.entry:
            return parameter
        if computation not in self._callers:
            return None
        outer, caller = self._callers[computation]
        if caller.opcode == "conditional":
            branch = caller.called.index(computation)
            return self._argument(outer, caller.operands[1 + branch], path=path)
        return self._argument(outer, caller.operands[0], path=path)

    @cached_property
    def _by_name(self) -> dict[str, dict[str, Instruction]]:
        return {
            computation: {instruction.name: instruction for instruction in instructions}
            for computation, instructions in self.program.computations.items()
        }

    @cached_property
    def _callers(self) -> dict[str, tuple[str, Instruction]]:
        """Callers of loop bodies and branches: the computation, and the instruction in it."""
        return {
            called: (computation, instruction)
            for computation, instructions in self.program.computations.items()
            for instruction in instructions
            if instruction.opcode in ("while", "conditional")
            for called in instruction.called
        }
