"""NeMo-RL's padded training data. Read at NVIDIA-NeMo/RL 7ea279ab: `nemo_rl/algorithms/grpo.py`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rayserve_moe.requests.records import RoutingLayout
from rayserve_moe.rollouts.adapters.trajectory import Trajectory, check_batch, placed
from rayserve_moe.rollouts.alignment import Sample, to_trainer_layout


def train_data(
    trajectories: Sequence[Trajectory],
    layout: RoutingLayout,
    *,
    pad_token_id: int = 0,
    divisible_by: int = 1,
) -> dict[str, np.ndarray]:
    """Build the result of `_build_async_grpo_train_data`: [B, S], padded right to a multiple of `divisible_by`.

    Column t of `token_mask` and `generation_logprobs` belongs to token t; the loss ignores the first column of both.
    `sample_mask` is 0 for a sample without trained tokens. `routed_experts` is [B, S, MoE layers, k] in the narrowest
    signed type. It is -1 in the last token of a sample, in padding and in missing rows; there the trainer's router
    chooses.
    """
    check_batch(trajectories)
    max_length = max(len(each.token_ids) for each in trajectories)
    width, zeros = -(-max_length // divisible_by) * divisible_by, [0] * len(trajectories)
    samples = [Sample(each.token_ids.tolist(), each.prompt_len, each.routing) for each in trajectories]
    laid = to_trainer_layout(samples, layout, convention="nemo_rl", seq_len=width, hidden_layers=False)
    ids = placed([each.token_ids for each in trajectories], zeros, width=width, dtype=np.int64, filler=pad_token_id)
    return {
        "input_ids": ids,
        "input_lengths": np.array([len(each.token_ids) for each in trajectories], np.int32),
        "generation_logprobs": placed([each.logprobs for each in trajectories], zeros, width=width, dtype=np.float32),
        "token_mask": placed([each.trained for each in trajectories], zeros, width=width, dtype=np.int64),
        "sample_mask": np.array([each.trained.any() for each in trajectories], np.float32),
        "routed_experts": laid.routed_experts,
    }
