"""A narrow model with the layers and experts of Qwen3-30B-A3B, whose router prefers some experts; engines over it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rayserve_moe.checkpoints.synthetic import Drawn, SyntheticConfig, write_checkpoint
from rayserve_moe.config.load import default_cache_directory
from rayserve_moe.engine.eplb.steps import EplbSteps
from rayserve_moe.engine.loop import EngineLoop
from rayserve_moe.inprocess.engine import Engine
from rayserve_moe.requests.records import GenerationRequest, SamplingParams
from rayserve_moe.requests.results import ChoiceResult

NARROW = SyntheticConfig(
    vocab_size=512, hidden_size=128, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=48,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=128, num_experts_per_tok=8,
    drawn=Drawn(scale=0.1, router_skew=0.5),
)  # fmt: skip
NUM_REDUNDANT = 32


def narrow_engine(num_devices: int, *, rows_per_device: int, step_tokens: int, **settings: Any) -> Engine:
    """Yield an engine on emulated devices, each a data rank, with experts by exchange; moves are requested."""
    path = write_checkpoint(default_cache_directory() / "narrow", NARROW, dtype="float32")
    return Engine(
        str(path),
        devices_per_host=num_devices,
        data_parallel_size=num_devices,
        expert_backend="all_to_all",
        num_redundant_experts=NUM_REDUNDANT,
        enable_eplb=True,
        eplb_interval=1 << 30,
        max_running_requests=rows_per_device,
        precompile_bs_paddings=[rows_per_device],
        max_step_tokens=step_tokens,
        max_model_len=512,
        **settings,
    )


def eplb_of(engine: Engine) -> EplbSteps:
    """Return the engine's balancing, which is on."""
    assert engine.loop.eplb is not None, "the engine was started with balancing"
    return engine.loop.eplb


def submit_all(loop: EngineLoop, prompts: Sequence[np.ndarray], *, num_new_tokens: int, sink: Any) -> None:
    """Queue a greedy request per prompt, which ends by its length alone; `sink` gets all updates."""
    sampling = SamplingParams(max_new_tokens=num_new_tokens, temperature=0.0, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        loop.submit(GenerationRequest(f"narrow-{i}", prompt, sampling, incremental=False), sink)


def num_ended(updates: Sequence[ChoiceResult]) -> int:
    """Return how many choices ended with these updates; RuntimeError where one did but by its length or an abort."""
    ends = [update.finish for update in updates if update.finish is not None]
    if wrong := [end for end in ends if end.kind not in ("length", "abort")]:
        raise RuntimeError(f"a request ended: {wrong[0]}")
    return len(ends)
