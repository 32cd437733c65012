"""Which kernels compute a model, and in what dtype."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from rayserve_moe.config import derive
from rayserve_moe.config.settings import CompileSettings, ModelSettings, SettingsError
from rayserve_moe.execution.native_library import NativeKernelsUnavailable, register_native_kernels
from rayserve_moe.kernels.cpu_native.layout import shape_problem
from rayserve_moe.kernels.registry import CPU_NATIVE, KERNELS, Kernels
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.parallel.mesh import platform_of
from rayserve_moe.parallel.sharding import ParallelPlan

log = logging.getLogger(__name__)

KNOWN = {"qk_norm": ("none", "head")}
"""Values of a knob that the kernels know, where that is more than its default."""


def choose_kernels(spec: ModelSpec, plan: ParallelPlan, *, model: ModelSettings, compiling: CompileSettings) -> Kernels:
    """The kernels of a model on a mesh. SettingsError where native ones are asked for and cannot be had."""
    wanted, platform = compiling.cpu_kernels, platform_of(plan.mesh)
    of_platform = KERNELS[platform]
    if wanted == "off" or (wanted == "auto" and (platform != "cpu" or plan.mesh.size > 1)):
        return of_platform
    try:
        if reason := _why_not(spec, plan, dtype=model.dtype, is_asked_for=wanted == "native"):
            raise NativeKernelsUnavailable(reason)
        register_native_kernels()
    except NativeKernelsUnavailable as error:
        if wanted == "native":
            raise SettingsError(f"cpu_kernels native: {error}; take auto") from error
        log.info("native CPU kernels are not used: %s", error)
        return of_platform
    return CPU_NATIVE


def dtype_for(spec: ModelSpec, plan: ParallelPlan, *, model: ModelSettings, kernels: Kernels) -> str:
    """What a model is computed in: the only dtype of its kernels, where they have only one."""
    return kernels.dtype or derive.compute_dtype(
        model.dtype, platform=platform_of(plan.mesh), checkpoint_dtype=spec.checkpoint_dtype
    )


def _unknown_knobs(path: str, spec: Any) -> Iterator[str]:
    """Knobs at a value that the kernels were not written for: of the values that are computed, all but the first."""
    for knob in fields(spec):
        value, name = getattr(spec, knob.name), f"{path}.{knob.name}"
        if is_dataclass(value):
            yield from _unknown_knobs(name, value)
        elif "computed" in knob.metadata and value not in KNOWN.get(knob.name, knob.metadata["computed"][:1]):
            yield f"{name} = {value!r}"


def _why_not(spec: ModelSpec, plan: ParallelPlan, *, dtype: str, is_asked_for: bool) -> str | None:
    """What about a model the kernels cannot do, None where there is nothing."""
    if platform_of(plan.mesh) != "cpu":
        return "the devices are no CPUs"
    if dtype == "float32" or (dtype == "auto" and spec.checkpoint_dtype == "float32" and not is_asked_for):
        return "they compute in bfloat16, and the model in float32"
    if unknown := list(_unknown_knobs(spec.family, spec)):
        return f"they do not know {', '.join(unknown)}"
    sizes = {
        "hidden_size": spec.hidden_size,
        "moe_intermediate_size": spec.experts.intermediate_size,
        "intermediate_size of a device": spec.dense_intermediate_size // plan.tensor_size
        if spec.dense_layer_ids
        else 0,
        "vocabulary of a device": -(-spec.vocab_size // plan.mesh.size),
    }
    return shape_problem(spec.attention.head_dim, sizes)
