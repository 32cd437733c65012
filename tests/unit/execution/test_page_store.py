"""Slots of host memory are as many as the setting holds; a setting that holds none, or too many, is refused."""

from __future__ import annotations

import pytest

from rayserve_moe.checkpoints.model_path import TRAINED
from rayserve_moe.config.load import settings_from
from rayserve_moe.config.settings import SettingsError
from rayserve_moe.execution import page_store
from rayserve_moe.execution.page_store import MIB, store_sizes
from rayserve_moe.execution.runner import HostRunner
from rayserve_moe.execution.served_model import ServedModel, runner_settings
from rayserve_moe.execution.step.page_moves import moved_shapes
from rayserve_moe.parallel.mesh import local_devices, plan_for
from tests.support.models.families import family_case, write_family


def served_with(**settings: object) -> ServedModel:
    wanted = settings_from({"model_path": str(TRAINED["calculator"]), "cpu_kernels": "off", **settings})
    return HostRunner(runner_settings(wanted, wanted.model), plan_for(local_devices(1))).served


def test_the_slots_fill_the_setting(monkeypatch):
    monkeypatch.setattr(page_store, "memory_available", lambda: 64 * MIB)
    served = served_with(host_cache_mib=64)
    sizes = store_sizes(served, moved_shapes(served.state(9), served.step_config(9)))
    page_bytes = sum(layer.page_bytes for layer in served.pool.layers)
    assert sizes == (64 * MIB // page_bytes, 0)


def test_more_than_the_host_has_is_refused(monkeypatch):
    monkeypatch.setattr(page_store, "memory_available", lambda: 64 * MIB - 1)
    served = served_with(host_cache_mib=64)
    with pytest.raises(SettingsError, match="host_cache_mib 64: this host has 63 MiB available"):
        store_sizes(served, moved_shapes(served.state(9), served.step_config(9)))


def test_a_server_that_caches_no_prefix_is_refused():
    served = served_with(host_cache_mib=8, enable_prefix_caching=False)
    with pytest.raises(SettingsError, match="host_cache_mib 8 needs enable_prefix_caching: true"):
        store_sizes(served, moved_shapes(served.state(9), served.step_config(9)))


def test_less_than_a_page_is_refused():
    served = served_with(host_cache_mib=1, page_size=4096)
    with pytest.raises(SettingsError, match=r"host_cache_mib 1: a page takes \d+ bytes of each device"):
        store_sizes(served, moved_shapes(served.state(2), served.step_config(2)))


def test_a_recurrent_model_without_memory_for_a_state_is_refused(tmp_path):
    path = write_family(family_case("qwen3_5_moe_text-0"), tmp_path / "model", seed=5, dtype="bfloat16")
    served = served_with(model_path=str(path), host_cache_mib=8, state_fraction=0.0, max_running_requests=2)
    with pytest.raises(SettingsError, match=r"host_cache_mib 8: .* state_fraction 0.0 leaves less; raise either"):
        store_sizes(served, moved_shapes(served.state(9), served.step_config(9)))
