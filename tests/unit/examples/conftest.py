"""A model of the calculator's kind, small enough to be trained for a few steps in a test."""

from __future__ import annotations

import pytest

from examples.calculator.export import CONFIG
from rayserve_moe.model.families.qwen3_moe import spec_from_hf


@pytest.fixture(scope="session")
def small_spec():
    sizes = {"hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 16, "num_experts": 8}
    return spec_from_hf({**CONFIG, **sizes})
