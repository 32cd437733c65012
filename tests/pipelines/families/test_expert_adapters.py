"""Adapters of experts answer as checkpoints with merged weights: tensors per expert, biases, a hybrid, two devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayserve_moe import Engine
from tests.pipelines.families.test_unmerged_adapters import check_merged
from tests.support.checkpoints.adapters import make_adapter_beside
from tests.support.engine.shared_settings import CORE
from tests.support.models.families import FAMILY_CASES

FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next")
"""With tensors per expert, with biases and gate and up in turn, with shared experts, and a hybrid."""
CASES = [case for case in FAMILY_CASES if case.family in FAMILIES and case.variant == 0]
ADAPTERS = ((4, "fused"), (3, "shared_outer"))
"""Ranks and layouts."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("case", CASES, indirect=True, scope="session", ids=lambda case: case.name),
]


@pytest.mark.parametrize("backend", ["local", "all_to_all"])
def test_adapters_of_experts_answer_as_their_merged_checkpoints(
    core_checkpoint: Path, kernel_settings: dict[str, str], is_native: bool, tmp_path: Path, backend: str
):
    """Compare in float32: equal ids and routing, and log-probs of prompts and outputs within 1e-5."""
    if is_native:
        pytest.skip("merged weights are rounded to bfloat16")
    num_devices = {"local": 1, "all_to_all": 2}[backend]
    with Engine(
        str(core_checkpoint),
        **{**CORE, **kernel_settings, "expert_backend": backend},
        devices_per_host=num_devices,
        data_parallel_size=num_devices,
        max_loras=2,
        max_lora_rank=4,
        lora_experts=True,
    ) as engine:
        made = [
            make_adapter_beside(core_checkpoint, seed=seed, rank=rank, experts=layout)
            for seed, (rank, layout) in enumerate(ADAPTERS)
        ]
        check_merged(engine, made, core_checkpoint, tmp_path)
