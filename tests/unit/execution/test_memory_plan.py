"""What memory cannot hold is refused before anything is read, with sizes and with what fits."""

from __future__ import annotations

import re

import pytest

from rayserve_moe.checkpoints.model_path import TRAINED
from rayserve_moe.config.load import settings_from
from rayserve_moe.config.settings import SettingsError
from rayserve_moe.execution import memory_plan
from rayserve_moe.execution.memory import bytes_on_device
from rayserve_moe.execution.runner import HostRunner
from rayserve_moe.execution.served_model import ServedModel, runner_settings, served_model
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.parallel.mesh import local_devices, plan_for
from rayserve_moe.tools.presets import read_config
from tests.support.kernels.gpu_row import gpu_row_instead


def runner_of(**settings):
    wanted = settings_from({"model_path": str(TRAINED["calculator"]), "cpu_kernels": "off", **settings})
    return HostRunner(runner_settings(wanted, wanted.model), plan_for(local_devices(1)))


def test_more_pages_than_memory_holds_are_refused_first_with_what_fits(monkeypatch):
    def never(*_):
        raise AssertionError("the weights are read")

    runner = runner_of(num_pages=1 << 26)
    monkeypatch.setattr(runner, "_read", never)
    words = r"num_pages 67108864 takes [\d,.]+ GB beside .* at most \d+ pages fit"
    with pytest.raises(SettingsError, match=words) as caught:
        runner.load()
    fitting = int(re.search(r"at most (\d+)", str(caught.value))[1])
    free = float(re.search(r"([\d.]+) GB of a device are free", str(caught.value).replace(",", ""))[1]) * 1e9
    held = bytes_on_device(runner.served.weights)
    assert bytes_on_device(runner.served.state(fitting)) + held <= free * 1.01
    assert bytes_on_device(runner.served.state(fitting + fitting // 10)) + held > free


def test_weights_beyond_all_memory_are_refused(monkeypatch):
    runner = runner_of()
    monkeypatch.setattr(memory_plan, "memory_total", lambda: bytes_on_device(runner.served.weights) - 1)
    with pytest.raises(SettingsError, match=r"the weights take 0\.0 GB of a device, which has 0\.0 GB in all"):
        runner.load()


def test_a_plan_is_what_a_server_allocates():
    runner = runner_of(max_model_len=256, enable_prefix_caching=False)
    served = runner.served
    plan = memory_plan.memory_plan(served, free=1 << 30)
    assert plan.weights_bytes == bytes_on_device(served.weights) and plan.free_bytes == 1 << 30
    assert plan.state_bytes == bytes_on_device(served.state(plan.num_pages)) and plan.num_pages == 257
    none = memory_plan.memory_plan(served, free=plan.weights_bytes)
    assert (none.num_pages, none.state_bytes) == (0, 0)


def served_30b(**settings: object) -> ServedModel:
    """Lay out Qwen3-30B-A3B, whose pages of 16 tokens take 786,432 bytes in 8 bits, on the interpreted row of GPUs."""
    wanted = settings_from({"model_path": "m", "mem_fraction": 1.0, "cpu_kernels": "off", **settings})
    spec = spec_from_config(read_config("qwen3-30b-a3b"))
    with gpu_row_instead():
        return served_model(spec, plan_for(local_devices(1)), settings=runner_settings(wanted, wanted.model))


PAGES_OF_2_GIB, MORE_THAN_4_GIB = (2 << 30) // 786_432, (4 << 30) // 786_432 + 1


def test_a_pool_beyond_the_offsets_of_gpus_gets_fewer_pages(caplog):
    served = served_30b(kv_cache_dtype="fp8")
    assert served.num_pages_within(2 << 30) == PAGES_OF_2_GIB and not caplog.messages
    assert served.num_pages_within(3 << 30) == PAGES_OF_2_GIB
    (message,) = caplog.messages
    size = "a pool of 3.22 GB in 8 bits: the kernels address up to 2.15 GB, or more than 4.29 GB"
    assert message == f"{size}; it gets {PAGES_OF_2_GIB} of 4096 pages: num_pages from {MORE_THAN_4_GIB} on is possible"
    assert served.num_pages_within((4 << 30) + 786_432) == MORE_THAN_4_GIB
    assert served_30b(kv_cache_dtype="fp8", num_pages=MORE_THAN_4_GIB).num_pages_within(0) == MORE_THAN_4_GIB
    assert served_30b(dtype="bfloat16").num_pages_within(3 << 30) == 2048


@pytest.mark.parametrize("num_pages", [PAGES_OF_2_GIB + 1, 2 * PAGES_OF_2_GIB])
def test_pages_beyond_the_offsets_of_gpus_are_refused_if_they_are_set(num_pages: int):
    served = served_30b(kv_cache_dtype="fp8", num_pages=num_pages)
    bounds = f"set at most {PAGES_OF_2_GIB}, or at least {MORE_THAN_4_GIB}"
    words = rf"num_pages {num_pages}: a pool of [\d.]+ GB in 8 bits: .*; {bounds}"
    with pytest.raises(SettingsError, match=words):
        served.num_pages_within(8 << 30)
    with pytest.raises(SettingsError, match=words):
        memory_plan.memory_plan(served, free=80 << 30)


def test_kernels_of_cpus_address_a_pool_of_any_size():
    wanted = settings_from({"model_path": "m", "mem_fraction": 1.0, "cpu_kernels": "off", "kv_cache_dtype": "fp8"})
    spec = spec_from_config(read_config("qwen3-30b-a3b"))
    served = served_model(spec, plan_for(local_devices(1)), settings=runner_settings(wanted, wanted.model))
    assert served.num_pages_within(3 << 30) == 4096
