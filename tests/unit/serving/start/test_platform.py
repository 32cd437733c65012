"""The start command names the platform to jax, and refuses one that the machine does not have."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayserve_moe.config.derive import server_platform
from rayserve_moe.config.load import settings_from
from rayserve_moe.config.settings import ClusterSettings, SettingsError
from rayserve_moe.serving.start import validation
from rayserve_moe.serving.start.command import environment_of, jax_platforms_of
from rayserve_moe.serving.start.ports import StartError, choose_ports
from rayserve_moe.serving.start.validation import check_platform

SLICE = {"tpu_topology": "2x4", "tpu_version": "v6e"}


def test_auto_is_the_slice_or_the_cpu():
    assert server_platform(ClusterSettings()) == "cpu"
    assert server_platform(ClusterSettings(**SLICE)) == "tpu"
    assert server_platform(ClusterSettings(platform="gpu")) == "gpu"


def test_jax_takes_the_platform_and_no_other():
    assert jax_platforms_of({"cpu"}) == "cpu"
    assert jax_platforms_of({"gpu"}) == "cuda,cpu"
    assert jax_platforms_of({"tpu"}) == jax_platforms_of({"cpu", "tpu"}) == ""
    with pytest.raises(StartError, match="platform is cpu and gpu in one config"):
        jax_platforms_of({"gpu", "cpu"})


@pytest.mark.parametrize(("platform", "memory"), [("gpu", "0.92"), ("cpu", None)])
def test_a_server_on_a_gpu_takes_its_memory(platform: str, memory: str | None, tmp_path: Path):
    ports = choose_ports(8000, claimed=set(), is_free=lambda _: True)
    platforms = jax_platforms_of({platform})
    made = environment_of(ports, {}, folder=tmp_path, jax_platforms=platforms, max_answer_s=1.0)
    assert made["JAX_PLATFORMS"] == platforms and made.get("XLA_PYTHON_CLIENT_MEM_FRACTION") == memory
    own = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5", "JAX_PLATFORMS": "cuda"}
    kept = environment_of(ports, own, folder=tmp_path, jax_platforms=platforms, max_answer_s=1.0)
    assert {name: kept[name] for name in own} == own


def test_a_gpu_that_is_not_there_is_refused_by_name(tmp_path: Path, monkeypatch):
    settings = settings_from({"model_path": "m", "platform": "gpu"})
    with pytest.raises(StartError, match="platform gpu: this machine has no NVIDIA GPU"):
        check_platform(settings, devices=tmp_path)
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(validation, "GPU_PLUGINS", ("no_such_plugin",))
    with pytest.raises(StartError, match=r"platform gpu: jax has no plugin for GPUs here; pip install .*\[gpu\]"):
        check_platform(settings, devices=tmp_path)
    monkeypatch.setattr(validation, "GPU_PLUGINS", ("jax",))
    check_platform(settings, devices=tmp_path)
    several = settings_from({"model_path": "m", "platform": "gpu", "num_hosts": 2})
    with pytest.raises(StartError, match="platform gpu: one process computes on all GPUs of a machine"):
        check_platform(several, devices=tmp_path)


def test_a_tpu_without_a_topology_and_a_topology_of_another_platform_are_refused():
    with pytest.raises(StartError, match="platform tpu: a server reserves TPUs by tpu_topology"):
        check_platform(settings_from({"model_path": "m", "platform": "tpu"}))
    with pytest.raises(SettingsError, match="tpu_topology reserves TPUs, and platform is gpu"):
        settings_from({"model_path": "m", "platform": "gpu", **SLICE})
    check_platform(settings_from({"model_path": "m"}))
