"""The cases of a compile check: a server's settings, its model's config, and the devices it is compiled for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from rayserve_moe.checkpoints.model_path import SYNTHETIC_PREFIX, TRAINED_PREFIX, resolve_model_path
from rayserve_moe.config.derive import pages_per_sequence
from rayserve_moe.config.load import default_cache_directory, settings_from, settings_from_yaml
from rayserve_moe.config.settings import DRAFT_MODELS, Settings, SpeculationSettings
from rayserve_moe.config.topology import MAX_CHIPS_PER_HOST, slice_for
from rayserve_moe.execution.served_model import ServedModel, runner_settings, served_model
from rayserve_moe.model.draft_spec import HEAD, MAP, DraftSpec, eagle_spec, prediction_spec
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.parallel.mesh import plan_for
from rayserve_moe.tools.gpu_targets import GPU_TARGETS, GpuTargetError, gpu_devices, is_gpu
from rayserve_moe.tools.presets import cut_to, preset_names, read_config

COMPILER_SPELLINGS = {"v7x": "tpu7x"}
"""The TPU compiler's names of generations that differ from ours."""
ONE_HOST_BOUNDS = (2, 4, 1)
"""Bounds of a host with eight chips."""


class TopologyError(ValueError):
    """A topology that the compiler does not know, or devices that do not fit it."""


class NoTopologyError(ValueError):
    """A config that serves on CPU hosts, without a topology to compile it for."""


@dataclass(frozen=True)
class ServedCase:
    """A served model on a topology."""

    name: str
    settings: Settings
    model: Mapping[str, Any]
    """Parsed `config.json`."""
    topology: str
    """In the compiler's spelling, such as `v6e:2x4`; a GPU and a number of them, such as `h200:1`."""
    num_layers: int = 0
    """Number of layers to compile; 0: all."""


def case_of_config(path: str | Path, *, topology: str = "", model: str = "", num_layers: int = 0) -> ServedCase:
    """Return the case of a Serve config, on its own topology or another.

    The model config is read from `model`, from the config's checkpoint, or from the preset of that name if the
    checkpoint is not on this machine. Raises NoTopologyError if neither the config nor the caller names a topology,
    ValueError for an invalid config.
    """
    settings = settings_from_yaml(path, on_tpu=not is_gpu(topology))
    topology = topology or _topology_of(settings)
    if not topology:
        raise NoTopologyError(f"{path} serves on CPU hosts: pass --topology to compile it for a TPU")
    config = read_config(model or known_model(settings.model.path))
    return ServedCase(Path(path).stem, settings, config, topology, num_layers)


def case_of_model(
    model: str, topology: str, *, values: Mapping[str, Any], dp: int = 0, tp: int = 0, num_layers: int = 0
) -> ServedCase:
    """Return the case of a model on all devices of a topology. If dp or tp is 0, it follows from the other.

    `values` are settings by key; `num_slices` among them is the number of slices of that topology. The pool holds
    exactly all rows at their full length.
    """
    num_devices = len(devices_of(topology, num_slices=values.get("num_slices", 1)))
    dp = dp or num_devices // (tp or 1)
    tp = tp or num_devices // dp
    if dp * tp != num_devices:
        raise TopologyError(f"dp {dp} times tp {tp} is not the {num_devices} devices of {topology}")
    own = {"model_path": model, "num_hosts": num_devices, "devices_per_host": 1, "data_parallel_size": dp}
    settings, config = settings_from({**own, **values}, on_tpu=not is_gpu(topology)), read_config(model)
    max_len = settings.model.max_model_len or spec_from_config(config).max_position_embeddings
    num_pages = settings.scheduler.max_running_requests * pages_per_sequence(max_len, settings.cache.page_size) + 1
    pool = replace(settings.cache, num_pages=settings.cache.num_pages or num_pages)
    return ServedCase(Path(model).name, replace(settings, cache=pool), config, topology, num_layers)


def lay_out(case: ServedCase) -> ServedModel:
    """Lay a case out as a server would; with fewer layers too, in the step shapes of the whole model.

    Raises ValueError with the reason if the parts are incompatible.
    """
    settings, parallel = case.settings, case.settings.parallel
    bounds = None
    if settings.cluster.tpu_topology and case.topology == _topology_of(settings):
        tpu = slice_for(settings.cluster, num_hosts=parallel.num_hosts, num_slices=parallel.num_slices)
        bounds = ONE_HOST_BOUNDS if tpu.chips_per_host == MAX_CHIPS_PER_HOST else None
    devices = devices_of(case.topology, num_slices=parallel.num_slices, bounds=bounds)
    if not settings.cluster.tpu_topology:
        wanted = parallel.num_hosts * (parallel.devices_per_host or 1)
        if wanted > len(devices):
            raise TopologyError(f"{case.name} is served on {wanted} devices, {case.topology} has {len(devices)}")
        devices = devices[:wanted]
    plan = plan_for(devices, data_size=parallel.data_parallel_size, num_slices=parallel.num_slices)
    runner = runner_settings(settings, settings.model)
    spec = spec_from_config(case.model)
    draft = _draft_for(spec, settings.speculation)
    served = served_model(spec, plan, settings=runner, draft=draft)
    if not case.num_layers:
        return served
    few = spec_from_config(cut_to(case.model, case.num_layers))
    if draft is not None and draft.algorithm == "NEXTN":
        draft = prediction_spec(few)
    elif draft is not None:
        draft = replace(draft, aux_layers=tuple(range(len(draft.aux_layers))))
    return replace(served_model(few, plan, settings=runner, draft=draft), shapes=served.shapes)


def _draft_for(target: ModelSpec, settings: SpeculationSettings) -> DraftSpec | None:
    """Return a target's draft spec from the config alone: its files have a head, and a map if it has a vocabulary."""
    if settings.algorithm not in DRAFT_MODELS:
        return None
    if settings.algorithm == "NEXTN":
        return prediction_spec(target)
    config = read_config(settings.draft_model_path)
    names = (HEAD, MAP) if config.get("draft_vocab_size") else (HEAD,)
    return eagle_spec(config, target, algorithm=settings.algorithm, names=names)


def _topology_of(settings: Settings) -> str:
    cluster, parallel = settings.cluster, settings.parallel
    if not cluster.tpu_topology:
        return ""
    tpu = slice_for(cluster, num_hosts=parallel.num_hosts, num_slices=parallel.num_slices)
    return f"{COMPILER_SPELLINGS.get(tpu.version, tpu.version)}:{tpu.topology}"


def known_model(model_path: str) -> str:
    """Return a directory with the model's config, or the preset of that name."""
    if model_path.startswith((SYNTHETIC_PREFIX, TRAINED_PREFIX)):
        return str(resolve_model_path(model_path, cache_directory=default_cache_directory()))
    preset = Path(model_path).name.lower()
    is_here = Path(model_path).expanduser().is_dir()
    return preset if preset in preset_names() and not is_here else model_path


@cache
def devices_of(topology: str, *, num_slices: int = 1, bounds: tuple[int, ...] | None = None) -> list[jax.Device]:
    """Return the devices of a topology, which need not exist. Raises TopologyError if the compiler does not know it."""
    if is_gpu(topology):
        if num_slices > 1:
            raise TopologyError(f"topology {topology}: GPUs of a machine are no slices; remove --slices")
        try:
            return gpu_devices(topology)
        except GpuTargetError as error:
            raise TopologyError(str(error)) from error
    describe = partial(topologies.get_topology_desc, platform="tpu", topology_name=topology)
    if num_slices > 1:
        describe = partial(describe, num_slices=num_slices)
    if bounds is not None:
        describe = partial(describe, chips_per_host_bounds=bounds)
    try:
        return list(describe().devices)
    except (jax.errors.JaxRuntimeError, RuntimeError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        cards = "" if "x" in topology.partition(":")[2] else f"; GPUs are {', '.join(GPU_TARGETS)}, such as h200:1"
        raise TopologyError(f"topology {topology}: {reason}{cards}") from error
