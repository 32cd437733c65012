"""Turning what a user wrote (keyword arguments, YAML, environment) into Settings. The only reader of os.environ.

Keys are flat and carry the names that users know from other engines, such as `enable_return_routed_experts`.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from rayserve_moe.config.settings import ParallelSettings, Settings, SettingsError
from rayserve_moe.config.topology import check_slices

ENVIRONMENT_KEYS = {"RAYSERVE_MOE_API_KEY": "api_key", "RAYSERVE_MOE_MODEL_PATH": "model_path"}

CHOICES = {
    "dtype": ("auto", "float32", "bfloat16"),
    "transport": ("auto", "compiled_graph", "sockets", "actor_calls"),
    "cpu_kernels": ("auto", "off", "native"),
    "expert_backend": ("auto", "local", "replicated", "all_to_all", "fused"),
    "eplb_dispatch": ("shares", "static", "first", "capacity"),
    "expert_selection": ("auto", "topk", "replicas_only", "balanced"),
    "capacity_scope": ("global", "data_rank"),
}
LEAST = {
    "max_model_len": 0,
    "max_running_requests": 1,
    "max_waiting_requests": 0,
    "max_step_tokens": 32,
    "chunked_prefill_size": 0,
    "page_size": 1,
    "num_pages": 0,
    "num_hosts": 1,
    "devices_per_host": 0,
    "data_parallel_size": 1,
    "num_slices": 1,
    "num_redundant_experts": 0,
    "eplb_interval": 1,
    "eplb_window": 1,
    "eplb_slots_per_step": 1,
    "max_body_bytes": 1,
    "idle_release_s": 0,
    "start_timeout_s": 1,
    "step_timeout_s": 1,
    "drain_timeout_s": 0,
    "cpus_per_host": 0,
    "tpu_chips_per_host": 0,
}
MOST = {"num_redundant_experts": 128}


@dataclasses.dataclass(frozen=True)
class _Key:
    name: str
    section: str
    field: str
    kind: type


def settings_from(values: Mapping[str, Any]) -> Settings:
    """Build Settings from flat keys; what is not named takes its default, after the environment.

    SettingsError names the key: unknown (with the nearest known one), of the wrong type, out of range, given under two
    names, or at odds with another.
    """
    keys = _keys()
    merged = {key: os.environ[variable] for variable, key in ENVIRONMENT_KEYS.items() if os.environ.get(variable)}
    merged.update(values)
    sections: dict[str, dict[str, Any]] = {}
    given: dict[_Key, str] = {}
    for name, value in merged.items():
        key = keys.get(name)
        if key is None:
            raise SettingsError(f"unknown setting {name!r}{_nearest(name, list(keys))}")
        if given.setdefault(key, name) != name:
            raise SettingsError(f"{given[key]} and {name} are one setting: give it once")
        sections.setdefault(key.section, {})[key.field] = _checked(name, value, key)
    types = get_type_hints(Settings)
    settings = Settings(**{section: types[section](**fields) for section, fields in sections.items()})
    _check_together(settings)
    return settings


def settings_from_yaml(path: str | Path) -> Settings:
    """Read the flat mapping of a YAML file, or the `args` of its first application if it is a Serve config."""
    try:
        document = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise SettingsError(f"{path}: {error}") from error
    if isinstance(document, dict) and document.get("applications"):
        document = document["applications"][0].get("args") or {}
    if not isinstance(document, dict):
        raise SettingsError(f"{path}: expected a mapping of settings")
    return settings_from(document)


def set_environment_defaults(variables: Mapping[str, str]) -> None:
    """Set variables of this process that the user has not set, for libraries that read them when they are loaded."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def environment_setting(name: str) -> str:
    """What the environment says of a setting, for clients of a server; empty where it says nothing."""
    return next((os.environ.get(variable, "") for variable, key in ENVIRONMENT_KEYS.items() if key == name), "")


def default_cache_directory() -> Path:
    """Where synthetic checkpoints and compiled programs are kept between runs."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "rayserve_moe"


def _keys() -> dict[str, _Key]:
    keys = {}
    for section, section_type in get_type_hints(Settings).items():
        kinds = get_type_hints(section_type)
        for field in dataclasses.fields(section_type):
            key = _Key(field.metadata.get("key", field.name), section, field.name, kinds[field.name])
            keys |= dict.fromkeys((key.name, *field.metadata.get("aliases", ())), key)
    return keys


def _nearest(name: str, known: list[str]) -> str:
    matches = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {matches[0]!r}?" if matches else f"; known settings: {', '.join(sorted(known))}"


def _checked(name: str, value: Any, key: _Key) -> Any:
    kind = key.kind
    if kind is float and type(value) is int:
        value = float(value)
    if kind == tuple[int, ...]:
        if not isinstance(value, list | tuple) or any(type(v) is not int or v < 1 for v in value):
            raise SettingsError(f"{name} must be a list of positive integers, found {value!r}")
        return tuple(value)
    if kind is str and isinstance(value, Path):
        value = str(value)
    if type(value) is not kind:
        raise SettingsError(f"{name} must be of type {kind.__name__}, found {value!r}")
    _check_range(name, value, key)
    return value


def _check_range(name: str, value: Any, key: _Key) -> None:
    if key.name in CHOICES and value not in CHOICES[key.name]:
        raise SettingsError(f"{name} must be one of {', '.join(CHOICES[key.name])}, found {value!r}")
    if key.name in LEAST and not value >= LEAST[key.name]:
        raise SettingsError(f"{name} must be at least {LEAST[key.name]}, found {value!r}")
    if key.name in MOST and not value <= MOST[key.name]:
        raise SettingsError(f"{name} must be at most {MOST[key.name]}, found {value!r}")


def _check_together(settings: Settings) -> None:
    if not settings.model.path:
        raise SettingsError(
            "model_path is missing: give a checkpoint directory, trained:calculator or synthetic:<preset>"
        )
    if not 0.0 < settings.cache.mem_fraction <= 1.0:
        raise SettingsError(f"mem_fraction must lie in (0, 1], found {settings.cache.mem_fraction!r}")
    if not settings.compile.cache:
        raise SettingsError("compile_cache must be auto, off or a directory, found ''")
    if settings.cache.num_pages == 1:
        raise SettingsError("num_pages must be at least 2: one page holds padding")
    if bool(settings.cluster.tpu_topology) != bool(settings.cluster.tpu_version):
        raise SettingsError("tpu_topology and tpu_version belong together: give both, or neither for CPU hosts")
    _check_parallel(settings.parallel)
    _check_selection(settings)
    check_slices(settings.cluster, settings.parallel)
    scheduler = settings.scheduler
    if scheduler.decode_batch_sizes and max(scheduler.decode_batch_sizes) < scheduler.max_running_requests:
        raise SettingsError(
            f"precompile_bs_paddings reaches {max(scheduler.decode_batch_sizes)} rows, "
            f"max_running_requests is {scheduler.max_running_requests}: add a size that holds them all"
        )


def _check_selection(settings: Settings) -> None:
    experts = settings.experts
    if not (0.0 < experts.capacity_factor < float("inf")):
        raise SettingsError(f"capacity_factor must be a finite number above 0, found {experts.capacity_factor!r}")
    if experts.selection == "balanced" and settings.replay.enabled:
        raise SettingsError(
            "expert_selection balanced and enable_return_routed_experts exclude each other: which experts a token gets "
            "then depends on the other tokens of its step, so a trainer that replays the rows would train another "
            "policy than the one that answered; take expert_selection replicas_only, which balances without a change"
        )


def _check_parallel(parallel: ParallelSettings) -> None:
    num_devices = parallel.num_hosts * parallel.devices_per_host
    counts = {
        "num_hosts * devices_per_host": (num_devices, "data_parallel_size", parallel.data_parallel_size),
        "num_hosts": (parallel.num_hosts, "num_slices", parallel.num_slices),
        "data_parallel_size": (parallel.data_parallel_size, "num_slices", parallel.num_slices),
    }
    for name, (count, divisor_name, divisor) in counts.items():
        if count % divisor:
            raise SettingsError(f"{divisor_name} {divisor} does not divide {name} = {count}")
