"""A program of a server, compiled for a topology, as numbers for a report."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from rayserve_moe.execution.memory import bytes_on_device, local_elements
from rayserve_moe.execution.programs.compiled import lowered, optimized
from rayserve_moe.execution.programs.specs import Program
from rayserve_moe.execution.served_model import ServedModel
from rayserve_moe.execution.step.pytrees import DeviceState
from rayserve_moe.execution.weights.placing import parameter_tree
from rayserve_moe.model.states import states_of
from rayserve_moe.tools.estimate.chips import CHIPS
from rayserve_moe.tools.estimate.report import EstimateReport, Estimator
from rayserve_moe.tools.gpu_targets import bandwidth_of, is_gpu
from rayserve_moe.tools.hlo_report import (
    ActivationCopy,
    Collective,
    CopyOfPiece,
    Piece,
    activation_copies,
    collectives_of,
    copies_of,
    cycles_of,
    kernels_of,
    ops_per_layer,
)
from rayserve_moe.tools.hlo_text import ProgramText, read_program


@dataclass(frozen=True)
class DeviceMemory:
    """HBM of a device in bytes, as the compiler accounts for it."""

    arguments: int
    temporaries: int
    outputs: int
    aliased: int
    peak: int
    limit: int
    """HBM of the device, 0 if unknown."""

    @property
    def fits(self) -> bool:
        """Return True if the peak is within the limit, or the limit is unknown.

        TPU compilers raise an error beyond the limit. GPU compilers accept programs of any size.
        """
        return not self.limit or self.peak <= self.limit


@dataclass(frozen=True)
class CompileSeconds:
    """Seconds that a program took to compile, to two places."""

    lower_s: float = 0.0
    compile_s: float = 0.0
    compile_cpu_s: float = 0.0
    """Seconds of processors, of other programs too if several are compiled at a time."""


@dataclass(frozen=True)
class StepCycles:
    """Sums of the cycles that XLA estimates for its own fusions; neither is a latency."""

    xla_cycles: int = 0
    xla_cycles_once: int = 0
    """With the body of every loop counted once."""


@dataclass(frozen=True)
class ProgramReport:
    """A compiled program, or the compiler's error."""

    name: str
    error: str = ""
    """The compiler's reason; empty on success."""
    seconds: CompileSeconds = CompileSeconds()
    memory: DeviceMemory | None = None
    is_in_place: bool = False
    """True if all arrays that the program owns stay in their memory."""
    copied_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes of `copies` by kind."""
    copies: list[CopyOfPiece] = field(default_factory=list)
    """Copies of weights and KV; a sound program has none."""
    copied_activation_bytes: int = 0
    activation_copies: list[ActivationCopy] = field(default_factory=list)
    """Copies of activations, which have limits."""
    collectives: list[Collective] = field(default_factory=list)
    """Transfers within a slice."""
    crossings: list[Crossing] = field(default_factory=list)
    """Transfers between slices."""
    kernels: dict[str, int] = field(default_factory=dict)
    """Number of calls by the kernel's name."""
    ops_per_layer: int = 0
    """Costed operations in the body of the loop over layers."""
    cycles: StepCycles = StepCycles()
    roofline_s: float = 0.0
    """Time to read weights and KV once at the memory's bandwidth."""
    estimate: EstimateReport | None = None
    """The estimate of a step, if one was requested."""

    @property
    def fits(self) -> bool:
        """Return True if the program compiles and a device has the memory for it."""
        return not self.error and (self.memory is None or self.memory.fits)


def figures_of(report: ProgramReport) -> dict[str, Any]:
    """Return the fields of a report by name, with the fields of its seconds and cycles beside the others."""
    found = asdict(report)
    seconds, cycles = found.pop("seconds"), found.pop("cycles")
    return found | seconds | cycles


class ProgramReader:
    """Compiles a server's programs one after the other and reads the results; `limit` is the HBM of a device."""

    def __init__(
        self, served: ServedModel, *, num_pages: int, limit: int, topology: str, estimator: Estimator | None
    ) -> None:
        state = served.state(num_pages)
        self._plan, self._kernels, self._limit = served.config.plan, served.config.kernels, limit
        self._estimator = estimator
        self._num_layers, self._num_rows = served.config.spec.num_layers, served.num_rows
        self._max_drafts = served.settings.speculation.max_drafts
        self._pieces = pieces_of(served, state)
        self._roofline_s = (bytes_on_device(served.weights) + bytes_on_device(state.pools)) / _bandwidth(topology)

    def report(self, program: Program) -> ProgramReport:
        if self._estimator is not None:
            self._estimator.dump.pass_over()
        started = time.perf_counter()
        try:
            unoptimized = lowered(program, self._plan)
            lowered_at, cpu_s = time.perf_counter(), time.process_time()
            compiled = optimized(unoptimized, self._plan, kernels=self._kernels)
        except jax.errors.JaxRuntimeError as error:
            return ProgramReport(program.name, error=compilers_sentence(error))
        seconds = CompileSeconds(
            lower_s=round(lowered_at - started, 2),
            compile_s=round(time.perf_counter() - lowered_at, 2),
            compile_cpu_s=round(time.process_time() - cpu_s, 2),
        )
        text = read_program(compiled.as_text() or "")
        return replace(self._read(program, compiled, text), seconds=seconds, estimate=self._estimate(program, text))

    def _estimate(self, program: Program, text: ProgramText) -> EstimateReport | None:
        """Return the estimate of a step with the maximum number of sequences; None without an estimator or a step."""
        shape = program.shape
        if self._estimator is None or shape is None:
            return None
        sequences = min(shape.num_singles, self._num_rows)
        rows_each = min(shape.num_singles // self._num_rows, 1 + self._max_drafts) or 1
        sizes = replace(self._estimator.sizes, sequences=sequences, singles=shape.num_singles, rows_each=rows_each)
        full = replace(self._estimator, sizes=sizes)
        prompt_tokens = shape.num_tokens - shape.num_singles
        return full.estimate(text, prompt_tokens=prompt_tokens, num_layers=self._num_layers)

    def _read(self, program: Program, compiled: jax.stages.Compiled, text: ProgramText) -> ProgramReport:
        analysis = compiled.memory_analysis()
        assert analysis is not None, "the TPU compiler accounts for memory"
        copies, (once, cycles) = copies_of(text, self._pieces), cycles_of(text)
        of_activations = activation_copies(text, self._pieces)
        copied_bytes = Counter[str]()
        for copy in copies:
            copied_bytes[copy.kind] += copy.num_bytes * copy.times
        owned = None if program.donated is None else program.arguments[program.donated]
        return ProgramReport(
            program.name,
            memory=DeviceMemory(
                analysis.argument_size_in_bytes,
                analysis.temp_size_in_bytes,
                analysis.output_size_in_bytes,
                analysis.alias_size_in_bytes,
                analysis.peak_memory_in_bytes,
                self._limit,
            ),
            is_in_place=analysis.alias_size_in_bytes >= bytes_on_device(owned),
            copied_bytes=dict(copied_bytes),
            copies=copies,
            copied_activation_bytes=sum(copy.num_bytes for copy in of_activations),
            activation_copies=of_activations,
            collectives=collectives_of(text),
            crossings=crossings_of(text, num_slices=self._plan.num_slices),
            kernels=kernels_of(text),
            ops_per_layer=ops_per_layer(text),
            cycles=StepCycles(cycles, once),
            roofline_s=self._roofline_s,
        )


def compilers_sentence(error: Exception) -> str:
    """Return the compiler's reason without the listing of buffers that follows it."""
    paragraphs = str(error).strip().split("\n\n")
    return " ".join(paragraphs[0].split())


def _bandwidth(topology: str) -> float:
    """Return the bytes that a device reads per second; infinite for a chip of unknown bandwidth."""
    if is_gpu(topology):
        return bandwidth_of(topology)
    chip = CHIPS.get(topology.split(":")[0])
    return chip.device_hbm_bytes if chip else float("inf")


MIN_PIECE_BYTES = 64 << 10
"""Minimum bytes of a weight that should not be copied; norms and biases are smaller."""
MAX_VECTORS = 8
"""A weight of so few rows is no matrix: taps of a convolution, which the vector unit reads."""


def pieces_of(served: ServedModel, state: DeviceState) -> list[Piece]:
    """Return a layer's weights by kind, and at least half of a layer's pages."""
    model = served.config
    pieces = []
    for group, specs in parameter_tree(model, dtype=served.dtype).items():
        for spec in specs.values():
            local = model.plan.sharding(spec.axes).shard_shape(spec.shape)[spec.num_stacked_dims :]
            size = jnp.dtype(spec.dtype).itemsize
            num_elements = math.prod(local)
            is_matrix = num_elements > MAX_VECTORS * max(local, default=1)
            if is_matrix and num_elements * size >= MIN_PIECE_BYTES:
                pieces.append(Piece(group, _hlo_dtype(spec.dtype), local, num_elements))
    for kept in states_of(model):
        for pool in state.pools[kept.kind.name]:
            held = local_elements(pool)
            rows = pool.sharding.shard_shape(pool.shape)[2 if kept.kind.per == "token" else 1 :]
            dtype, half = _hlo_dtype(str(pool.dtype)), held // kept.num_layers // 2
            pieces.append(Piece(kept.kind.name, dtype, rows, half, is_written=True, pool_elements=held))
    return pieces


def _hlo_dtype(dtype: str) -> str:
    """Return the name of a dtype in the text of a program."""
    short = {"bfloat16": "bf16", "float32": "f32", "float16": "f16", "int8": "s8"}
    return short.get(dtype) or dtype.replace("float8_", "f8")


RUNTIME = '_xla_host_transfer_handler_name="xla_megascale_runtime"'
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_FOR_OTHERS = {"ALL_GATHER", "ALL_REDUCE", "RAGGED_ALL_TO_ALL"}
"""Transfers whose whole operand can be for other slices; in other transfers a part is for the own slice."""


@dataclass(frozen=True)
class Crossing:
    """A kind of transfer between slices."""

    transfer: str
    shape: str
    num_bytes: int
    """Bytes that a device hands over for each other slice.

    A ragged exchange hands over its whole operand; its sizes at run time limit the rows that are sent.
    """
    times: int
    """Number of transfers in a run."""
    is_least: bool
    """True if `times` is a minimum."""


def crossings_of(program: ProgramText, *, num_slices: int) -> list[Crossing]:
    """Return the transfers between slices in a run of the program; equal transfers are added up."""
    counts: Counter[Crossing] = Counter()
    for execution in program.executions():
        instruction = execution.instruction
        if instruction.opcode != "send" or RUNTIME not in instruction.attributes:
            continue
        found, given = _TRANSFER.search(instruction.attributes), instruction.shapes[0]
        kind = found.group(1) if found else ""
        num_bytes = given.num_bytes if kind in _FOR_OTHERS else given.num_bytes // num_slices
        shape = f"{given.dtype}[{','.join(map(str, given.dims))}]"
        counts[Crossing(kind.lower().replace("_", "-"), shape, num_bytes, 0, execution.is_least)] += execution.times
    return [replace(kind, times=times) for kind, times in counts.items()]
