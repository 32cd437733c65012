"""Use of memory and links by an optimised program: copies of weights and KV, collectives, kernels, cycles."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
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
"""Opcodes that only move data or change its form. A gather does not count for weights: it looks up tokens."""
MOVES_OF_ACTIVATIONS = MOVES - {"convert", "select", "iota"}
"""For activations, a change of type or a mask is a computation."""
NO_RESULT_OF_THEIR_OWN = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "broadcast", "iota"}
HBM = 0
MIN_COPY_BYTES = 4 << 10
LAYER_SCOPE = "attention"
"""Every layer has a block of this name."""
TRITON = 'custom_call_target="__gpu$xla.gpu.triton"'
LAUNCHED_BY_GPUS = {"fusion", "custom-call", "copy", "sort", "scatter", "dynamic-update-slice", "reduce", "transpose"}
"""Opcodes of GPU programs that are a kernel each."""
_GROUP = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_GROUPS_BY_SHAPE = re.compile(r"replica_groups=\[(\d+),(\d+)\]")


@dataclass(frozen=True)
class Piece:
    """An array that should be read in place: a weight of a layer, or the pages of a layer.

    A result is a copy of it if its last dimensions are these in any order, in the same type, with at least
    `min_elements` elements, and it comes from an argument of the program.
    """

    kind: str
    dtype: str
    dims: tuple[int, ...]
    min_elements: int
    is_written: bool = False
    """True if the program writes to it: it is not traced to the arguments."""
    pool_elements: int = 0
    """Elements of the array that holds it, if it is written: a copy has at most as many, and is moved from an array of
    at least as many. 0: its own size alone identifies it."""


@dataclass(frozen=True)
class CopyOfPiece:
    """A result in HBM that holds only pieces."""

    kind: str
    instruction: str
    shape: str
    num_bytes: int
    """Bytes of a copy."""
    times: int
    """Number of copies in a run."""


@dataclass(frozen=True)
class ActivationCopy:
    """A result that repeats an activation in another layout or place."""

    instruction: str
    shape: str
    num_bytes: int
    times: int
    """Number of copies in a run."""
    block: str
    """Named scope."""
    is_in_hbm: bool
    cycles: int
    """XLA's estimate for a copy."""


@dataclass(frozen=True)
class Collective:
    """A kind of exchange between devices."""

    operation: str
    group_size: int
    """Devices per group."""
    shape: str
    num_bytes: int
    """Bytes of the result on a device."""
    times: int
    """Number of exchanges in a run."""
    is_least: bool
    """True if `times` is a minimum."""


def copies_of(program: ProgramText, pieces: list[Piece]) -> list[CopyOfPiece]:
    """Return every copy of a piece that the program makes in HBM from its arguments. Updates in place do not count.

    The argument must contain such a piece, because token arrays may have the shape of a weight.
    """
    found, origins = [], Origins(program)
    for execution in program.executions():
        instruction = execution.instruction
        if instruction.opcode in NO_RESULT_OF_THEIR_OWN:
            continue
        for shape in instruction.shapes:
            if shape.space != HBM:
                continue
            copied = (piece for piece in _pieces_of(shape, pieces) if _is_copy(origins, execution, shape, piece))
            if (piece := next(copied, None)) is not None:
                found.append(CopyOfPiece(piece.kind, instruction.name, _text(shape), shape.num_bytes, execution.times))
    return found


def _is_copy(origins: Origins, execution: Execution, result: ArrayShape, piece: Piece) -> bool:
    """Return True if a result of the shape of a piece is moved from where such pieces lie."""
    program, instruction = origins.program, execution.instruction
    if not _only_moves(program, instruction, result=result, piece=piece):
        return False
    if piece.is_written:
        return not piece.pool_elements or (
            result.num_elements <= piece.pool_elements and _is_moved_from(program, execution, result, piece)
        )
    taken_from = origins.arguments(execution.computation, instruction)
    return any(any(_pieces_of(own, [piece])) for argument in taken_from for own in argument.shapes)


def activation_copies(program: ProgramText, pieces: list[Piece]) -> list[ActivationCopy]:
    """Return results that only move activations, of at least `MIN_COPY_BYTES`, in HBM or VMEM.

    XLA's prefetches between the two memories and fills do not count.
    """
    found = []
    for execution in program.executions():
        instruction = execution.instruction
        if instruction.opcode in NO_RESULT_OF_THEIR_OWN or instruction.opcode.endswith(("-start", "-done")):
            continue
        for shape in instruction.shapes:
            is_large, is_in_hbm = shape.num_bytes >= MIN_COPY_BYTES, shape.space == HBM
            is_piece = any(_pieces_of(shape, pieces))
            if is_large and not is_piece and _moves_all(program, instruction, result=shape):
                copy = instruction.name, _text(shape), shape.num_bytes, execution.times
                found.append(ActivationCopy(*copy, instruction.scope, is_in_hbm, instruction.cycles))
    return found


def ops_per_layer(program: ProgramText) -> int:
    """Return the number of costed operations in the body of the loop over layers, the maximum over several loops.

    On a GPU each kernel is one. Loops and branches inside count once; 0 without such a loop.
    """
    counts, kernels = [0], [0]
    for execution in program.executions():
        loop = execution.instruction
        if loop.opcode == "while":
            inside = [each.instruction for each in program.executions(loop.called)]
            if any(f"/{LAYER_SCOPE}/" in each.op_name for each in inside):
                counts.append(sum(each.cycles > 0 for each in inside))
                kernels.append(sum(each.opcode in LAUNCHED_BY_GPUS for each in inside))
    return max(counts) or max(kernels)


def collectives_of(program: ProgramText) -> list[Collective]:
    """Return all exchanges between devices; equal exchanges are added up."""
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
    """Return Mosaic and Triton kernels by name with their minimum number of calls in a run."""
    counts: Counter[str] = Counter()
    for execution in program.executions():
        instruction = execution.instruction
        if instruction.opcode != "custom-call":
            continue
        if "tpu_custom_call" in instruction.attributes:
            counts[re.sub(r"(\.clone)*\.\d+$", "", instruction.name)] += execution.times
        elif TRITON in instruction.attributes:
            counts[instruction.op_name.split("/")[-2]] += execution.times
    return dict(counts)


def cycles_of(program: ProgramText) -> tuple[int, int]:
    """Return XLA's estimated cycles: with loop bodies counted once, and counted with their trips.

    They exist only for XLA's own fusions, so the sums show whether a program grew, never how long it takes.
    """
    executions = list(program.executions())
    once = sum(execution.instruction.cycles for execution in executions)
    return once, sum(execution.instruction.cycles * execution.times for execution in executions)


def _pieces_of(shape: ArrayShape, pieces: list[Piece]) -> Iterator[Piece]:
    """Yield the pieces that an array of a shape may hold."""
    dims = [size for size in shape.dims if size != 1]
    for piece in pieces:
        own = sorted(size for size in piece.dims if size != 1)
        same_type = shape.dtype == piece.dtype and shape.num_elements >= piece.min_elements
        if same_type and sorted(dims[-len(own) :]) == own:
            yield piece


def _only_moves(program: ProgramText, instruction: Instruction, *, result: ArrayShape, piece: Piece) -> bool:
    """Return True if nothing of the result's size is computed, or written into an existing array, on the way."""
    moves = MOVES | {"gather"} if piece.is_written else MOVES
    return all(part.opcode in moves for part in program.fused(instruction) if _is_as_large(part, result))


def _is_moved_from(program: ProgramText, execution: Execution, result: ArrayShape, piece: Piece) -> bool:
    """Return True if a result is moved from an array as large as the pool of a piece.

    Tokens of a step may have the shape of a piece, and are moved from smaller arrays. So may a few rows of another
    pool, which are a smaller part of it than a piece would be.
    """
    beside = {one.name: one for one in program.computations[execution.computation]}
    waiting = [execution.instruction]
    while waiting:
        for name in waiting.pop().operands:
            source = beside.get(name)
            if source is None:
                continue
            # The results of a loop or a kernel are taken from its tuple one by one.
            is_array = len(source.shapes) == 1 or source.opcode.endswith("-start")
            shapes = [shape for shape in source.shapes if is_array and shape.dtype == piece.dtype]
            pools = (shape.num_elements for shape in shapes if shape.num_elements >= piece.pool_elements)
            if any(pool * piece.min_elements <= result.num_elements * piece.pool_elements for pool in pools):
                return True
            if source.opcode.endswith("-start") or _only_moves(program, source, result=source.shapes[0], piece=piece):
                waiting.append(source)
    return False


def _moves_all(program: ProgramText, instruction: Instruction, *, result: ArrayShape) -> bool:
    """Return True if a result consists only of data moved from arrays that together are at least as large."""
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
    """Return the shapes of the result; an asynchronous operation has its result at its `-done`."""
    instruction = execution.instruction
    if not instruction.opcode.endswith("-start"):
        return instruction.shapes
    for other in program.computations[execution.computation]:
        if other.opcode.endswith("-done") and instruction.name in other.operands:
            return other.shapes
    return instruction.shapes


def _group_size(instruction: Instruction) -> int:
    """Return the number of devices of a group; 0 if the program does not declare groups."""
    listed, shaped = _GROUP.search(instruction.attributes), _GROUPS_BY_SHAPE.search(instruction.attributes)
    if listed:
        return listed.group(1).count(",") + 1
    return int(shaped.group(2)) if shaped else 0


def _text(shape: ArrayShape) -> str:
    return f"{shape.dtype}[{','.join(str(size) for size in shape.dims)}]"
