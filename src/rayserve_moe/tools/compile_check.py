"""Compilation of a server's programs for TPUs or GPUs on a host without them, with a report on the results."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from rayserve_moe.execution.memory import NoPagesError, bytes_on_device
from rayserve_moe.execution.programs.compiled import compile_programs, lowered, optimized
from rayserve_moe.execution.programs.specs import Program, programs_of
from rayserve_moe.execution.served_model import ServedModel, beside_weights
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.model.layer_runs import layer_runs
from rayserve_moe.parallel.mesh import plan_for
from rayserve_moe.tools.estimate.dump import DumpFolder
from rayserve_moe.tools.estimate.report import Estimator
from rayserve_moe.tools.estimate.workload import StepSizes
from rayserve_moe.tools.gpu_targets import is_gpu, limit_of
from rayserve_moe.tools.program_report import ProgramReader, ProgramReport, figures_of
from rayserve_moe.tools.served_cases import ServedCase, lay_out

COMPILER_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_LOG_DIR": "disabled",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}
"""Environment of the TPU compiler on a host without TPUs: no lock file, no metadata server, no log. Without GPUs jax's
plugin for them does not look for a driver."""

REPORTED_SECTIONS = ("model", "scheduler", "cache", "replay", "parallel", "experts", "balancing", "adapters")
MAX_COPY_OF_LAYER_BYTES = 128 << 20
"""Maximum bytes of a layer's weights that a step with prompts may copy on a GPU: its attention, never its experts."""
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_AVAILABLE = re.compile(r"exceeds available HBM \(([\d.]+)([KMGT]?)\)")


Limits = Mapping[str, Mapping[str, int]]
"""Maximum values of the fields of a ProgramReport, by program name and field name."""


@dataclass(frozen=True)
class CheckReport:
    """The result of a check. Bytes are per device."""

    name: str
    topology: str
    settings: dict[str, Any]
    num_layers: int
    dp: int
    tp: int
    num_expert_slots: int
    weights_bytes: int
    num_pages: int
    kv_pool_bytes: int
    compilers: dict[str, str]
    """Package versions."""
    programs: list[ProgramReport]
    faults: list[str] = field(default_factory=list)
    """Reasons why programs cannot be served."""

    @property
    def fits(self) -> bool:
        return all(program.fits for program in self.programs)

    def as_json(self) -> dict[str, Any]:
        return {"fits": self.fits, **asdict(self), "programs": [figures_of(program) for program in self.programs]}


def use_host_alone() -> None:
    """Prevent jax from using an accelerator of this host. Call before anything else uses jax."""
    jax.config.update("jax_platforms", "cpu")


def check(
    case: ServedCase,
    *,
    names: tuple[str, ...] = (),
    limits: Limits | None = None,
    num_threads: int = 1,
    estimator: Estimator | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> CheckReport:
    """Compile the programs that a server compiles at its start (all, or `names`), `num_threads` concurrently.

    `say` is called with what is compiled, and with each program that is done, from any thread.
    With an `estimator` the steps are also estimated, which requires a single thread. Raises ValueError if model,
    settings and topology are incompatible or a name is unknown; errors of the compiler are in the report.
    """
    assert estimator is None or num_threads == 1, "schedules belong to the program that was compiled last"
    unknown = {name for fields in (limits or {}).values() for name in fields} - figures_of(ProgramReport("")).keys()
    if unknown:
        raise ValueError(f"unknown report fields in the limits: {', '.join(sorted(unknown))}")
    say(f"laying out {case.name} on {case.topology}")
    served = lay_out(case)
    limit = limit_of(case.topology) if is_gpu(case.topology) else hbm_limit(served.config.plan.mesh.devices.flat[0])
    num_pages = _num_pages(served, limit=limit)
    programs = _chosen(programs_of(served, num_pages=num_pages), names)
    reader = ProgramReader(served, num_pages=num_pages, limit=limit, topology=case.topology, estimator=estimator)
    say(f"compiling {len(programs)} programs, {num_threads} at a time: {', '.join(one.name for one in programs)}")
    done = Counted(reader.report, total=len(programs), say=say)
    reports = list(compile_programs(programs, done, num_threads=num_threads).values())
    sections = {name: asdict(getattr(case.settings, name)) for name in REPORTED_SECTIONS}
    return CheckReport(
        case.name,
        case.topology,
        sections,
        num_layers=served.config.spec.num_layers,
        dp=served.config.plan.data_size,
        tp=served.config.plan.tensor_size,
        num_expert_slots=served.config.experts.num_slots,
        weights_bytes=bytes_on_device(served.weights),
        num_pages=num_pages,
        kv_pool_bytes=bytes_on_device(served.state(num_pages).pools),
        compilers=dict(_versions()),
        programs=reports,
        faults=[
            fault
            for report in reports
            for fault in faults_of(report, (limits or {}).get(report.name, {}), allowed=allowed_copies(report, case))
        ],
    )


class Counted:
    """Compilation of programs, from several threads, that says which are done and how many."""

    def __init__(self, report: Callable[[Program], ProgramReport], *, total: int, say: Callable[[str], None]) -> None:
        self._report, self._total, self._say = report, total, say
        self._num_done, self._lock = 0, threading.Lock()

    def __call__(self, program: Program) -> ProgramReport:
        report = self._report(program)
        with self._lock:
            self._num_done += 1
            seconds = report.seconds.lower_s + report.seconds.compile_s
            end = f"{seconds:.0f} s" if not report.error else "does not compile"
            self._say(f"{self._num_done}/{self._total} {program.name}: {end}")
        return report


def estimator_of(case: ServedCase, *, dump: Path) -> Estimator:
    """Return an estimator of a case's steps for the whole model. libtpu must be loaded with `dump_environment`.

    Raises ValueError if only some layers are compiled, of a model whose layers alternate: a step has no layer to add.
    """
    served = lay_out(replace(case, num_layers=0))
    if case.num_layers and (period := max(len(run.period) for run in layer_runs(served.config.spec))) > 1:
        raise ValueError(f"estimating {case.num_layers} layers: kinds of layers alternate, up to {period}; compile all")
    page_size = served.settings.cache.page_size
    sizes = StepSizes(case.topology, served.num_rows, served.longest, page_size, served.dtype, served.kv_dtype)
    return Estimator(DumpFolder(dump), served.config, sizes)


def allowed_copies(program: ProgramReport, case: ServedCase) -> tuple[str, ...]:
    """Return the kinds of weights that a program may copy: on a GPU those of a layer, in a step with prompts.

    XLA's products take a layer out of its stack. For prompts that is little beside the products; experts stay.
    """
    has_prompts = is_gpu(case.topology) and program.name.startswith("prefill")
    large = MAX_COPY_OF_LAYER_BYTES * max(1, case.num_layers or spec_from_config(case.model).num_layers)
    return tuple(kind for kind, size in program.copied_bytes.items() if has_prompts and size <= large)


def faults_of(program: ProgramReport, limits: Mapping[str, int], *, allowed: Collection[str] = ()) -> Iterator[str]:
    """Yield why a program cannot be served: it does not compile or fit, makes forbidden copies, or exceeds a limit."""
    if program.error:
        yield f"{program.name} does not compile: {program.error}"
        return
    if program.memory is not None and not program.fits:
        peak, limit = program.memory.peak / 1e9, program.memory.limit / 1e9
        yield f"{program.name} needs {peak:.2f} GB of a device's {limit:.2f} GB"
    for kind, size in program.copied_bytes.items():
        if kind in allowed:
            continue
        yield f"{program.name} copies {size / 1e6:.1f} MB of {kind}"
    if not program.is_in_place:
        yield f"{program.name} does not update its state in place"
    figures = figures_of(program)
    for name, limit in limits.items():
        if figures[name] > limit:
            yield f"{program.name}: {name} is {figures[name]:,}, more than {limit:,}"


def hbm_limit(device: jax.Device) -> int:
    """Return the bytes of HBM that the compiler grants, parsed from its error for a huge program; 0: unknown."""
    plan = plan_for([device])
    absurd = jax.ShapeDtypeStruct((1 << 30, 1 << 10), jnp.float32, sharding=plan.replicated())
    with contextlib.suppress(StopIteration):
        try:
            optimized(lowered(Program("absurd", partial(jnp.add, 1), (absurd,), {}), plan), plan)
        except jax.errors.JaxRuntimeError as error:
            amount, unit = next(_AVAILABLE.finditer(str(error))).groups()
            return int(float(amount) * UNITS[unit])
    return 0


def _num_pages(served: ServedModel, *, limit: int) -> int:
    """Return a server's number of pages; the minimum if weights leave no memory, which the report names."""
    used = bytes_on_device(served.weights) + bytes_on_device(beside_weights(served))
    try:
        return served.num_pages_within((limit or sys.maxsize) - used)
    except NoPagesError:
        return 2


def _chosen(programs: list[Program], names: tuple[str, ...]) -> list[Program]:
    known = [program.name for program in programs]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"no program {', '.join(unknown)}; known programs: {', '.join(known)}")
    return [program for program in programs if not names or program.name in names]


def _versions() -> Iterator[tuple[str, str]]:
    for package in ("jax", "libtpu", "jax-cuda13-plugin"):
        with contextlib.suppress(PackageNotFoundError):
            yield package, version(package)
