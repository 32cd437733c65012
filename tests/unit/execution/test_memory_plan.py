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
from rayserve_moe.execution.served_model import runner_settings
from rayserve_moe.parallel.mesh import local_devices, plan_for


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
