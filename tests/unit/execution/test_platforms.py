"""The platform that computes is the requested one, and is named; nothing falls back in silence."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from rayserve_moe import Engine
from rayserve_moe.config.settings import CompileSettings, ExpertSettings, SettingsError
from rayserve_moe.execution.native_kernels import _of_platform
from rayserve_moe.execution.platforms import check_platform, devices_for, platform_in_words
from rayserve_moe.execution.programs.buckets import GPUS, device_of
from rayserve_moe.execution.weights.placing import _narrows_rows
from rayserve_moe.kernels.ragged_exchange import COMPILER_OPTIONS_OF_PLATFORM, MATMUL_PRECISION_OF_PLATFORM


def gpu(kind: str = "NVIDIA H200") -> Any:
    return SimpleNamespace(platform="gpu", device_kind=kind)


@pytest.mark.parametrize(
    ("wanted", "devices", "message"),
    [
        ("gpu", jax.devices()[:1], "platform gpu: jax computes on 1 x cpu .cpu.; install 'rayserve_moe.gpu.'"),
        ("tpu", jax.devices()[:1], "platform tpu: jax computes on 1 x cpu .cpu.; install 'rayserve_moe.tpu.'"),
        ("cpu", [gpu(), gpu()], "platform cpu: jax computes on 2 x NVIDIA H200 .gpu.; set JAX_PLATFORMS=cpu"),
    ],
    ids=["no GPU", "no TPU", "no CPU"],
)
def test_another_platform_than_the_requested_one_is_an_error(wanted, devices, message, tmp_path):
    with pytest.raises(SettingsError, match=message):
        check_platform(devices, wanted=wanted, files=tmp_path)


def test_an_engine_does_not_compute_on_a_cpu_if_a_gpu_is_requested():
    with pytest.raises(SettingsError, match="platform gpu: jax computes on 1 x cpu"):
        Engine("trained:calculator", platform="gpu")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("Unable to initialize backend 'cuda': no driver\nmore"), "Unable to .* no driver"),
        (AssertionError(), "jax has no plugin for it"),
    ],
    ids=["no driver", "no plugin"],
)
def test_a_platform_that_jax_does_not_start_is_an_error_with_its_reason(error: Exception, reason: str, monkeypatch):
    def fails() -> list[jax.Device]:
        raise error

    monkeypatch.setattr(jax, "local_devices", fails)
    with pytest.raises(SettingsError, match=f"platform gpu: {reason}; install 'rayserve_moe.gpu.' and a driver"):
        devices_for(0, wanted="gpu")
    with pytest.raises(type(error)):
        devices_for(0, wanted="auto")


@pytest.mark.parametrize("wanted", ["auto", "gpu"])
def test_the_devices_that_compute_are_one_line_of_the_log(wanted: str, caplog, tmp_path):
    with caplog.at_level(logging.INFO):
        check_platform([gpu()], wanted=wanted, files=tmp_path)
    assert [record.getMessage() for record in caplog.records] == ["computing on 1 x NVIDIA H200 (gpu)"]
    assert platform_in_words([gpu()]) == "1 x NVIDIA H200 (gpu)"


def test_a_gpu_that_does_not_compute_is_warned_of_unless_the_cpu_is_requested(caplog, tmp_path: Path):
    (tmp_path / "nvidia0").touch()
    for wanted in ("auto", "cpu"):
        check_platform(jax.devices()[:1], wanted=wanted, files=tmp_path)
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warned == ["the CPU computes, and this host has a GPU: set platform to gpu, or to cpu"]


@pytest.mark.parametrize(
    ("kind", "card"), [("NVIDIA H200", "H200"), ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA RTX 6000", "H100")]
)
def test_a_card_is_known_by_its_kind(kind: str, card: str):
    assert device_of(gpu(kind), num_devices=1, kernels="gpu") == GPUS[card]


def test_the_record_of_gpus_has_precision_graphs_and_padding():
    assert MATMUL_PRECISION_OF_PLATFORM["gpu"] == "highest"
    graphs = str(COMPILER_OPTIONS_OF_PLATFORM["gpu"]["xla_gpu_enable_command_buffer"]).split(",")
    assert {"WHILE", "CONDITIONAL", "CUSTOM_CALL", "FUSION"} <= set(graphs)
    assert all(card.min_singles == 16 for card in GPUS.values())


def test_a_platform_without_kernels_is_an_error():
    with pytest.raises(SettingsError, match="platform METAL: there are kernels for cpu, gpu and tpu only"):
        _of_platform("METAL", CompileSettings())


def test_a_row_of_gpus_is_not_claimed_to_be_the_same_in_every_step():
    with pytest.raises(
        SettingsError, match="invariant_products on: there are no such kernels for platform gpu; set auto"
    ):
        _of_platform("gpu", CompileSettings(invariant_products="on"))
    assert _of_platform("gpu", CompileSettings()).name == "gpu"


def test_products_of_8_bits_are_refused_on_gpus():
    plan: Any = SimpleNamespace(mesh=SimpleNamespace(devices=np.array([gpu()], object)))
    with pytest.raises(
        SettingsError, match="expert_products fp8: kernels of GPUs multiply 8 bits as bfloat16; set auto"
    ):
        _narrows_rows(ExpertSettings(products="fp8", weight_dtype="fp8"), plan, kernels=None)
    assert not _narrows_rows(ExpertSettings(weight_dtype="fp8"), plan, kernels=None)
