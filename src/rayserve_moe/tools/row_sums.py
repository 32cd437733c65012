"""Proof that a row is added up in one order in every compiled step: the sums of all sizes, compared.

Compilers choose the order of a sum by its shapes. Steps that add up floating-point numbers at the same line of source
must do so in the same shapes, or the results of a row depend on the size of its step. Traced programs show the blocks
of loops. In kernels of our own the sizes that are summed over decide alone, because a matrix unit computes rows
independently. For products and sums of XLA on TPUs the compiled programs decide: they show the emitter of each product
and the part of the summed width that is in its window, and the layout and the window of each sum.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from rayserve_moe.execution.compared_steps import NUM_PAGES
from rayserve_moe.execution.programs.compiled import lowered, optimized
from rayserve_moe.execution.programs.specs import PROBE, Program, names_for, programs_of
from rayserve_moe.execution.served_model import ServedModel
from rayserve_moe.parallel.mesh import platform_of
from rayserve_moe.parallel.sharding import ParallelPlan
from rayserve_moe.tools.hlo_text import Instruction, ProgramText, read_program

PACKAGE = "rayserve_moe/"
KERNEL, CALLS = "pallas_call", {"pjit", "jit"}
PRODUCT = "dot_general"
PRODUCTS = {PRODUCT, "ragged_dot", "ragged_dot_general", "conv_general_dilated"}
SUMS = {"reduce_sum", "reduce_prod", "cumsum", "cumprod", "cumlogsumexp", "reduce_window_sum", "scatter-add"}
REDUCTIONS = {"reduce", "reduce-window", "scatter"}
"""Opcodes of XLA that add numbers up, besides products."""
LANES = 128
_WINDOW = re.compile(r'"input_window_bounds":\[[^\]]*"(\d+)"\]')
"""The last bound counts registers along the summed width."""
_WINDOWS = re.compile(r'"(?:output_window|iteration)_bounds":\[([^\]]*)\]')
"""Registers of a window along each dimension, and the number of windows."""
_SUMMED = re.compile(r"dimensions=\{([\d,]*)\}")
_EMITTER = re.compile(r'"emitter":"(\w+)"')
EXACT = {
    *("ranks_of", "_draw", "_best_here", "row_of", "count_slots", "places_of", "sums_before", "_best", "plan_rows"),
    *("look_up", "look_up.<locals>.look_up_chunk", "log_prob_of", "log_probs_at"),
}
"""Functions whose sums are exact in any order: they count, or add zeros to one number."""
COLLECTIVES = "parallel/"
"""Folder of functions that wrap collectives: the line of their caller names a sum."""
ALIKE = {
    "kernels/tpu/device_sums.py _multiply_tile.<locals>.product": "product of an expert in a kernel",
    "kernels/narrow_weights.py held_product": "product of an expert in a kernel",
}
"""Functions of several kernels that compute the same sums, by file and name. They are compared with each other.

Both dispatches multiply whole tiles of rows by a slot's matrices, and add up results in one order (ADR 0046).
"""
OVER_DEVICES = {"psum", "psum2", "psum_invariant", "reduce_scatter", "psum_scatter"}
"""Sums over devices: their order is that of a collective, which is chosen by its size."""


@dataclass(frozen=True)
class RowSum:
    """A product or a sum of a program that adds up floating-point numbers."""

    line: str
    """Source line in this package."""
    operation: str
    order: str
    """Shapes, dtypes and precision that decide the order of its additions."""
    in_kernel: bool = False
    """True for sums inside our own kernels."""


@dataclass(frozen=True)
class Difference:
    """A line of source whose sums differ between steps."""

    line: str
    operation: str
    orders: Mapping[str, tuple[str, ...]]
    """Names of steps by order; the empty order has the steps without such a sum."""

    def __str__(self) -> str:
        """Return the line, and its orders with the steps of each."""
        shown = "; ".join(f"{order or 'none'} in {', '.join(steps)}" for order, steps in self.orders.items())
        return f"{self.line}: {self.operation} of {shown}"


def differences(served: ServedModel, *, names: Iterable[str] = ()) -> list[Difference]:
    """Return the source lines at which steps of a server, or the steps in `names`, could add up a row in two orders.

    Steps for TPUs are traced and compiled, others are traced. Their programs that score prompts and that draw deferred
    samples are compared with the steps where they share a line.
    """
    wanted, programs = set(names), programs_of(served, num_pages=NUM_PAGES)
    steps = [program for program in programs if program.shape is not None]
    if unknown := wanted - {program.name for program in steps}:
        known = ", ".join(program.name for program in steps)
        raise ValueError(f"no step {min(unknown)}; known steps: {known}")
    chosen = [program for program in steps if not wanted or program.name in wanted]
    named = {PROBE}.union(*(names_for(program.shape, served) for program in chosen if program.shape is not None))
    parts = [program for program in programs if program.shape is None and program.name in named]
    found = {program.name: _sums_of_step(program, served) for program in [*chosen, *parts]}
    return compared(found, parts={program.name for program in parts})


def _sums_of_step(program: Program, served: ServedModel) -> list[RowSum]:
    plan = served.config.plan
    found = traced_sums(program, plan)
    if platform_of(plan.mesh) != "tpu":
        return found
    compiled = read_program(optimized(lowered(program, plan), plan, kernels=served.config.kernels).as_text() or "")
    known = (each for each in found if each.in_kernel or each.operation != PRODUCT)
    return [*known, *products_of(compiled), *reductions_of(compiled)]


def traced_sums(program: Program, plan: ParallelPlan) -> list[RowSum]:
    """Return the sums of a program as jax traces it."""
    with jax.set_mesh(plan.mesh):
        return [*sums_of(jax.make_jaxpr(program.run)(*program.arguments, **program.inputs).jaxpr)]


def products_of(program: ProgramText) -> Iterator[RowSum]:
    """Yield the products of a program that was compiled for TPUs by XLA."""
    for execution in program.executions():
        instruction = execution.instruction
        parts = [part for part in program.fused(instruction) if part.opcode == "convolution"]
        bounds, emitter = _WINDOW.search(instruction.attributes), _EMITTER.search(instruction.attributes)
        for part in parts:
            line = program.source_of(part) or part.op_name
            if _is_exact(line):
                continue
            width = f"windows of {LANES * int(bounds[1])}" if bounds else "unknown windows"
            order = f"{width}, {emitter[1] if emitter else 'unknown emitter'}"
            yield RowSum(line, "product of XLA", order)


def reductions_of(program: ProgramText) -> Iterator[RowSum]:
    """Yield the sums of more than two floating-point numbers in a program that was compiled for TPUs by XLA."""
    for execution in program.executions():
        instruction = execution.instruction
        for part in program.fused(instruction):
            line = program.source_of(part) or part.op_name
            if part.opcode not in REDUCTIONS or not _adds(program, part) or _is_exact(line):
                continue
            given, summed = program.shape_of[part.operands[0]], _SUMMED.search(part.attributes)
            axes = [int(axis) for axis in summed[1].split(",") if axis] if summed else range(len(given.dims))
            if math.prod(given.dims[axis] for axis in axes) > 2:
                windows = " x ".join(bounds.replace('"', "") for bounds in _WINDOWS.findall(instruction.attributes))
                order = f"{given.dims} {given.dtype} {given.layout} over {[*axes]}, windows {windows}"
                yield RowSum(line, f"{part.opcode} of XLA", order)


def _adds(program: ProgramText, part: Instruction) -> bool:
    """Return True for a reduction of floating-point numbers by sums or products."""
    reducers = (each for name in part.called for each in program.computations[name])
    return "f" in part.shapes[0].dtype and any(each.opcode in ("add", "multiply") for each in reducers)


def compared(sums: Mapping[str, Iterable[RowSum]], *, parts: AbstractSet[str] = frozenset()) -> list[Difference]:
    """Return the lines whose sums differ between the programs, given by name.

    `parts` are programs with some of the sums of the others. Lines that only they have are compared among them.
    """
    orders: dict[tuple[str, str], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, found in sums.items():
        for each in found:
            orders[each.line, each.operation][name].add(each.order)
    different = []
    for (line, operation), of_program in sorted(orders.items()):
        whole = [name for name in sums if name not in parts] if of_program.keys() - parts else [*of_program]
        some = [name for name in of_program if name not in whole]
        known = set[str]().union(*(of_program.get(name, ()) for name in whole))
        are_equal = all(of_program.get(name) == known for name in whole)
        if not are_equal or any(of_program[name] - known for name in some):
            different.append(Difference(line, operation, _by_order(of_program, names=[*whole, *some])))
    return different


def _by_order(of_program: Mapping[str, set[str]], *, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    by_order: dict[str, list[str]] = defaultdict(list)
    for name in names:
        for order in sorted(of_program.get(name, {""})):
            by_order[order].append(name)
    return {order: tuple(programs) for order, programs in by_order.items()}


def sums_of(jaxpr: core.Jaxpr, *, in_kernel: bool = False, line: str = "") -> Iterator[RowSum]:
    """Yield the sums of a program, including sums in its loops, branches and kernels.

    `line` is the source line of the call if `jaxpr` is a compiled function of jax, which is traced once for all calls.
    """
    for equation in jaxpr.eqns:
        name, here = equation.primitive.name, line or _line_of(equation)
        if name in PRODUCTS | SUMS | OVER_DEVICES and _has_orders(equation, here):
            place = ALIKE.get(_without_number(here), here) if in_kernel else here
            yield RowSum(place, name, _order_of(equation, in_kernel=in_kernel), in_kernel)
        for inner in _inner(equation.params.values()):
            of_call = here if name in CALLS else ""
            yield from sums_of(inner, in_kernel=in_kernel or name == KERNEL, line=of_call)


def _inner(values: Iterable[Any]) -> Iterator[core.Jaxpr]:
    for value in values:
        if isinstance(value, core.ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, core.Jaxpr):
            yield value
        elif isinstance(value, tuple | list):
            yield from _inner(value)


def _operands(equation: core.JaxprEqn) -> list[Any]:
    """Return the shapes and dtypes of the operands."""
    return [variable.aval for variable in equation.invars]


def _has_orders(equation: core.JaxprEqn, line: str) -> bool:
    """Return True if another order could give other bits: of more than two floating-point numbers."""
    given, *_ = _operands(equation)
    if not jnp.issubdtype(given.dtype, jnp.floating) or _is_exact(line):
        return False
    axes = equation.params.get("axes", ()) if equation.primitive.name in SUMS else ()
    return not axes or math.prod(given.shape[axis] for axis in axes) > 2


def _is_exact(line: str) -> bool:
    return line.rpartition(" ")[2] in EXACT


def _line_of(equation: core.JaxprEqn) -> str:
    """Return the innermost line in this package, outside of `COLLECTIVES`."""
    found = equation.source_info.traceback
    for frame in () if found is None else found.frames:
        file = frame.file_name.rpartition(PACKAGE)[2]
        if PACKAGE in frame.file_name and not file.startswith(COLLECTIVES):
            return f"{file}:{frame.line_num} {frame.function_name}"
    return "unknown line"


def _without_number(line: str) -> str:
    """Return file and function of a source line."""
    place, _, function = line.rpartition(" ")
    return f"{place.partition(':')[0]} {function}"


def _order_of(equation: core.JaxprEqn, *, in_kernel: bool) -> str:
    """Return the shapes and dtypes that decide the order of a sum, without the batch axes of products.

    For sums in kernels it returns only the summed sizes.
    """
    operands = _operands(equation)
    shapes = [operand.shape for operand in operands]
    types = " x ".join(str(operand.dtype) for operand in operands)
    axes = [range(len(shape)) for shape in shapes]
    summed: list[Any] = axes
    if equation.primitive.name == PRODUCT:
        summed, batch = equation.params["dimension_numbers"]
        axes = [[axis for axis in of if axis not in left_out] for of, left_out in zip(axes, batch, strict=True)]
        types = f"{types} {equation.params['precision']}"
    elif "axes" in equation.params and equation.primitive.name in SUMS:
        summed = [equation.params["axes"]]
    kept = summed if in_kernel else axes
    sizes = ([shape[axis] for axis in of] for shape, of in zip(shapes, kept, strict=False))
    return f"{' x '.join(str(tuple(each)) for each in sizes)} {types}"
