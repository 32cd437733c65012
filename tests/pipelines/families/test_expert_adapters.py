"""Adapters of experts answer as checkpoints with merged weights, in every family and layout, on one device and two."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayserve_moe import Engine
from tests.pipelines.families.test_unmerged_adapters import check_merged
from tests.support.checkpoints.adapters import make_adapter_beside
from tests.support.engine.shared_settings import CORE
from tests.support.models.families import FAMILY_CASES, FamilyCase

OFTEN = ("qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "nemotron_h")
"""Families with a tensor per expert, interleaved gate and up, shared experts, recurrent layers, and no gates."""
CASES = [case for case in FAMILY_CASES if case.variant == 0]
ALL_LAYOUTS = ((4, "fused"), (3, "shared_outer"), (4, "per_expert"), (2, "per_parameter"), (3, "sglang"))
SHARED = ((4, "shared_outer"), (3, "shared_outer"))
WITHOUT_GATE = ((4, "per_expert"), (3, "shared_outer"))
"""Ranks and layouts. The other layouts hold gate and up together."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("case", CASES, indirect=True, scope="session", ids=lambda case: case.name),
]


@pytest.mark.parametrize("shares", [False, True], ids=["each", "shared"])
@pytest.mark.parametrize("backend", ["local", "all_to_all"])
def test_adapters_of_experts_answer_as_their_merged_checkpoints(
    core_checkpoint: Path,
    case: FamilyCase,
    kernel_settings: dict[str, str],
    is_native: bool,
    tmp_path: Path,
    backend: str,
    shares: bool,
):
    """Compare in float32: equal ids and routing, and log-probs of prompts and outputs within the model's bound."""
    if is_native:
        pytest.skip("merged weights are rounded to bfloat16")
    if case.family not in OFTEN and (shares or backend != "local"):
        pytest.skip("experts of other families do the same")
    num_devices = {"local": 1, "all_to_all": 2}[backend]
    with Engine(
        str(core_checkpoint),
        **{**CORE, **kernel_settings, "expert_backend": backend},
        devices_per_host=num_devices,
        data_parallel_size=num_devices,
        max_loras=2,
        max_lora_rank=4,
        lora_experts=True,
        lora_shared_outer=shares,
    ) as engine:
        layouts = SHARED if shares else WITHOUT_GATE if case.family == "nemotron_h" else ALL_LAYOUTS
        made = [
            make_adapter_beside(core_checkpoint, seed=seed, rank=rank, experts=layout)
            for seed, (rank, layout) in enumerate(layouts)
        ]
        check_merged(engine, made, core_checkpoint, tmp_path)
