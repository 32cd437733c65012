"""Servers for TPUs whose compiled steps were compared, and the difference of another server from them.

XLA chooses the orders of its sums program by program, so a comparison holds for the programs that were compiled. A
server is accepted if all of its programs with sums are among them: by their keys, which cover all that they are built
from, and by the compiler.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax

from rayserve_moe.config.given_files import read_json_object
from rayserve_moe.config.load import settings_from, variable
from rayserve_moe.config.model_names import PRESETS
from rayserve_moe.execution.programs.buckets import TPU_OF_KIND
from rayserve_moe.execution.programs.cache import program_key
from rayserve_moe.execution.programs.specs import PROBE, names_for, programs_of, step_name
from rayserve_moe.execution.served_model import ServedModel, runner_settings, served_model
from rayserve_moe.kernels.tpu.paged_sizes import MAX_KEYS
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.model.layers.attention import GroupedAttention
from rayserve_moe.model.spec import MixerSpec, ModelSpec

NUM_PAGES = 64
"""Pages of the pools that are compared. No sum depends on their number."""
FLAGS_OF_CPUS = ("--xla_cpu_", "--xla_force_host_platform_device_count=", "--xla_backend_optimization_level=")
"""Prefixes of flags in XLA_FLAGS that do not change programs for TPUs."""


@dataclass(frozen=True)
class ComparedServer:
    """A server on one slice, with a data rank on each device, whose compiled steps add up rows in one order."""

    preset: str
    """Name of the model. Others may differ in the base of the rotation, the maximum length, and the dtypes of files."""
    chip: str
    data_parallel_size: int
    values: Mapping[str, Any] = field(default_factory=dict)
    """Settings that are not defaults."""
    versions: Mapping[str, str] = field(default_factory=lambda: {"jax": "0.10.2", "libtpu": "0.0.42.1"})
    """Versions of the packages that compile programs."""


COMPARED = (
    ComparedServer("qwen3-30b-a3b", "v6e", 8),
    ComparedServer("qwen3-30b-a3b", "v6e", 8, {"enable_return_routed_experts": True}),
)
"""Compared by `rayserve-moe compile-check --row-sums --invariant-products on`, with all steps and all layers."""


def difference_from_compared(served: ServedModel) -> str:
    """Return why the compiled steps of a server could differ from those that were compared; empty if they cannot."""
    family = served.config.spec.family
    of_family = [known for known in COMPARED if _spec_of(known.preset).family == family]
    if not of_family:
        return f"compiled steps of {family} were not compared"
    named = [[*_named_differences(served, known)] for known in of_family]
    if all(named):
        return min(named, key=len)[0]
    alike = [known for known, different in zip(of_family, named, strict=True) if not different]
    found = [next(_other_differences(served, known), "") for known in alike]
    return found[0] if all(found) else ""


def _named_differences(served: ServedModel, known: ComparedServer) -> Iterator[str]:
    compared = _compared(known)
    if _sizes_of(served.config.spec) != _sizes_of(_spec_of(known.preset)):
        yield f"the sizes or the rotation of this model: {compared}"
    for flag in _compiler_flags():
        yield f"{flag}: {compared} without"
    if served.longest < MAX_KEYS:  # blocks of keys have as many pages as a sequence
        yield f"max_model_len {served.longest}: {compared} with at least {MAX_KEYS}"
    facts = {
        "chip": (_chip_of(served), known.chip),
        "num_slices": (served.config.plan.num_slices, 1),
        "data_parallel_size": (served.config.plan.data_size, known.data_parallel_size),
        "devices of a data rank": (served.config.plan.tensor_size, 1),
        **{package: (_version(package), expected) for package, expected in known.versions.items()},
    }
    expected = settings_of(_served_like(served, known))
    facts |= {name: (value, expected[name]) for name, value in settings_of(served).items()}
    for name, (value, other) in facts.items():
        if value != other:
            yield f"{name} {value}: {compared} with {other}"


def _other_differences(served: ServedModel, known: ComparedServer) -> Iterator[str]:
    """Yield programs that differ from those of a compared server though no setting in `settings_of` does."""
    reference = _served_like(served, known)
    keys, steps = _keys_of(reference), ", ".join(map(step_name, reference.shapes))
    for name, key in _keys_of(served).items():
        if name not in keys:
            yield f"step {name}: {_compared(known)} in {steps}"
        elif keys[name] != key:
            yield f"settings of {name}: {_compared(known)} with others"


def _compared(known: ComparedServer) -> str:
    return f"compiled steps of {known.preset} were compared"


def _keys_of(served: ServedModel) -> dict[str, str]:
    """Return the keys of all programs with sums, by name."""
    names = {PROBE}.union(*(names_for(shape, served) for shape in served.shapes))
    return {
        program.name: program_key(program.run, *program.arguments, **program.inputs)
        for program in programs_of(served, num_pages=NUM_PAGES)
        if program.name in names
    }


def _served_like(served: ServedModel, known: ComparedServer) -> ServedModel:
    """Return the layout of a compared server with the weights of this one, its devices and its maximum length."""
    values = {"dtype": "bfloat16", "invariant_products": "on", **known.values}
    settings = settings_from({"model_path": known.preset, **values, "max_model_len": served.longest}, on_tpu=True)
    return served_model(served.config.spec, served.config.plan, settings=runner_settings(settings, settings.model))


def settings_of(served: ServedModel) -> dict[str, Any]:
    """Return the settings that most often change programs, by name, for messages."""
    settings = served.settings
    return {
        "dtype": served.dtype,
        "kv_cache_dtype": served.kv_dtype,
        "page_size": settings.cache.page_size,
        "expert_dtype": served.expert_dtype,
        "expert_products": settings.experts.products,
        "expert_backend": settings.experts.backend,
        "expert_selection": settings.experts.selection,
        "num_redundant_experts": settings.experts.num_redundant,
        "enable_eplb": served.moves_experts,
        "max_running_requests": served.num_rows,
        "speculative_algorithm": settings.speculation.algorithm,
        "structured_output": settings.structured.enabled,
        "logit_processors": settings.structured.processors,
        "enable_return_routed_experts": settings.replay.enabled,
        "enable_return_router_gates": settings.replay.shows_gates,
        "enable_return_hidden_states": settings.replay.shows_hidden,
        "enable_audit": settings.replay.audits,
        "hidden_state_layers": settings.replay.state_layers,
    }


def _chip_of(served: ServedModel) -> str:
    kind = served.config.plan.mesh.devices.flat[0].device_kind
    return TPU_OF_KIND.get(kind, kind)


def _compiler_flags() -> list[str]:
    """Return the flags and the precision that the environment sets for the TPU compiler."""
    flags = [flag for flag in variable("XLA_FLAGS").split() if not flag.startswith(FLAGS_OF_CPUS)]
    precision = jax.config.values["jax_default_matmul_precision"]
    return [*flags, *variable("LIBTPU_INIT_ARGS").split(), *([f"matmul precision {precision}"] if precision else [])]


def _version(package: str) -> str:
    """Return the installed version; `unknown` without the package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


@cache
def _spec_of(preset: str) -> ModelSpec:
    return spec_from_config(read_json_object(PRESETS / f"{preset}.json"))


def _sizes_of(spec: ModelSpec) -> ModelSpec:
    """Return the spec without constants of its rotation, its maximum length and the dtypes of files."""
    mixers = tuple(map(_without_base, spec.mixers))
    return replace(spec, mixers=mixers, max_position_embeddings=0, checkpoint_dtype="", block_dtype="")


def _without_base(mixer: MixerSpec) -> MixerSpec:
    if isinstance(mixer, GroupedAttention) and mixer.rope is not None:
        return replace(mixer, rope=replace(mixer.rope, theta=0.0))
    return mixer
