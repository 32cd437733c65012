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
    """What `_convert_samples_to_train_data` returns, of samples that are rollouts of their own.

    Loss masks and log-probs are of the response alone, with zeros for tokens of the environment: entry i is of token
    `tokens[prompt length + i]`, which the trainer takes from the logits one position earlier. Routes are int32 of
    [tokens - 1, all layers, k]; the trainer appends rows for the last token and the padding itself.
    `rollout_mask_sums` follow from the masks: change these first (`trained_under`). ValueError where a row or a
    reward is missing.
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
