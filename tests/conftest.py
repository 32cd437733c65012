"""The environment of the test process, set before anything imports jax, ray or transformers."""

from __future__ import annotations

import os
from pathlib import Path

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
from tests.support.checkpoints import CORE_CONFIG

hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(scope="session")
def core_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny float32 model of `tests.support.checkpoints`, written once."""
    return write_checkpoint(tmp_path_factory.mktemp("core") / "model", CORE_CONFIG, seed=3, dtype="float32")


@pytest.fixture(scope="session")
def other_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights for the same model."""
    return write_checkpoint(tmp_path_factory.mktemp("core") / "other", CORE_CONFIG, seed=4, dtype="float32")
