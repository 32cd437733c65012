"""Loader of Settings from keyword arguments, YAML and environment. No other module reads os.environ.

Keys are flat and have the names of other engines, such as `enable_return_routed_experts`.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
import reprlib
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from rayserve_moe.config.adapters import AdapterSettings
from rayserve_moe.config.derive import group_sizes
from rayserve_moe.config.given_files import is_url
from rayserve_moe.config.settings import TPU_PAGE_SIZE, ParallelSettings, Settings, SettingsError
from rayserve_moe.config.speculation import check_speculation, in_own_terms
from rayserve_moe.config.topology import check_slices

ENVIRONMENT_KEYS = {
    "RAYSERVE_MOE_API_KEY": "api_key",
    "RAYSERVE_MOE_ADMIN_API_KEY": "admin_api_key",
    "RAYSERVE_MOE_MODEL_PATH": "model_path",
    "RAYSERVE_MOE_CPU_LEVEL": "cpu_level",
    "RAYSERVE_MOE_JOURNAL": "journal_address",
    "RAYSERVE_MOE_JOURNAL_KEY": "journal_key",
}
log = logging.getLogger(__name__)
COMPILER_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "PJRT_NPROC")

LISTS: dict[Any, tuple[type, str]] = {tuple[int, ...]: (int, "integers"), tuple[str, ...]: (str, "texts")}
"""List types of settings: entry type, and its plural for messages."""
MAX_ENTRIES = 64
MAX_CACHED_TOKENS = (1 << 31) - 1


@dataclasses.dataclass(frozen=True)
class _Key:
    name: str
    section: str
    field: str
    kind: type
    bounds: tuple[float, float] | None = None
    choices: tuple[str, ...] = ()


def settings_from(values: Mapping[str, Any], *, on_tpu: bool = False) -> Settings:
    """Build Settings from flat keys; a missing key takes its value from the environment, then its default.

    `page_size` has the TPU default if a slice is named or if `on_tpu` is True.

    Raises: SettingsError that names the key if it is unknown (with the nearest known key), has the wrong type, is out
    of range, is given under two names, or contradicts another key.
    """
    keys = _keys()
    merged = {key: os.environ[variable] for variable, key in ENVIRONMENT_KEYS.items() if os.environ.get(variable)}
    merged = in_own_terms(_current_names({**merged, **values}))
    is_single = not merged.get("tpu_topology") and all(merged.get(n, 1) == 1 for n in ("num_hosts", "devices_per_host"))
    sections: dict[str, dict[str, Any]] = {}
    given: dict[_Key, str] = {}
    for name, value in merged.items():
        key = keys.get(name)
        if name in EXPLAINED:
            if value == 1 and is_single:
                continue
            raise SettingsError(f"{name}: {EXPLAINED[name]}")
        if name in FIXED:
            only, reason = FIXED[name]
            if value != only:
                raise SettingsError(f"{name} must be {only} or left out, found {_shown(value)}: {reason}")
            continue
        if key is None:
            raise SettingsError(f"unknown setting {name!r}{_nearest(name, list(keys))}")
        if given.setdefault(key, name) != name:
            raise SettingsError(f"{given[key]} and {name} name the same setting: give only one of them")
        sections.setdefault(key.section, {})[key.field] = _checked(name, _current_value(name, value, key), key)
    if on_tpu or sections.get("cluster", {}).get("tpu_topology"):
        sections.setdefault("cache", {}).setdefault("page_size", TPU_PAGE_SIZE)
    types = get_type_hints(Settings)
    settings = Settings(**{section: types[section](**fields) for section, fields in sections.items()})
    _check_together(settings)
    return settings


def settings_from_yaml(path: str | Path, *, on_tpu: bool = False) -> Settings:
    """Read the flat mapping of a YAML file, or the `args` of its first application if it is a Serve config.

    `on_tpu` acts as in `settings_from`.
    """
    document = read_yaml(path)
    if isinstance(document, dict) and document.get("applications"):
        document = document["applications"][0].get("args") or {}
    if not isinstance(document, dict):
        raise SettingsError(f"{path}: expected a mapping of settings")
    return settings_from(document, on_tpu=on_tpu)


def read_yaml(path: str | Path) -> Any:
    """Parse a YAML file.

    Raises: SettingsError if it is unreadable; for wrong YAML its message shows the line, with a caret below the fault.
    """
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: {(error.strerror or str(error)).lower()}") from error
    except RecursionError as error:
        raise SettingsError(f"{path}: nested too deeply") from error
    except yaml.MarkedYAMLError as error:
        raise SettingsError(f"{path}{_place_of(error)}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise SettingsError(f"{path}: {' '.join(str(error).split())}") from error


def _place_of(error: yaml.MarkedYAMLError) -> str:
    """Return where YAML is wrong and why: `, line 3: mapping values are not allowed here`, then the line."""
    mark = error.problem_mark or error.context_mark
    what = ", ".join(filter(None, (error.problem, error.context)))
    if mark is None:
        return f": {what}"
    return f", line {mark.line + 1}: {what}\n{mark.get_snippet(indent=2) or ''}".rstrip()


def set_environment_defaults(variables: Mapping[str, str]) -> None:
    """Set variables of this process that the user has not set, for libraries that read them at import."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def set_compiler_flag(name: str, value: object) -> None:
    """Set a flag of XLA unless the user has set it; must run before jax touches a device."""
    given = os.environ.get("XLA_FLAGS", "")
    if not any(flag.split("=")[0] == f"--{name}" for flag in given.split()):
        os.environ["XLA_FLAGS"] = f"{given} --{name}={value}".strip()


def unset_compiler_options(options: Mapping[str, str | bool]) -> dict[str, str | bool]:
    """Return the options that the user's XLA_FLAGS does not set."""
    given = {flag.split("=")[0] for flag in os.environ.get("XLA_FLAGS", "").split()}
    return {name: value for name, value in options.items() if f"--{name}" not in given}


def environment_setting(name: str) -> str:
    """Return the environment's value of a setting, for clients of a server; empty if unset."""
    return next((os.environ.get(variable, "") for variable, key in ENVIRONMENT_KEYS.items() if key == name), "")


def inherited_environment() -> dict[str, str]:
    """Return all variables of this process, for its children."""
    return dict(os.environ)


def replace_environment(variables: Mapping[str, str]) -> None:
    """Replace all variables of this process."""
    os.environ.clear()
    os.environ.update(variables)


def variable(name: str) -> str:
    """Return a variable of this process; empty if unset."""
    return os.environ.get(name, "")


def temporary_folder() -> Path:
    """Return the folder in which Ray keeps the files of running clusters."""
    return Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())


def compiler_environment() -> dict[str, str]:
    """Return the environment variables that compilers read."""
    return {name: os.environ[name] for name in COMPILER_VARIABLES if name in os.environ}


def default_cache_directory() -> Path:
    """Return the directory that keeps synthetic checkpoints and compiled programs between runs."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "rayserve_moe"


def checkpoint_cache(setting: str) -> Path | None:
    """Return the directory of the setting `checkpoint_cache`, or None for `off`."""
    if setting == "off":
        return None
    return default_cache_directory() / "remote" if setting == "auto" else Path(setting).expanduser()


def _keys() -> dict[str, _Key]:
    keys = {}
    for section, section_type in get_type_hints(Settings).items():
        kinds = get_type_hints(section_type)
        for field in dataclasses.fields(section_type):
            stated = field.metadata
            key = _Key(
                stated.get("key", field.name),
                section,
                field.name,
                kinds[field.name],
                stated.get("bounds"),
                stated.get("choices", ()),
            )
            keys |= dict.fromkeys((key.name, *stated.get("aliases", ())), key)
    return keys


def _nearest(name: str, known: list[str]) -> str:
    matches = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {matches[0]!r}?" if matches else f"; known settings: {', '.join(sorted(known))}"


RENAMED_KEYS = {
    "most_rebuilds_in_10_minutes": "max_rebuilds_in_10_minutes",
    "most_rebuilds_in_hour": "max_rebuilds_in_hour",
    "elastic_most_lost": "elastic_max_lost",
}
"""Keys that the next release rejects, with their current names."""


def _current_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings under their current keys, with a warning for each renamed key."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        current = RENAMED_KEYS.get(name, name)
        if current != name:
            log.warning("%s is named %s: the next release does not take the old name", name, current)
        if current in found:
            raise SettingsError(f"{name} and {current} name the same setting: give only one of them")
        found[current] = value
    return found


RENAMED_VALUES = {"expert_backend": {"pushed": "low_latency_dispatch"}}
"""Names of values that the next release rejects, by key, with their current names."""


def _current_value(name: str, value: Any, key: _Key) -> Any:
    """Return the current name of a renamed value, with a warning; other values as they are."""
    renamed = RENAMED_VALUES.get(key.name, {})
    if not isinstance(value, str) or value not in renamed:
        return value
    log.warning("%s %s is named %s: the next release does not take the old name", name, value, renamed[value])
    return renamed[value]


def _checked(name: str, value: Any, key: _Key) -> Any:
    """Return a value of the type, the choices and the bounds of its key."""
    kind = key.kind
    if kind in LISTS:
        return _checked_list(name, value, key)
    if kind is str and isinstance(value, Path):
        value = str(value)
    if type(value) is not kind and not (kind is float and type(value) is int):
        bounds = "; it may be {} to {}".format(*key.bounds) if key.bounds else ""
        raise SettingsError(f"{name} must be of type {kind.__name__}, found {_shown(value)}{bounds}")
    if key.choices and value not in key.choices:
        raise SettingsError(f"{name} must be one of {', '.join(key.choices)}, found {_shown(value)}")
    if kind in (int, float):
        _check_bounds(name, value, key)
    return kind(value)


def _checked_list(name: str, values: Any, key: _Key) -> tuple[Any, ...]:
    """Check the entries of a list."""
    kind, what = LISTS[key.kind]
    if not isinstance(values, list | tuple) or any(type(value) is not kind for value in values):
        form = f", for example [{_shown(values)}]" if type(values) is kind else ""
        raise SettingsError(f"{name} must be a list of {what}{form}, found {_shown(values)}")
    if len(values) > MAX_ENTRIES:
        raise SettingsError(f"{name} must have at most {MAX_ENTRIES} entries, found {len(values)}")
    for value in values if kind is int else ():
        _check_bounds(name, value, key)
    return tuple(values)


def _check_bounds(name: str, value: Any, key: _Key) -> None:
    """Check a number against the declared bounds of its field; NaN violates every bound."""
    assert key.bounds is not None, f"{key.name} declares no bounds"
    minimum, maximum = key.bounds
    if not value >= minimum:
        raise SettingsError(f"{name} must be at least {minimum}, found {_shown(value)}")
    if not value <= maximum:
        raise SettingsError(f"{name} must be at most {maximum}, found {_shown(value)}")


def _shown(value: Any) -> str:
    """Return a value for a message, on a single line and abbreviated."""
    return "a number beyond all bounds" if type(value) is int and abs(value) > sys.maxsize else reprlib.repr(value)


def _check_together(settings: Settings) -> None:
    if not settings.model.path:
        raise SettingsError(
            "model_path is missing: give a checkpoint directory, a URL such as gs://bucket/folder, a model of the "
            "Hugging Face Hub, trained:calculator or synthetic:<preset>"
        )
    kept = {"compile_cache": settings.compile.cache, "checkpoint_cache": settings.model.checkpoint_cache}
    if not all(kept.values()):
        raise SettingsError(f"{min(kept, key=kept.__getitem__)} must be auto, off or a directory, found ''")
    if settings.cache.num_pages == 1:
        raise SettingsError("num_pages must be at least 2: one page holds padding")
    if settings.cache.num_pages * settings.cache.page_size > MAX_CACHED_TOKENS:
        raise SettingsError(f"num_pages * page_size must be at most {MAX_CACHED_TOKENS}: locations are 32-bit integers")
    if bool(settings.cluster.tpu_topology) != bool(settings.cluster.tpu_version):
        raise SettingsError("tpu_topology and tpu_version belong together: give both, or neither for CPU hosts")
    wrong = [root for root in settings.updates.weight_roots if not (Path(root).is_absolute() or is_url(root))]
    if wrong:
        raise SettingsError(f"weight_roots must be absolute directories or URLs, found {_shown(wrong[0])}")
    if settings.server.admin_api_key and settings.server.admin_api_key == settings.server.api_key:
        raise SettingsError("admin_api_key equals api_key: give it another value, or leave it empty")
    if settings.structured.processors and not settings.structured.enabled:
        raise SettingsError("logit_processors need deferred sampling: set structured_output: true")
    _check_parallel(settings.parallel)
    _check_balancing(settings)
    _check_selection(settings)
    _check_adapters(settings.adapters)
    check_speculation(settings.speculation, selection=settings.experts.selection)
    check_slices(settings.cluster, settings.parallel)
    group_sizes(settings.cluster, settings.parallel)
    scheduler = settings.scheduler
    if scheduler.decode_batch_sizes and max(scheduler.decode_batch_sizes) < scheduler.max_running_requests:
        raise SettingsError(
            f"precompile_bs_paddings reaches {max(scheduler.decode_batch_sizes)} rows, "
            f"max_running_requests is {scheduler.max_running_requests}: add a size that holds them all"
        )


def _check_balancing(settings: Settings) -> None:
    if settings.balancing.placement and not settings.balancing.enabled:
        raise SettingsError("expert_placement needs enable_eplb: true, because experts move to it")


def _check_selection(settings: Settings) -> None:
    experts = settings.experts
    if settings.replay.by_default != "off" and not settings.replay.enabled:
        raise SettingsError("routed_experts_by_default needs enable_return_routed_experts: true")
    for is_on, name in (
        (settings.replay.shows_index, "enable_return_indexer_topk"),
        (settings.replay.shows_gates, "enable_return_router_gates"),
    ):
        if is_on and not settings.replay.enabled:
            raise SettingsError(f"{name} needs enable_return_routed_experts: true")
    if experts.selection == "balanced" and settings.replay.audits:
        raise SettingsError("enable_audit needs expert_selection replicas_only: balanced experts cannot be forced")
    if experts.selection == "balanced" and settings.replay.enabled:
        raise SettingsError(
            "expert_selection balanced and enable_return_routed_experts exclude each other: which experts a token gets "
            "then depends on the other tokens of its step, so a trainer that replays the rows would train another "
            "policy than the one that answered; take expert_selection replicas_only, which balances without a change"
        )


def _check_adapters(adapters: AdapterSettings) -> None:
    if adapters.experts and not adapters.num_slots:
        raise SettingsError("lora_experts needs max_loras: merged adapters may always change experts")
    if adapters.shares_outer and not adapters.experts:
        raise SettingsError("lora_shared_outer needs lora_experts: only adapters of experts share matrices")


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


_HEADS = (
    "attention heads are split over all devices of a data-parallel group by themselves: set data_parallel_size (the "
    "groups), and devices_per_host for fewer devices"
)
_EXPERTS = "experts always lie over all devices: leave it out"
EXPLAINED = {
    **dict.fromkeys(("tp_size", "tensor_parallel_size", "attention_tp_size"), _HEADS),
    **dict.fromkeys(("ep_size", "expert_parallel_size", "enable_expert_parallel", "moe_tp_size"), _EXPERTS),
    **dict.fromkeys(("pp_size", "pipeline_parallel_size"), "layers are not split into stages here: leave it out"),
}
"""Settings of other engines without a counterpart, with advice. The value 1 is ignored on a single device."""
FIXED = {
    "elastic_programs": (
        "on_loss",
        "a group of fewer hosts compiles its programs when it first serves, and compile_cache keeps them",
    ),
    "speculative_eagle_topk": (1, "trees of drafts are not served, chains are"),
}
"""Settings with a single permitted value, and the reason."""
