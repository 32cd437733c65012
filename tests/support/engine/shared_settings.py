"""Models and settings of engines whose sizes do not matter: alike, so that one start leaves programs to the next."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rayserve_moe.checkpoints.synthetic import PRESETS, DenseLayers, write_checkpoint
from tests.support.models.core import NUM_PAGES, PAGE_SIZE

SERVED_CONFIG = replace(PRESETS["tiny"], dense=DenseLayers(mlp_only_layers=(1,)))
"""The model behind servers: four layers, the second of them dense."""
MAX_MODEL_LEN = 512
SERVED: dict[str, Any] = {
    "enable_return_routed_experts": True,
    "enable_return_hidden_states": True,
    "enable_audit": True,
    "max_running_requests": 8,
    "max_step_tokens": 64,
    "precompile_bs_paddings": [8],
    "max_model_len": MAX_MODEL_LEN,
    "num_pages": NUM_PAGES,
}
"""An engine over it: one size of decode steps, one of prompts."""
ONE_ROW: dict[str, Any] = {
    "max_running_requests": 1,
    "max_step_tokens": 32,
    "max_model_len": MAX_MODEL_LEN,
    "num_pages": 64,
    "structured_output": False,
}
"""The same model with one request at a time, without routing."""

ONE_BUCKET: dict[str, Any] = {"max_step_tokens": 64, "precompile_bs_paddings": [16]}
"""The fewest compiled shapes: one for decoding, one for prompts."""
CORE: dict[str, Any] = {
    "enable_return_routed_experts": True,
    "num_pages": NUM_PAGES,
    "page_size": PAGE_SIZE,
    "structured_output": False,
    **ONE_BUCKET,
}
"""An engine over the core model, without the programs that held samples need."""
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_running_requests": 4,
    "num_pages": 64,
    "page_size": 16,
    "max_step_tokens": 32,
    "precompile_bs_paddings": [4],
    "enable_return_routed_experts": True,
}
"""Settings of an engine with few rows and pages that returns routing rows."""
INDEXED: dict[str, Any] = {**SMALL, "structured_output": False, "enable_return_indexer_topk": True}
"""`SMALL` with index rows."""
MOVING: dict[str, Any] = {
    "enable_eplb": True,
    "eplb_slots_per_step": 1,
    "num_redundant_experts": 4,
    "devices_per_host": 4,
}
"""What such an engine needs besides to move experts, one slot per step."""


def write_served(directory: Path, *, seed: int = 0) -> Path:
    """Write a checkpoint of the model behind servers."""
    return write_checkpoint(directory, SERVED_CONFIG, seed=seed, dtype="float32")
