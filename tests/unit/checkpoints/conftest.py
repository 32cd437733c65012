"""A small float32 checkpoint with dense and MoE layers, in one file and in several."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rayserve_moe.checkpoints.synthetic import PRESETS, DenseLayers, Drawn, SyntheticConfig, write_checkpoint

SMALL = replace(
    PRESETS["tiny"],
    vocab_size=260,
    hidden_size=16,
    intermediate_size=24,
    moe_intermediate_size=8,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    num_experts=4,
    dense=DenseLayers(mlp_only_layers=(1,)),
    drawn=Drawn(norm_jitter=0.1),
)


@pytest.fixture(scope="session")
def config() -> SyntheticConfig:
    return SMALL


@pytest.fixture(scope="session")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("single") / "model", SMALL, seed=7, dtype="float32")


@pytest.fixture(scope="session")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("indexed") / "model"
    return write_checkpoint(directory, SMALL, seed=7, dtype="float32", max_shard_bytes=20_000)
