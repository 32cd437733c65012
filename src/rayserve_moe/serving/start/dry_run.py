"""`rayserve-moe serve --dry-run`: the resolved settings of a config and the memory they take; nothing is started."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from rayserve_moe.config.derive import max_open_requests
from rayserve_moe.config.setting_texts import SECRETS
from rayserve_moe.config.settings import Settings
from rayserve_moe.execution.card import describe_model
from rayserve_moe.execution.memory import spare_bytes
from rayserve_moe.execution.memory_plan import MemoryPlan, check_memory, memory_plan
from rayserve_moe.execution.native_kernels import kernels_in_words
from rayserve_moe.execution.runner import HostRunner
from rayserve_moe.execution.served_model import ServedModel
from rayserve_moe.parallel.mesh import local_devices, plan_for, use_cpu_devices
from rayserve_moe.serving.start.state import APPLICATION
from rayserve_moe.serving.start.validation import CheckedConfig

GB = 1e9


def run(config: CheckedConfig) -> int:
    """Print settings and memory of every application of ours; return 0.

    Raises: ValueError for a model that cannot be served so.
    """
    given = {
        one.get("name", "default"): one.get("args") or {}
        for one in config.document["applications"]
        if one["import_path"] == APPLICATION
    }
    for name, settings in config.settings.items():
        sys.stdout.write(f"application {name}, http://{config.host}:{config.port}\n\n")
        sys.stdout.write("\n".join(setting_lines(settings, given[name])) + "\n\n")
        sys.stdout.flush()
        sys.stdout.write("\n".join(memory_lines(settings)) + "\n")
    return 0


def setting_lines(settings: Settings, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield all settings as YAML by section; those that differ from their defaults or were given are marked."""
    for section in dataclasses.fields(settings):
        values = getattr(settings, section.name)
        yield f"# {section.name}"
        for field in dataclasses.fields(values):
            names = (field.metadata.get("key", field.name), *field.metadata.get("aliases", ()))
            value = getattr(values, field.name)
            shown = "***" if names[0] in SECRETS and value else list(value) if isinstance(value, tuple) else value
            text = f"{names[0]}: {yaml.safe_dump(shown, default_flow_style=True, width=1000).splitlines()[0]}"
            is_given = value != field.default or any(name in given for name in names)
            yield f"{text}  # given" if is_given else text


def memory_lines(settings: Settings) -> Iterator[str]:
    """Yield what the settings come to for their model, and the memory that it takes on a device of this machine."""
    if settings.cluster.tpu_topology:
        yield "# memory: `rayserve-moe compile-check --config FILE --layers 2` has it for a TPU slice"
        return
    if settings.cluster.platform == "gpu":
        yield "# memory: `rayserve-moe compile-check --config FILE --topology h200:1` has it for a GPU"
        return
    served, plan = _served(settings)
    scheduler = settings.scheduler
    rows = scheduler.max_running_requests
    num_open = max_open_requests(scheduler, num_data_ranks=settings.parallel.data_parallel_size)
    num_tokens = max(0, plan.num_pages - 1) * served.settings.cache.page_size
    yield f"# model: {settings.model.path}, computed in {served.dtype} by {kernels_in_words(served.config.kernels)}"
    yield f"# tokens of a sequence: {served.longest:,}; sequences at once: {rows}; requests: {num_open:,}"
    yield f"# step shapes to compile: {len(served.shapes)}"
    yield f"# memory of a device, {plan.free_bytes / GB:.2f} GB free:"
    yield f"#   weights       {plan.weights_bytes / GB:8.3f} GB, experts in {served.expert_dtype}"
    if plan.staging_bytes:
        yield f"#   moving experts{plan.staging_bytes / GB:8.3f} GB"
    yield (
        f"#   KV and rows   {plan.state_bytes / GB:8.3f} GB in {served.kv_dtype}: {plan.num_pages:,} pages, "
        f"{num_tokens:,} tokens, {num_tokens / served.longest:.1f} sequences of full length"
    )
    yield f"#   left          {(plan.free_bytes - plan.needed_bytes) / GB:8.3f} GB"


def _served(settings: Settings) -> tuple[ServedModel, MemoryPlan]:
    parallel = settings.parallel
    num_devices = parallel.num_hosts * (parallel.devices_per_host or 1)
    use_cpu_devices(num_devices)
    devices = local_devices(num_devices)
    mesh_plan = plan_for(devices, data_size=parallel.data_parallel_size, num_slices=parallel.num_slices)
    served = HostRunner(describe_model(settings).runner, mesh_plan).served
    check_memory(served, devices)
    return served, memory_plan(served, free=spare_bytes(devices))
