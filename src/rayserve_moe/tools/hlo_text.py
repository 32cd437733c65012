"""Parser of the text of an optimised XLA program: executions, trips, memory spaces, and origins of values.

Only the parts that a report needs are parsed. Instructions inside fusions and reducers run as part of another
instruction; they are kept apart from the instructions that the device executes one by one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

ITEM_BYTES = {"pred": 1, "bf16": 2, "f16": 2, "f32": 4, "f64": 8}
"""Bytes of an element for types whose name has no bit width."""

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^(ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\](\{[^}]*\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_OPERAND = re.compile(r"%([\w.\-]+)")
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_NOT_SCOPES = re.compile(
    r"[^/]*\(.*\)|while|body|cond|closed_call|shard_map|branch_\d+_fun|checkpoint|remat\d*|custom_jvp_call|p?jit"
)
_CONSTANT = re.compile(r"^(\d+)\)")
_CONTROL = ("while", "conditional", "call", "async-start", "call-start")
_NO_ESTIMATE = 1 << 62
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
_WRAPPED = re.compile(r"(kernel_metadata=\{)\n(.*)\n(\}\})")
"""The metadata of a kernel that knows its mesh spans several lines."""


@dataclass(frozen=True)
class ArrayShape:
    """Type, dimensions and memory space of an array."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0
    """0: HBM, 1: VMEM."""
    layout: str = field(default="", compare=False)
    """Order of dimensions from the one that varies fastest, then tiles, in XLA's words: `1,0:T(8,128)`."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        digits = re.search(r"\d+", self.dtype)
        size = ITEM_BYTES.get(self.dtype) or (int(digits.group()) / 8 if digits else 0)
        return int(self.num_elements * size)


@dataclass(frozen=True)
class Instruction:
    """A line of a program."""

    name: str
    opcode: str
    shapes: tuple[ArrayShape, ...]
    attributes: str
    """The rest of the line, from the first operand on."""
    is_root: bool

    @property
    def operands(self) -> list[str]:
        """Return the names of operands, in order."""
        return _OPERAND.findall(self.attributes.split(")")[0])

    @property
    def called(self) -> list[str]:
        """Return the computations that it runs or consists of."""
        branches = [name for group in _BRANCHES.findall(self.attributes) for name in _OPERAND.findall(group)]
        return [*_CALLED.findall(self.attributes), *branches]

    @property
    def op_name(self) -> str:
        """Return jax's name of the operation: its named scopes, then the primitive."""
        found = _OP_NAME.search(self.attributes)
        return found.group(1) if found else ""

    @property
    def scope(self) -> str:
        """Return the named scopes that it was traced in, joined by `/`, without jax's own wrappers."""
        *outer, _ = self.op_name.split(";")[0].split("/")
        return "/".join(part for part in outer if not _NOT_SCOPES.fullmatch(part))

    @property
    def cycles(self) -> int:
        """Return XLA's estimate, or 0."""
        found = _CYCLES.search(self.attributes)
        return int(found.group(1)) if found and int(found.group(1)) < _NO_ESTIMATE else 0


@dataclass(frozen=True)
class Execution:
    """An instruction that the device executes. All branches of a conditional count."""

    instruction: Instruction
    times: int
    """Executions in a run: the product of the constant trips of the loops around it."""
    is_least: bool
    """True if a loop around it with trips known only at run time was counted once."""
    computation: str


@dataclass(frozen=True)
class ProgramText:
    """A parsed program."""

    entry: str
    computations: dict[str, list[Instruction]] = field(repr=False)
    """Instructions in execution order, by computation."""
    sources: dict[int, str] = field(default_factory=dict, repr=False)
    """Source lines by stack frame id (`source_lines`)."""

    def executions(self, computations: Iterable[str] = ()) -> Iterator[Execution]:
        """Yield executed instructions with loops and branches unfolded, of `computations` or of the whole program."""
        for name in computations or [self.entry]:
            yield from self._executions(name, times=1, is_least=False)

    def fused(self, instruction: Instruction) -> list[Instruction]:
        """Return the instructions of a fusion, including nested ones; any other instruction itself."""
        if instruction.opcode != "fusion":
            return [instruction]
        inside = [part for name in instruction.called for part in self.computations.get(name, [])]
        return [part for nested in inside for part in self.fused(nested)]

    def source_of(self, instruction: Instruction) -> str:
        """Return the source line that an instruction or its fused parts were traced from; empty if unknown."""
        for part in [instruction, *self.fused(instruction)]:
            for frame in _FRAME.findall(part.attributes):
                if int(frame) in self.sources:
                    return self.sources[int(frame)]
        return ""

    @cached_property
    def shape_of(self) -> dict[str, ArrayShape]:
        """Return the shape of each array by the name of its instruction, which is unique in a program."""
        computations = self.computations.values()
        return {each.name: each.shapes[0] for instructions in computations for each in instructions if each.shapes}

    def _executions(self, computation: str, *, times: int, is_least: bool) -> Iterator[Execution]:
        for instruction in self.computations[computation]:
            yield Execution(instruction, times, is_least, computation)
            if instruction.opcode not in _CONTROL:
                continue
            trips = self.trips(instruction) if instruction.opcode == "while" else 1
            for name in instruction.called:
                if name != condition_of(instruction):
                    yield from self._executions(name, times=times * (trips or 1), is_least=is_least or trips is None)

    def trips(self, loop: Instruction) -> int | None:
        """Return the constant that a loop's condition compares with, or XLA's count; None if it is computed."""
        condition = self.computations[condition_of(loop)]
        root = next(instruction for instruction in condition if instruction.is_root)
        for instruction in condition:
            limit = _CONSTANT.match(instruction.attributes)
            if instruction.opcode == "constant" and limit and instruction.name in root.operands:
                return int(limit.group(1))
        known = _KNOWN_TRIPS.search(loop.attributes)
        return int(known.group(1)) if known else None


def read_program(text: str) -> ProgramText:
    """Parse the text of an optimised module. Raises ValueError if it has no entry computation."""
    computations: dict[str, list[Instruction]] = {}
    entry = current = ""
    for line in _WRAPPED.sub(r"\1\2\3", text).splitlines():
        header = _COMPUTATION.match(line)
        if header:
            current = header.group(2)
            computations[current] = []
            entry = current if header.group(1) else entry
        elif current and line.startswith("  "):
            found = _INSTRUCTION.match(line.strip())
            if found:
                computations[current].append(_instruction(found))
    if not entry:
        raise ValueError("the text of the program has no entry computation")
    return ProgramText(entry, computations, source_lines(text))


def _instruction(found: re.Match[str]) -> Instruction:
    root, name, shapes, opcode, attributes = found.groups()
    arrays = tuple(
        ArrayShape(dtype, tuple(map(int, filter(None, dims.split(",")))), _space(layout or ""), _layout(layout or ""))
        for dtype, dims, layout in _SHAPE.findall(shapes)
    )
    return Instruction(name, opcode, arrays, attributes, is_root=root is not None)


def _space(layout: str) -> int:
    found = _SPACE.search(layout)
    return int(found.group(1)) if found else 0


def _layout(layout: str) -> str:
    return _SPACE.sub("", layout).strip("{}")


def condition_of(loop: Instruction) -> str:
    """Return the condition computation of a `while`; empty if the instruction names none."""
    found = re.search(r"condition=%?([\w.\-]+)", loop.attributes)
    return found.group(1) if found else ""


@dataclass(frozen=True)
class Origins:
    """Traces values of a program to its entry parameters.

    A loop's state is traced to its initial value. A value that a loop replaces is no longer an argument, but values
    that are only read are never replaced.
    """

    program: ProgramText

    def arguments(self, computation: str, instruction: Instruction) -> list[Instruction]:
        """Return the entry parameters that the operands of an instruction come from."""
        found = (self._argument(computation, name, path=()) for name in instruction.operands)
        return [parameter for parameter in found if parameter is not None]

    def _argument(self, computation: str, name: str, *, path: tuple[int, ...]) -> Instruction | None:
        """Return the entry parameter of a value, or None; `path` indexes into a tuple, outermost index first."""
        instruction = self._by_name[computation].get(name)
        if instruction is None:
            return None
        match instruction.opcode:
            case "parameter":
                return self._outside(computation, instruction, path=path)
            case "get-tuple-element":
                index = _INDEX.search(instruction.attributes)
                assert index is not None, f"{name} has no index"
                return self._argument(computation, instruction.operands[0], path=(int(index.group(1)), *path))
            case "tuple" if path:
                return self._argument(computation, instruction.operands[path[0]], path=path[1:])
            case "while":
                return self._argument(computation, instruction.operands[0], path=path)
            case opcode if opcode in HANDED_ON and instruction.operands:
                return self._argument(computation, instruction.operands[0], path=())
        return None

    def _outside(self, computation: str, parameter: Instruction, *, path: tuple[int, ...]) -> Instruction | None:
        """Trace a computation's parameter to its caller; in the entry computation it is an argument."""
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
        """Return the callers of loop bodies and branches: the computation and its calling instruction."""
        return {
            called: (computation, instruction)
            for computation, instructions in self.program.computations.items()
            for instruction in instructions
            if instruction.opcode in ("while", "conditional")
            for called in instruction.called
        }


PACKAGE = "rayserve_moe/"
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_ROW = re.compile(r"^(\d+) (.*)$")
_NUMBER = re.compile(r"(\w+)=(\d+)")


def source_lines(text: str) -> dict[int, str]:
    """Return the innermost line in this package by stack frame id, as `file:line function`; others are left out."""
    names, numbers = _tables(text)
    locations, frames = numbers["FileLocations"], numbers["StackFrames"]
    found = {}
    for frame_id in frames:
        at = frame_id
        # The field holds the parent's id plus 1; a frame without parent has 1, or no entry.
        while at in frames:
            location = locations.get(frames[at].get("file_location_id", 0), {})
            file = names["FileNames"].get(location.get("file_name_id", 0), "")
            if PACKAGE in file:
                function = names["FunctionNames"].get(location.get("function_name_id", 0), "")
                found[frame_id] = f"{file.rpartition(PACKAGE)[2]}:{location.get('line', 0)} {function}"
                break
            at = frames[at].get("parent_frame_id", 0) - 1
    return found


def _tables(text: str) -> tuple[dict[str, dict[int, str]], dict[str, dict[int, dict[str, int]]]]:
    """Return the rows of each table by id: as text, and as numbers by field."""
    names: dict[str, dict[int, str]] = {table: {} for table in _TABLES}
    table = ""
    for line in text.splitlines():
        row = _ROW.match(line)
        if row and table:
            names[table][int(row.group(1))] = row.group(2).strip('"')
        elif line:
            table = line if line in _TABLES else ""
    numbers = {
        name: {key: {field: int(value) for field, value in _NUMBER.findall(row)} for key, row in rows.items()}
        for name, rows in names.items()
    }
    return names, numbers
