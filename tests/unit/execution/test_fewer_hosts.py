"""A group that may lose hosts computes alike with fewer, and has memory for the experts of those that are lost."""

from __future__ import annotations

from dataclasses import replace

import jax
import pytest

from rayserve_moe.config.settings import (
    CacheSettings,
    CompileSettings,
    ModelSettings,
    ReplaySettings,
    SchedulerSettings,
    SettingsError,
)
from rayserve_moe.execution.fewer_hosts import Parts, pages_with_fewest, settings_of_any_size
from rayserve_moe.execution.memory import bytes_on_device
from rayserve_moe.execution.served_model import RunnerSettings, ServedModel, served_model
from rayserve_moe.model.families.qwen3_moe import spec_from_hf
from rayserve_moe.parallel.mesh import plan_for
from tests.support.models.core import CORE_CONFIG

SPEC = spec_from_hf(CORE_CONFIG.hf_config("float32"))
SETTINGS = RunnerSettings(
    ModelSettings(path="none", max_model_len=256),
    SchedulerSettings(max_running_requests=64, max_step_tokens=128),
    CacheSettings(mem_fraction=1.0),
    ReplaySettings(),
)


def laid_out(num_devices: int, *, cache: CacheSettings = SETTINGS.cache) -> ServedModel:
    plan = plan_for(jax.devices()[:num_devices], data_size=num_devices)
    settings = replace(SETTINGS, cache=cache)
    return served_model(SPEC, plan, settings=settings_of_any_size(settings, spec=SPEC, plan=plan))


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4])
def test_slots_divide_by_whatever_devices_are_left_and_nothing_else_changes(num_devices: int) -> None:
    served, whole = laid_out(num_devices), laid_out(4)
    num_experts = SPEC.router.num_experts
    assert served.config.experts.num_redundant == -num_experts % num_devices
    assert (served.dtype, served.config.kernels) == (whole.dtype, whole.config.kernels)


@pytest.mark.parametrize(("wanted", "taken"), [("auto", "off"), ("native", "native"), ("off", "off")])
def test_kernels_that_pack_weights_are_taken_on_request_alone(wanted: str, taken: str) -> None:
    """Packed weights cannot be cut for another number of hosts."""
    settings = replace(SETTINGS, compile=CompileSettings(cpu_kernels=wanted))
    found = settings_of_any_size(settings, spec=SPEC, plan=plan_for(jax.devices()[:1]))
    assert found.compile.cpu_kernels == taken


def test_pages_leave_memory_for_the_experts_of_lost_hosts() -> None:
    """As many as devices of fewer hosts would have who hold more: then both numbers are one."""
    whole, fewer, free = laid_out(4), laid_out(2), 3_000_000
    found = pages_with_fewest(whole, Parts(4, 2), free=free)
    assert found < whole.num_pages_within(free)
    more = bytes_on_device(fewer.weights) - bytes_on_device(whole.weights)
    assert more > 0 and found == fewer.num_pages_within(free - more)


def test_memory_that_does_not_hold_them_is_refused_at_the_start() -> None:
    whole = laid_out(4)
    with pytest.raises(SettingsError, match="no two KV pages"):
        pages_with_fewest(whole, Parts(4, 1), free=100_000)
    assert replace(whole, settings=SETTINGS).num_pages_within(100_000) >= 2
