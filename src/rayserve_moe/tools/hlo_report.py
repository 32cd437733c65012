"""What an optimised program does with memory and links: copies of weights and KV, collectives, kernels, cycles."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from rayserve_moe.tools.hlo_text import ArrayShape, Execution, Instruction, Origins, ProgramText

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
MOVES = {
    "parameter",
    "constant",
    "bitcast",
    "copy",
    "copy-done",
    "dynamic-slice",
    "slice",
    "slice-done",
    "transpose",
    "reshape",
    "convert",
    "concatenate",
    "pad",
    "select",
    "broadcast",
    "iota",
    "tuple",
    "get-tuple-element",
}
"""Opcodes that only move data or change its form. A gather is none of a weight: it looks up tokens."""
MOVES_OF_ACTIVATIONS = MOVES - {"convert", "select", "iota"}
"""Of an activation, another type or a mask is something computed."""
NO_RESULT_OF_THEIR_OWN = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "broadcast", "iota"}
HBM = 0
LEAST_COPY_BYTES = 4 << 10
LAYER_SCOPE = "attention"
"""Every layer has a block of that name."""
_GROUP = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_GROUPS_BY_SHAPE = re.compile(r"replica_groups=\[(\d+),(\d+)\]")


@dataclass(frozen=True)
class Piece:
    """An array that should be read in place: a weight of one layer, or the pages of one layer.

    A result is a copy of it when its last dimensions are these in any order, in the same type, with at least
    `least_elements` elements, and it is taken from an argument of the program. What a program writes to
    (`is_written`) is not followed to the arguments, so its size alone must identify it.
    """

    kind: str
    dtype: str
    dims: tuple[int, ...]
    least_elements: int
    is_written: bool = False


@dataclass(frozen=True)
class CopyOfPiece:
    """A result in HBM that holds nothing but a piece or several; bytes of one, and how often it is made in a run."""

    kind: str
    instruction: str
    shape: str
    num_bytes: int
    times: int


@dataclass(frozen=True)
class ActivationCopy:
    """A result that is an activation once more, in another layout or place: its bytes, how often, in which block.

    `cycles` are what XLA estimates for one.
    """

    instruction: str
    shape: str
    num_bytes: int
    times: int
    block: str
    is_in_hbm: bool
    cycles: int


@dataclass(frozen=True)
class Collective:
    """One kind of exchange: devices per group, bytes of the result on a device, how often in a run (at least)."""

    operation: str
    group_size: int
    shape: str
    num_bytes: int
    times: int
    is_least: bool


def copies_of(program: ProgramText, pieces: list[Piece]) -> list[CopyOfPiece]:
    """Every copy of a piece that the program makes in HBM out of its arguments. What it updates in place is none.

    An argument that has no such piece in it is none that the copy could be of: tokens may have a weight's shape.
    """
    found, origins = [], Origins(program)
    for execution in program.executions():
        instruction = execution.instruction
        if instruction.opcode in NO_RESULT_OF_THEIR_OWN:
            continue
        for shape in instruction.shapes:
            piece = _piece_of(shape, pieces)
            if piece is None or shape.space != HBM or not _only_moves(program, instruction, result=shape, piece=piece):
                continue
            taken_from = origins.arguments(execution.computation, instruction)
            if piece.is_written or any(_piece_of(own, [piece]) for argument in taken_from for own in argument.shapes):
                found.append(CopyOfPiece(piece.kind, instruction.name, _text(shape), shape.num_bytes, execution.times))
    return found


def activation_copies(program: ProgramText, pieces: list[Piece]) -> list[ActivationCopy]:
    """Every result into which activations are only moved, of `LEAST_COPY_BYTES` or more, in HBM or in VMEM.

    What XLA fetches ahead from one to the other is none, nor is a fill.
    """
    found = []
    for execution in program.executions():
        instruction = execution.instruction
        if instruction.opcode in NO_RESULT_OF_THEIR_OWN or instruction.opcode.endswith(("-start", "-done")):
            continue
        for shape in instruction.shapes:
            is_large, is_in_hbm = shape.num_bytes >= LEAST_COPY_BYTES, shape.space == HBM
            if is_large and _piece_of(shape, pieces) is None and _moves_all(program, instruction, result=shape):
                copy = instruction.name, _text(shape), shape.num_bytes, execution.times
                found.append(ActivationCopy(*copy, instruction.scope, is_in_hbm, instruction.cycles))
    return found


def ops_per_layer(program: ProgramText) -> int:
    """Operations that XLA puts a cost on in the body of the loop over layers, the longest if there are several.

    Loops and branches inside count once; 0 where there is no such loop.
    """
    counts = [0]
    for execution in program.executions():
        loop = execution.instruction
        if loop.opcode == "while":
            inside = [each.instruction for each in program.executions(loop.called)]
            if any(f"/{LAYER_SCOPE}/" in each.op_name for each in inside):
                counts.append(sum(each.cycles > 0 for each in inside))
    return max(counts)


def collectives_of(program: ProgramText) -> list[Collective]:
    """All exchanges between devices; like ones are added up."""
    counts: Counter[Collective] = Counter()
    for execution in program.executions():
        instruction, operation = execution.instruction, execution.instruction.opcode.removesuffix("-start")
        if operation in COLLECTIVES:
            shape = max(_result_shapes(program, execution), key=lambda shape: shape.num_bytes)
            kind = Collective(operation, _group_size(instruction), _text(shape), shape.num_bytes, 0, execution.is_least)
            counts[kind] += execution.times
    return [
        Collective(kind.operation, kind.group_size, kind.shape, kind.num_bytes, times, kind.is_least)
        for kind, times in counts.items()
    ]


def kernels_of(program: ProgramText) -> dict[str, int]:
    """Mosaic kernels by name, and how often each is called in a run, at least."""
    counts: Counter[str] = Counter()
    for execution in program.executions():
        instruction = execution.instruction
        if instruction.opcode == "custom-call" and "tpu_custom_call" in instruction.attributes:
            counts[re.sub(r"(\.clone)*\.\d+$", "", instruction.name)] += execution.times
    return dict(counts)


def cycles_of(program: ProgramText) -> tuple[int, int]:
    """XLA's estimated cycles, loop bodies counted once, and counted as often as they run.

    They exist for XLA's own fusions only, so the sums say whether a program grew, never how long it takes.
    """
    executions = list(program.executions())
    once = sum(execution.instruction.cycles for execution in executions)
    return once, sum(execution.instruction.cycles * execution.times for execution in executions)


def _piece_of(shape: ArrayShape, pieces: list[Piece]) -> Piece | None:
    dims = [size for size in shape.dims if size != 1]
    for piece in pieces:
        own = sorted(size for size in piece.dims if size != 1)
        same_type = shape.dtype == piece.dtype and shape.num_elements >= piece.least_elements
        if same_type and sorted(dims[-len(own) :]) == own:
            return piece
    return None


def _only_moves(program: ProgramText, instruction: Instruction, *, result: ArrayShape, piece: Piece) -> bool:
    """Whether nothing of the result's size is computed on the way, nor written into an array that is there already."""
    moves = MOVES | {"gather"} if piece.is_written else MOVES
    return all(part.opcode in moves for part in program.fused(instruction) if _is_as_large(part, result))


def _moves_all(program: ProgramText, instruction: Instruction, *, result: ArrayShape) -> bool:
    """Whether a result consists of what is moved there from arrays at least as large together."""
    parts = program.fused(instruction)
    if any(part.opcode not in MOVES_OF_ACTIVATIONS for part in parts if _is_as_large(part, result)):
        return False
    if instruction.opcode != "fusion":
        return True
    moved = sum(shape.num_elements for part in parts if part.opcode == "parameter" for shape in part.shapes)
    return moved >= result.num_elements


def _is_as_large(part: Instruction, result: ArrayShape) -> bool:
    return any(shape.num_elements >= result.num_elements for shape in part.shapes)


def _result_shapes(program: ProgramText, execution: Execution) -> tuple[ArrayShape, ...]:
    """Shapes of the result; an operation that starts has its result where it is done."""
    instruction = execution.instruction
    if not instruction.opcode.endswith("-start"):
        return instruction.shapes
    for other in program.computations[execution.computation]:
        if other.opcode.endswith("-done") and instruction.name in other.operands:
            return other.shapes
    return instruction.shapes


def _group_size(instruction: Instruction) -> int:
    """Devices of a group; 0 where the program does not say."""
    listed, shaped = _GROUP.search(instruction.attributes), _GROUPS_BY_SHAPE.search(instruction.attributes)
    if listed:
        return listed.group(1).count(",") + 1
    return int(shaped.group(2)) if shaped else 0


def _text(shape: ArrayShape) -> str:
    return f"{shape.dtype}[{','.join(str(size) for size in shape.dims)}]"
