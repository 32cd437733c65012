"""Choice of a model's kernels and of the dtype that they compute in."""

from __future__ import annotations

import logging

from rayserve_moe.config import derive
from rayserve_moe.config.settings import CacheSettings, CompileSettings, ModelSettings, SettingsError
from rayserve_moe.execution.native_levels import AUTO, NativeKernelsUnavailable, choose_level
from rayserve_moe.execution.native_library import loaded_level, register_native_kernels, requested_level
from rayserve_moe.kernels.cpu_native.layout import shape_problem
from rayserve_moe.kernels.operations import Kernels
from rayserve_moe.kernels.table import CPU_INVARIANT, CPU_NATIVE, KERNELS, TPU_INVARIANT
from rayserve_moe.model.layers.choice import summed_widths
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.parallel.mesh import platform_of
from rayserve_moe.parallel.sharding import ParallelPlan

log = logging.getLogger(__name__)
INVARIANT = {"cpu": CPU_INVARIANT, "tpu": TPU_INVARIANT}
"""Kernels of `invariant_products` by platform."""


def kernels_in_words(kernels: Kernels) -> str:
    """Return the name of a kernel table; for native kernels with their instruction level."""
    return f"{kernels.name} ({loaded_level()})" if kernels.name == CPU_NATIVE.name else kernels.name


def choose_kernels(
    spec: ModelSpec,
    plan: ParallelPlan,
    *,
    model: ModelSettings,
    compiling: CompileSettings,
    cache: CacheSettings | None = None,
) -> Kernels:
    """Return the kernels for a model on a mesh.

    If `auto` falls back to the platform's kernels although the processor supports native ones, a warning is logged.

    Raises: SettingsError if native or invariant kernels are requested and unavailable.
    """
    wanted, platform = compiling.cpu_kernels, platform_of(plan.mesh)
    of_platform = _of_platform(platform, compiling)
    if wanted == "off" or (wanted == "auto" and (platform != "cpu" or plan.mesh.size > 1)):
        return of_platform
    if (level := requested_level(compiling.cpu_level)) != AUTO:
        try:
            choose_level(level)
        except NativeKernelsUnavailable as error:
            raise SettingsError(f"cpu_level {level}: {error}") from error
    try:
        if cache and cache.kv_dtype == "fp8":
            raise NativeKernelsUnavailable("they store keys and values in bfloat16, and kv_cache_dtype is fp8")
        if reason := _unsupported_reason(spec, plan, dtype=model.dtype, is_requested=wanted == "native"):
            raise NativeKernelsUnavailable(reason)
        register_native_kernels(compiling.cpu_level)
    except NativeKernelsUnavailable as error:
        if wanted == "native":
            raise SettingsError(f"cpu_kernels native: {error}; set auto") from error
        is_loss = _has_instructions(level) and not _is_float32(spec, dtype=model.dtype, is_requested=False)
        log.log(logging.WARNING if is_loss else logging.INFO, "native CPU kernels are not used: %s", error)
        return of_platform
    return CPU_NATIVE


def _of_platform(platform: str, compiling: CompileSettings) -> Kernels:
    """Return the kernels of a platform without native ones."""
    if platform not in KERNELS:
        raise SettingsError(f"platform {platform}: there are kernels for cpu, gpu and tpu only; set platform: cpu")
    if compiling.invariant_products != "on":
        return KERNELS[platform]
    if platform not in INVARIANT:
        raise SettingsError(f"invariant_products on: there are no such kernels for platform {platform}; set auto")
    return INVARIANT[platform]


def _has_instructions(requested: str) -> bool:
    try:
        choose_level(requested)
    except NativeKernelsUnavailable:
        return False
    return True


def dtype_for(spec: ModelSpec, plan: ParallelPlan, *, model: ModelSettings, kernels: Kernels) -> str:
    """Return the compute dtype of a model: the only dtype of its kernels, or the setting's."""
    return kernels.dtype or derive.compute_dtype(
        model.dtype, platform=platform_of(plan.mesh), checkpoint_dtype=spec.checkpoint_dtype
    )


def _is_float32(spec: ModelSpec, *, dtype: str, is_requested: bool) -> bool:
    """Return True if the settings or the checkpoint select float32; `is_requested`: native kernels are requested."""
    return dtype == "float32" or (dtype == "auto" and spec.checkpoint_dtype == "float32" and not is_requested)


def _unsupported_reason(spec: ModelSpec, plan: ParallelPlan, *, dtype: str, is_requested: bool) -> str | None:
    """Return why the native kernels cannot compute a model, or None if they can."""
    if platform_of(plan.mesh) != "cpu":
        return "the devices are not CPUs"
    if _is_float32(spec, dtype=dtype, is_requested=is_requested):
        return "they compute in bfloat16, and the model in float32"
    return shape_problem(summed_widths(spec, plan.tensor_size))
