"""A compiled program as a tree of the device's executions: ops with their schedules, loops, branches."""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from rayserve_moe.kernels.invariant import TPU_ROWS_PER_BLOCK
from rayserve_moe.kernels.reference.expert_products import multiply_in_blocks
from rayserve_moe.tools.estimate.dump import Schedules
from rayserve_moe.tools.estimate.kernel_work import PARALLEL, KernelWork, kernel_name, work_of
from rayserve_moe.tools.estimate.links import Slice, groups_of
from rayserve_moe.tools.estimate.rates import COLLECTIVE, COPY, KERNEL
from rayserve_moe.tools.estimate.step_work import StepWork
from rayserve_moe.tools.hlo_report import COLLECTIVES, HBM
from rayserve_moe.tools.hlo_text import ArrayShape, Instruction, ProgramText, condition_of

BLOCKS_OF_EXPERTS = multiply_in_blocks.__name__
"""Function with a loop over blocks of rows, each of one expert. Its trips are known only at run time."""
_BOUNDS = re.compile(r'"iteration_bounds":\[([^\]]*)\]')
_KERNEL_BODY = re.compile(r'"body":"([^"]*)"')
_KERNEL_BOUNDS = re.compile(r"iteration_bounds = array<i64: ([^>]*)>")
_KERNEL_DIMENSIONS = re.compile(r"dimension_semantics = \[([^\]]*)\]")


@dataclass(frozen=True)
class Op:
    """An execution of an op on a device."""

    name: str
    opcode: str
    scope: str
    """Its `jax.named_scope`s."""
    source: str = ""
    """Source line that it, or the first of its parts, was traced from."""
    bundles: float = 0.0
    """Bundles of a core."""
    hbm_bytes: float = 0.0
    """Bytes copied from and to HBM."""
    link_s: float = 0.0
    """Seconds that it keeps links busy."""
    starts_at: int = -1
    """Index in its block of the op that started it, if it runs beside the ops in between."""
    idle_factor: float = 1.0
    """Cores of the device over cores in use; a kernel on a single core has only its share of the bandwidth."""
    is_least: bool = False
    """True if a loop with unknown trips was counted once."""
    kind: str = COPY
    """Kind of op (`rates.SPREADS`)."""
    lead_bundles: float = 0.0
    """Bundles of a kernel before its first large copy from HBM starts."""
    num_waits: float = 0.0
    """Waits of a kernel that nothing hides."""
    visits: float = 1.0
    """Copies of a kernel that follow each other; of decode attention, sequences."""
    num_ahead: int = 1
    """Copies of visits in flight at a time; their waits overlap."""
    matrix_ops: float = 0.0
    """Instructions of a core's matrix units."""
    num_peers: int = 1
    """Devices of a group of a collective."""


@dataclass(frozen=True)
class Block:
    """A sequence of executions."""

    items: list[Op | Loop | Branches] = field(default_factory=list)


@dataclass(frozen=True)
class Loop:
    """A body and its trips."""

    body: Block
    trips: int
    is_layers: bool
    """True if the trips are the layers of the model."""
    is_of_experts: bool = False
    """True if each trip multiplies a block of rows with their expert."""


@dataclass(frozen=True)
class Branches:
    """Blocks of a conditional; a run executes a single block."""

    options: list[Block]
    is_dearest: bool = False
    """True if the most expensive block runs, not the cheapest."""


@dataclass(frozen=True)
class ProgramReader:
    """Builder of a program's tree from its text, its schedules, its devices and the step's work."""

    program: ProgramText
    schedules: Schedules
    place: Slice
    work: StepWork
    num_expert_layers: int = 1
    """Compiled layers with experts."""
    expert_trips: int = 1
    """Trips of a loop over blocks of rows of experts."""

    def tree(self) -> Block:
        """Return the executions of the program. A layer's rows of experts are spread evenly over slots and calls."""
        tree = self._block(self.program.entry)
        calls = _calls_of_experts(tree) / max(1, self.num_expert_layers)
        if not calls:
            return tree
        blocks_of_slot = math.ceil(self.work.expert_rows / calls / self.work.used_slots / TPU_ROWS_PER_BLOCK)
        trips = math.ceil(self.work.used_slots * blocks_of_slot)
        return replace(self, expert_trips=trips)._block(self.program.entry)

    def _block(self, computation: str) -> Block:
        block = Block()
        by_name = {one.name: one for one in self.program.computations[computation]}
        started: dict[str, int] = {}
        scope = ""
        for instruction in by_name.values():
            scope = scope_of(instruction, self.program) or scope
            operands = [by_name[name] for name in instruction.operands if name in by_name]
            match instruction.opcode:
                case "while":
                    block.items.append(self._loop(instruction, by_name))
                case "conditional":
                    block.items.append(Branches([self._block(name) for name in instruction.called]))
                case "call" | "call-start":
                    for name in instruction.called:
                        block.items.extend(_moved(self._block(name).items, by=len(block.items)))
                case opcode if opcode.endswith("-start"):
                    started[instruction.name] = len(block.items)
                case opcode if opcode.endswith("-done") and operands and operands[0].name in started:
                    place = started[operands[0].name]
                    block.items.append(self._completed(operands[0], scope, by_name, done=instruction, place=place))
                case _:
                    block.items.extend(self._op(instruction, scope, operands))
        return block

    def _loop(self, loop: Instruction, beside: dict[str, Instruction]) -> Loop:
        condition, trips = condition_of(loop), trips_of(self.program, loop, beside=beside)
        (body,) = (name for name in loop.called if name != condition)
        if self.program.source_of(loop).endswith(f" {BLOCKS_OF_EXPERTS}"):
            return Loop(_computing(self._block(body)), self.expert_trips, is_layers=False, is_of_experts=True)
        return Loop(
            self._block(body), trips, is_layers=bool(loop.op_name) and trips > 1 and not scope_of(loop, self.program)
        )

    def _op(self, instruction: Instruction, scope: str, operands: list[Instruction]) -> list[Op]:
        """Return the op of an instruction, or an empty list if the device executes nothing for it."""
        if instruction.opcode in COLLECTIVES:
            return [self._collective(instruction, scope, operands, instruction)]
        schedule = self.schedules.of(instruction)
        if schedule is None:
            return []
        cores = self.place.chip.cores_per_device
        kernel = work_of(instruction, operands, work=self.work)
        uses_all = instruction.opcode != "custom-call" or divides_over_cores(instruction)
        share = cores if uses_all else 1
        iterations = math.ceil(_iterations(instruction) / cores)
        spent = (kernel or KernelWork(0.0, ())).of_core(schedule, cores=share, iterations=iterations)
        moved = kernel.hbm_bytes if kernel else bytes_by_shape(self.program, instruction, operands=operands)
        if not kernel and spent.hbm_bytes is not None:
            moved = spent.hbm_bytes * share
        is_kernel, lead_bundles = bool(kernel_name(instruction)), spent.lead_bundles
        if kernel:
            lead_bundles = kernel.lead_bundles(schedule, spent, iterations=iterations)
        return [
            Op(
                instruction.name,
                instruction.opcode,
                scope,
                self.program.source_of(instruction),
                spent.bundles,
                moved,
                self._exchange_seconds(kernel.exchanged_bytes) if kernel else 0.0,
                idle_factor=cores / share,
                is_least=spent.is_least,
                kind=kernel.kind if kernel else KERNEL if is_kernel else COPY,
                lead_bundles=lead_bundles if is_kernel else 0.0,
                num_waits=spent.num_waits if is_kernel else 0,
                visits=(kernel.visits if kernel else 0.0) / share or spent.visits,
                num_ahead=kernel.num_ahead if kernel else 1,
                matrix_ops=spent.matrix_ops,
            )
        ]

    def _exchange_seconds(self, num_bytes: float) -> float:
        """Return the seconds on links of an even exchange among all devices, if each sends `num_bytes`."""
        everywhere = [list(range(len(self.place.devices)))]
        return self.place.seconds("ragged-all-to-all", round(num_bytes), groups=everywhere)

    def _completed(
        self, start: Instruction, scope: str, by_name: dict[str, Instruction], *, done: Instruction, place: int
    ) -> Op:
        """Return an asynchronous op that runs beside the ops since its start: a collective, or a copy with HBM."""
        inner = self._inside(start)
        operation = inner.opcode.removesuffix("-start")
        operands = [by_name[name] for name in start.operands if name in by_name]
        if operation in COLLECTIVES:
            op = self._collective(inner, scope, operands, done)
            return replace(op, name=start.name, starts_at=place)
        sent, result = (_largest(one.shapes) for one in (operands[0], done))
        moved = result.num_bytes if HBM in (result.space, sent.space) else 0
        return Op(start.name, operation, scope, hbm_bytes=moved, starts_at=place)

    def _inside(self, start: Instruction) -> Instruction:
        """Return the instruction that an asynchronous instruction wraps, or the instruction itself."""
        wrapped = [one for name in start.called for one in self.program.computations.get(name, []) if one.is_root]
        return wrapped[0] if wrapped and start.opcode == "async-start" else start

    def _collective(self, instruction: Instruction, scope: str, operands: list[Instruction], done: Instruction) -> Op:
        """Return a collective op. For a ragged collective the smaller array counts; the larger has space for uneven
        routing.
        """
        operation = instruction.opcode.removesuffix("-start")
        groups = groups_of(instruction, num_devices=len(self.place.devices))
        sent = sum(_largest(operand.shapes).num_bytes for operand in operands)
        if operation == "ragged-all-to-all":
            rows = min((_largest(one.shapes) for one in (operands[0], done)), key=lambda shape: shape.num_bytes)
            # Words are rows of `device_sums`: one for each token and device.
            sent = round(rows.num_bytes * (self.work.device_share if rows.dtype == "u32" else 1.0))
        source = self.program.source_of(instruction)
        link_s = self.place.seconds(operation, sent, groups=groups)
        num_peers = max(map(len, groups))
        return Op(instruction.name, operation, scope, source, link_s=link_s, kind=COLLECTIVE, num_peers=num_peers)


def scope_of(instruction: Instruction, program: ProgramText) -> str:
    """Return the named scopes of an instruction, joined by `/`; if it has none, the first scopes of its fused parts."""
    named = (part for part in [instruction, *program.fused(instruction)] if part.op_name)
    return next((part.scope for part in named), "")


def _computing(block: Block) -> Block:
    """Return a block whose conditionals run their most expensive branch."""
    return Block([replace(item, is_dearest=True) if isinstance(item, Branches) else item for item in block.items])


def _calls_of_experts(block: Block) -> int:
    """Return the number of loops over blocks of rows of experts that a run of a block enters."""
    total = 0
    for item in block.items:
        match item:
            case Loop() if item.is_of_experts:
                total += 1
            case Loop():
                total += item.trips * _calls_of_experts(item.body)
            case Branches():
                total += max(map(_calls_of_experts, item.options), default=0)
    return total


def divides_over_cores(kernel: Instruction) -> bool:
    """Return True if a Mosaic kernel has a parallel grid dimension of more than one step, which cores share.

    XLA itself divides its own ops over cores. A schedule describes a single core.
    """
    encoded = _KERNEL_BODY.search(kernel.attributes)
    try:
        body = base64.b64decode(encoded.group(1)) if encoded else b""
    except binascii.Error:
        return False
    text = body.decode("latin-1")
    bounds, dimensions = _KERNEL_BOUNDS.search(text), _KERNEL_DIMENSIONS.search(text)
    if not bounds or not dimensions:
        return PARALLEL in text
    steps = zip(bounds.group(1).split(","), dimensions.group(1).split(","), strict=False)
    return any(PARALLEL in dimension and bound.strip() != "1" for bound, dimension in steps)


def _moved(items: list[Op | Loop | Branches], *, by: int) -> Iterator[Op | Loop | Branches]:
    """Yield the items of a block with start indices that are `by` higher."""
    for item in items:
        is_started = isinstance(item, Op) and item.starts_at >= 0
        yield replace(item, starts_at=item.starts_at + by) if is_started else item


def _iterations(instruction: Instruction) -> int:
    """Return the number of iterations of XLA's pipeline around an op; 0 if it is not declared."""
    found = _BOUNDS.search(instruction.attributes)
    count = 1 if found else 0
    for bound in re.findall(r"\d+", found.group(1)) if found else []:
        count *= int(bound)
    return count


def _largest(shapes: Iterable[ArrayShape]) -> ArrayShape:
    return max(shapes, key=lambda shape: shape.num_bytes)


_INDEX = re.compile(r"index=(\d+)")
_CONSTANT = re.compile(r"^(-?\d+)\)")


def trips_of(program: ProgramText, loop: Instruction, *, beside: dict[str, Instruction]) -> int:
    """Return the trips of a `while` with a constant number; of any other, the trips until its counter is 1.

    Loops without a constant run rounds of an exchange, or adjust logits. Even routing needs a single round, and few
    requests have penalties or biases, so a loop that counts from 1 has no trips. `beside` holds the instructions of the
    loop's computation by name.
    """
    trips = program.trips(loop)
    return trips if trips is not None else max(0, 1 - _counts_from(program, loop, beside))


def _counts_from(program: ProgramText, loop: Instruction, beside: dict[str, Instruction]) -> int:
    """Return the constant that a loop's counter starts from; 0 without a constant."""
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


_TAKES_A_PART = {"gather", "dynamic-slice", "slice"}
_WRITES_A_PART = {"dynamic-update-slice": 1, "scatter": 2}
"""Operations that change a part of their first operand in place, and the index of the operand of that part's size."""


def bytes_by_shape(program: ProgramText, instruction: Instruction, *, operands: list[Instruction]) -> int:
    """Return the bytes that an op reads from HBM and writes to it: operands and results in HBM, once each.

    An operand that only gathers or slices read counts with the bytes that they take, an operand that is changed in
    place with the bytes that change.
    """
    inside = {part.name: part for part in program.fused(instruction)} if instruction.opcode == "fusion" else {}
    parameters = {int(part.attributes.split(")")[0]): part for part in inside.values() if part.opcode == "parameter"}
    total = 0
    for index, operand in enumerate(operands):
        whole = sum(shape.num_bytes for shape in operand.shapes if shape.space == HBM)
        parameter = parameters.get(index)
        total += min(whole, _part_of(parameter, inside)) if parameter else whole
    written = sum(shape.num_bytes for shape in instruction.shapes if shape.space == HBM)
    parts = [_num_bytes(inside.get(part.operands[_WRITES_A_PART[part.opcode]])) for part in _changes(inside)]
    return total + (min(written, sum(parts)) if parts else written)


def _part_of(parameter: Instruction, inside: dict[str, Instruction]) -> int:
    """Return the bytes of a parameter that its fusion reads."""
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
