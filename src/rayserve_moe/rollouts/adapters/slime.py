"""slime's training data: lists by sample, responses by token. Read at THUDM/slime 624b824a: `slime/ray/rollout.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rayserve_moe.requests.records import RoutingLayout
from rayserve_moe.rollouts.adapters.trajectory import Trajectory, check_batch, hidden_rows


def train_data(
    trajectories: Sequence[Trajectory], layout: RoutingLayout, *, rewards: Sequence[float]
) -> dict[str, list[Any]]:
    """Build the result of `_convert_samples_to_train_data` for samples that each are a rollout.

    Loss masks and log-probs cover only the response, with zeros for tokens of the environment: entry i belongs to token
    `tokens[prompt length + i]`, which the trainer scores from the logits of the previous position. Routes are int32
    [tokens - 1, all layers, k]; the trainer appends rows for the last token and the padding. `rollout_mask_sums` are
    computed from the masks, so change the masks first (`trained_under`). Raises ValueError if a row or a reward is
    missing.
    """
    check_batch(trajectories, rewards)
    responses = [each.response for each in trajectories]
    loss_masks = [
        each.trained[part].astype(np.int32).tolist() for each, part in zip(trajectories, responses, strict=True)
    ]
    return {
        "tokens": [each.token_ids.tolist() for each in trajectories],
        "response_lengths": [len(mask) for mask in loss_masks],
        "rewards": [float(reward) for reward in rewards],
        "raw_reward": [float(reward) for reward in rewards],
        "truncated": [int(each.is_truncated) for each in trajectories],
        "sample_indices": list(range(len(trajectories))),
        "rollout_ids": list(range(len(trajectories))),
        "loss_masks": loss_masks,
        "rollout_mask_sums": [sum(mask) for mask in loss_masks],
        "rollout_log_probs": [each.logprobs[part].tolist() for each, part in zip(trajectories, responses, strict=True)],
        "rollout_routed_experts": [hidden_rows(each, layout, dtype=np.int32) for each in trajectories],
    }
