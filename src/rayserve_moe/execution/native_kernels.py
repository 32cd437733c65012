"""Which kernels compute a model, and in what dtype; native ones are built by a compiler of this machine, once."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import jax

from rayserve_moe.config import derive
from rayserve_moe.config.load import default_cache_directory
from rayserve_moe.config.settings import CacheSettings, CompileSettings, ModelSettings, SettingsError
from rayserve_moe.kernels import cpu_native
from rayserve_moe.kernels.cpu_native.calls import TARGETS
from rayserve_moe.kernels.cpu_native.layout import DEFINITIONS, shape_problem
from rayserve_moe.kernels.registry import CPU_NATIVE, KERNELS, Kernels
from rayserve_moe.model.spec import AttentionSpec, ModelSpec
from rayserve_moe.parallel.mesh import platform_of
from rayserve_moe.parallel.sharding import ParallelPlan

SOURCES = Path(next(iter(cpu_native.__path__)))
MAIN_SOURCE = "native.cc"
CPU_FLAGS = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "fma")
"""What the kernels are written in, as /proc/cpuinfo names it."""
CPUINFO = Path("/proc/cpuinfo")
CPU_OPTIONS = tuple("-m" + flag.replace("_", "") for flag in CPU_FLAGS)
COMPILERS = ("c++", "g++", "clang++")
OPTIONS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-w")
BUILD_TIMEOUT_S = 300.0
log = logging.getLogger(__name__)


class NativeKernelsUnavailable(Exception):
    """This machine cannot build or run the kernels; says why."""


@cache
def register_native_kernels() -> None:
    """Build the library if this machine has not yet, load it, and register its kernels. NativeKernelsUnavailable."""
    check_cpu(CPUINFO)
    library = build(default_cache_directory() / "native")
    try:
        loaded = ctypes.CDLL(str(library))
    except OSError as error:
        raise NativeKernelsUnavailable(f"{library} cannot be loaded: {error}") from error
    for name, symbol in TARGETS.items():
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(loaded, symbol)), platform="cpu")


def check_cpu(cpuinfo: Path) -> None:
    """Refuse a processor without the instructions, or of unknown ones."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    flags = next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())
    if missing := [flag for flag in CPU_FLAGS if flag not in flags]:
        raise NativeKernelsUnavailable(f"the processor ({platform.machine()}) does not have {', '.join(missing)}")


def build(directory: Path) -> Path:
    """Path of the library, compiled now unless `directory` has it: it is named by what it was made from and how."""
    options = [*OPTIONS, *CPU_OPTIONS, *DEFINITIONS]
    recipe = hashlib.sha256(repr((options, jax.__version__)).encode())
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in {".cc", ".h"}:
            recipe.update(source.name.encode() + source.read_bytes())
    library = directory / f"kernels-{recipe.hexdigest()[:16]}.so"
    if library.exists():
        return library
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise NativeKernelsUnavailable(f"there is no C++ compiler ({', '.join(COMPILERS)})")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as here:
            partial = Path(here) / library.name
            _compile([compiler, *options, f"-isystem{jax.ffi.include_dir()}", str(SOURCES / MAIN_SOURCE)], partial)
            partial.replace(library)
    except OSError as error:
        raise NativeKernelsUnavailable(f"the kernels cannot be written: {error}") from error
    return library


def _compile(command: list[str], target: Path) -> None:
    try:
        subprocess.run(
            [*command, "-o", str(target)], check=True, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise NativeKernelsUnavailable(f"{command[0]} takes longer than {BUILD_TIMEOUT_S:.0f} s") from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise NativeKernelsUnavailable(f"{command[0]} fails: {last}") from error


def choose_kernels(
    spec: ModelSpec,
    plan: ParallelPlan,
    *,
    model: ModelSettings,
    compiling: CompileSettings,
    cache: CacheSettings | None = None,
) -> Kernels:
    """The kernels of a model on a mesh. SettingsError where native ones are asked for and cannot be had.

    Where `auto` falls back to those of the platform although the processor could do better, that is a warning.
    """
    wanted, platform = compiling.cpu_kernels, platform_of(plan.mesh)
    of_platform = KERNELS[platform]
    if wanted == "off" or (wanted == "auto" and (platform != "cpu" or plan.mesh.size > 1)):
        return of_platform
    try:
        if cache and cache.kv_dtype == "fp8":
            raise NativeKernelsUnavailable("they keep keys and values in bfloat16, and kv_cache_dtype is fp8")
        if reason := _why_not(spec, plan, dtype=model.dtype, is_asked_for=wanted == "native"):
            raise NativeKernelsUnavailable(reason)
        register_native_kernels()
    except NativeKernelsUnavailable as error:
        if wanted == "native":
            raise SettingsError(f"cpu_kernels native: {error}; take auto") from error
        is_loss = _has_instructions() and not _is_float32(spec, dtype=model.dtype, is_asked_for=False)
        log.log(logging.WARNING if is_loss else logging.INFO, "native CPU kernels are not used: %s", error)
        return of_platform
    return CPU_NATIVE


def _has_instructions() -> bool:
    try:
        check_cpu(CPUINFO)
    except NativeKernelsUnavailable:
        return False
    return True


def dtype_for(spec: ModelSpec, plan: ParallelPlan, *, model: ModelSettings, kernels: Kernels) -> str:
    """What a model is computed in: the only dtype of its kernels, where they have only one."""
    return kernels.dtype or derive.compute_dtype(
        model.dtype, platform=platform_of(plan.mesh), checkpoint_dtype=spec.checkpoint_dtype
    )


def _is_float32(spec: ModelSpec, *, dtype: str, is_asked_for: bool) -> bool:
    """Whether a model is to be computed in float32: by the settings, or by its files unless bfloat16 is asked for."""
    return dtype == "float32" or (dtype == "auto" and spec.checkpoint_dtype == "float32" and not is_asked_for)


def _why_not(spec: ModelSpec, plan: ParallelPlan, *, dtype: str, is_asked_for: bool) -> str | None:
    """What about a model the kernels cannot do, None where there is nothing."""
    if platform_of(plan.mesh) != "cpu":
        return "the devices are no CPUs"
    if _is_float32(spec, dtype=dtype, is_asked_for=is_asked_for):
        return "they compute in bfloat16, and the model in float32"
    return shape_problem({"hidden_size": spec.hidden_size, **_depths_of_attention(spec.attention, plan)})


def _depths_of_attention(attention: AttentionSpec, plan: ParallelPlan) -> dict[str, int]:
    """What products of attention on a device add up over: widths by their keys in `config.json`."""
    if (latent := attention.latent) is None:
        return {"head_dim": attention.head_dim}
    num_heads = attention.num_heads // plan.tensor_size
    return {
        "kv_lora_rank": latent.kv_lora_rank,
        "q_lora_rank": latent.q_lora_rank or 0,
        "qk_nope_head_dim": latent.nope_dim,
        f"v_head_dim {latent.value_dim} times {num_heads} heads of a device:": num_heads * latent.value_dim,
    }
