"""The environment of the test process, set before anything imports jax, ray or transformers."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}

import hypothesis
import pytest

from rayserve_moe.checkpoints.synthetic import write_checkpoint
from tests.support.checkpoints import CORE_CONFIG, NATIVE_CORE_CONFIG
from tests.support.native import need_native_kernels

hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-kernels",
        choices=["xla", "native"],
        default="xla",
        help="what computes the core model: XLA in float32, or the native kernels in bfloat16",
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Have `-n` keep together what shares a cluster or an engine."""
    return import_module("tests.support.distribution").Distribution(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With the native kernels only tests over the core model run: what they compute, no other test sees."""
    if config.getoption("--cpu-kernels") != "native":
        return
    others = [item for item in items if "is_native" not in getattr(item, "fixturenames", ())]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]
    for item in items:
        if marker := item.get_closest_marker("float32"):
            item.add_marker(pytest.mark.skip(reason=f"float32 only: {marker.args[0]}"))


@pytest.fixture(scope="session")
def is_native(request: pytest.FixtureRequest) -> bool:
    """Whether the core model is computed by the native CPU kernels."""
    return request.config.getoption("--cpu-kernels") == "native"


@pytest.fixture(scope="session")
def kernel_settings(is_native: bool) -> dict[str, str]:
    """What is set for every engine over the core model: on several devices native kernels have to be asked for."""
    return {"cpu_kernels": "native"} if is_native else {}


@pytest.fixture(scope="session")
def core_checkpoint(tmp_path_factory: pytest.TempPathFactory, is_native: bool) -> Path:
    """The tiny model of `tests.support.checkpoints`, written once."""
    return _write(tmp_path_factory.mktemp("core") / "model", is_native=is_native, seed=3)


@pytest.fixture(scope="session")
def other_checkpoint(tmp_path_factory: pytest.TempPathFactory, is_native: bool) -> Path:
    """Other weights for the same model."""
    return _write(tmp_path_factory.mktemp("core") / "other", is_native=is_native, seed=4)


def _write(path: Path, *, is_native: bool, seed: int) -> Path:
    if not is_native:
        return write_checkpoint(path, CORE_CONFIG, seed=seed, dtype="float32")
    need_native_kernels()
    return write_checkpoint(path, NATIVE_CORE_CONFIG, seed=seed)
