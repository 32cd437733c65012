"""Compile a model's programs for a TPU topology on a host without one, and report on the results."""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from rayserve_moe.kernels.ragged_exchange import COMPILER_OPTIONS_OF_PLATFORM
from rayserve_moe.tools.estimate.chips import CHIPS
from rayserve_moe.tools.estimate.dump import DumpFolder
from rayserve_moe.tools.estimate.report import EstimateReport, Estimator
from rayserve_moe.tools.estimate.workload import StepSizes
from rayserve_moe.tools.hlo_report import (
    Collective,
    CopyOfPiece,
    collectives_of,
    copies_of,
    cycles_of,
    kernels_of,
)
from rayserve_moe.tools.hlo_text import ProgramText, read_program
from rayserve_moe.tools.step_programs import (
    Program,
    ServedModel,
    ServedSetting,
    bytes_on_device,
    lay_out,
    pieces_of,
    programs_of,
)

COMPILER_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_LOG_DIR": "disabled",
}
"""Environment of the TPU compiler where there is no TPU: no lock file, no metadata server, no log."""

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_AVAILABLE = re.compile(r"exceeds available HBM \(([\d.]+)([KMGT]?)\)")


@dataclass(frozen=True)
class DeviceMemory:
    """HBM of one device, bytes: what the compiler accounts for, and what there is (0: unknown)."""

    arguments: int
    temporaries: int
    outputs: int
    aliased: int
    peak: int
    limit: int


@dataclass(frozen=True)
class ProgramReport:
    """One compiled program, or the compiler's reason why there is none.

    `is_in_place`: all that it updates stays where it is: the KV pool, or what a migration writes.

    `xla_cycles` add up what XLA estimates for its own fusions, `_once` with the body of every loop counted once;
    neither is a latency. `roofline_s` is the time that reading weights and KV once takes at the memory's bandwidth.
    `estimate` is there where it was asked for, and the program is a step.
    """

    name: str
    error: str = ""
    lower_s: float = 0.0
    compile_s: float = 0.0
    memory: DeviceMemory | None = None
    is_in_place: bool = False
    copied_bytes: dict[str, int] = field(default_factory=dict)
    copies: list[CopyOfPiece] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    kernels: dict[str, int] = field(default_factory=dict)
    xla_cycles: int = 0
    xla_cycles_once: int = 0
    roofline_s: float = 0.0
    estimate: EstimateReport | None = None


@dataclass(frozen=True)
class CheckReport:
    """What was checked, and a report per program. Bytes are those of one device."""

    model: str
    setting: ServedSetting
    num_layers: int
    dp: int
    tp: int
    num_expert_slots: int
    weights_bytes: int
    kv_pool_bytes: int
    compilers: dict[str, str]
    programs: list[ProgramReport]

    @property
    def fits(self) -> bool:
        return not any(program.error for program in self.programs)

    def as_json(self) -> dict[str, Any]:
        return {"fits": self.fits, **asdict(self)}


def use_host_alone() -> None:
    """Keep jax from looking for an accelerator on this host; call before anything else uses jax."""
    jax.config.update("jax_platforms", "cpu")


def check(
    config: Mapping[str, Any],
    setting: ServedSetting,
    *,
    model: str,
    names: tuple[str, ...] = (),
    estimator: Estimator | None = None,
) -> CheckReport:
    """Compile the programs of a model (all, or those of `names`) one after the other.

    `config` is a parsed `config.json`, `model` what to call it. With an `estimator` its steps are estimated. ValueError
    where model, setting and topology do not go together or a name is unknown; refusals of the compiler are in the
    report.
    """
    served = lay_out(config, setting)
    programs = _chosen(programs_of(served), names)
    limit = hbm_limit(served.plan.mesh.devices.flat[0])
    placed = served.config.model
    return CheckReport(
        model,
        setting,
        num_layers=placed.spec.num_layers,
        dp=served.plan.data_size,
        tp=served.plan.tensor_size,
        num_expert_slots=placed.experts.num_slots,
        weights_bytes=bytes_on_device(served.weights),
        kv_pool_bytes=bytes_on_device(served.state.kv_pages),
        compilers=dict(_versions()),
        programs=[check_program(program, served, limit=limit, estimator=estimator) for program in programs],
    )


def estimator_of(config: Mapping[str, Any], setting: ServedSetting, *, dump: Path) -> Estimator:
    """What estimates the steps of a setting for the whole model of `config`; libtpu must have been asked for dumps."""
    sizes = StepSizes(
        setting.topology, setting.batch, setting.context, setting.page_size, setting.dtype, setting.kv_dtype
    )
    return Estimator(DumpFolder(dump), lay_out(config, setting).config.model, sizes)


def check_program(
    program: Program, served: ServedModel, *, limit: int, estimator: Estimator | None = None
) -> ProgramReport:
    """Compile one program and read what came out; `limit` is the HBM of a device, bytes."""
    if estimator:
        estimator.dump.pass_over()
    started = time.perf_counter()
    try:
        lowered = lower(program, served)
        lowered_at = time.perf_counter()
        compiled = lowered.compile(compiler_options=COMPILER_OPTIONS_OF_PLATFORM["tpu"])
    except jax.errors.JaxRuntimeError as error:
        return ProgramReport(program.name, error=compilers_sentence(error))
    seconds = {"lower_s": lowered_at - started, "compile_s": time.perf_counter() - lowered_at}
    text = read_program(compiled.as_text() or "")
    report = _read(program, compiled, text, served=served, limit=limit)
    estimate = None
    if estimator is not None and program.prompt_tokens is not None:
        num_layers = served.config.model.spec.num_layers
        estimate = estimator.estimate(text, prompt_tokens=program.prompt_tokens, num_layers=num_layers)
    return replace(report, estimate=estimate, **{name: round(value, 2) for name, value in seconds.items()})


def lower(program: Program, served: ServedModel) -> jax.stages.Lowered:
    """Lower a program for the devices of its topology."""
    jitted = jax.jit(program.run, donate_argnums=1)
    # Kernels ask the current mesh which chip they are compiled for.
    with jax.set_mesh(served.plan.mesh):
        return jitted.lower(program.weights, program.state, **program.inputs)


def hbm_limit(device: jax.Device) -> int:
    """Bytes of HBM that the compiler lets a program use, learned from its refusal of an absurd one; 0: unknown."""
    absurd = jax.ShapeDtypeStruct((1 << 30, 1 << 10), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(device))
    with contextlib.suppress(StopIteration):
        try:
            jax.jit(lambda array: array + 1).lower(absurd).compile()
        except jax.errors.JaxRuntimeError as error:
            amount, unit = next(_AVAILABLE.finditer(str(error))).groups()
            return int(float(amount) * UNITS[unit])
    return 0


def compilers_sentence(error: Exception) -> str:
    """The compiler's reason without the listing of buffers that follows it."""
    paragraphs = str(error).strip().split("\n\n")
    return " ".join(paragraphs[0].split())


def roofline_s(served: ServedModel) -> float:
    """Seconds to read weights and KV of one device once; 0 for a chip of unknown bandwidth."""
    chip = CHIPS.get(served.setting.topology.split(":")[0])
    read = bytes_on_device(served.weights) + bytes_on_device(served.state.kv_pages)
    return read / chip.device_hbm_bytes if chip else 0.0


def _read(
    program: Program, compiled: jax.stages.Compiled, text: ProgramText, *, served: ServedModel, limit: int
) -> ProgramReport:
    analysis = compiled.memory_analysis()
    assert analysis is not None, "the TPU compiler accounts for memory"
    copies, (once, cycles) = copies_of(text, pieces_of(served)), cycles_of(text)
    copied_bytes = Counter[str]()
    for copy in copies:
        copied_bytes[copy.kind] += copy.num_bytes * copy.times
    return ProgramReport(
        program.name,
        memory=DeviceMemory(
            analysis.argument_size_in_bytes,
            analysis.temp_size_in_bytes,
            analysis.output_size_in_bytes,
            analysis.alias_size_in_bytes,
            analysis.peak_memory_in_bytes,
            limit,
        ),
        is_in_place=analysis.alias_size_in_bytes >= bytes_on_device(program.in_place),
        copied_bytes=dict(copied_bytes),
        copies=copies,
        collectives=collectives_of(text),
        kernels=kernels_of(text),
        xla_cycles=cycles,
        xla_cycles_once=once,
        roofline_s=roofline_s(served),
    )


def _chosen(programs: list[Program], names: tuple[str, ...]) -> list[Program]:
    known = [program.name for program in programs]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no program {', '.join(unknown)}; there are {', '.join(known)}")
    return [program for program in programs if not names or program.name in names]


def _versions() -> Iterator[tuple[str, str]]:
    for package in ("jax", "libtpu"):
        with contextlib.suppress(PackageNotFoundError):
            yield package, version(package)
