"""verl's padded batch. Read at verl-project/verl 1dda039b: `verl/experimental/agent_loop/agent_loop.py`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rayserve_moe.requests.records import RoutingLayout
from rayserve_moe.rollouts.adapters.trajectory import Trajectory, check_batch, hidden_rows, placed, versions_of


def batch(
    trajectories: Sequence[Trajectory],
    layout: RoutingLayout,
    *,
    rewards: Sequence[float],
    prompt_length: int | None = None,
    response_length: int | None = None,
    pad_token_id: int = 0,
) -> dict[str, np.ndarray]:
    """Build the tensors and non-tensor fields of a DataProto of B samples, P prompt and R response columns.

    Prompts [B, P] are padded left, responses [B, R] right; P and R default to the maximum lengths. `response_mask` is 1
    for trained tokens. `rollout_log_probs` has their log-probs in the same columns; the trainer takes its own from
    `logits[:, -R - 1 : -1]`. `rm_scores` are at the last token of a response. `routed_experts` is int16 [B, P + R, all
    layers, k], each row in the column of its token, zeros elsewhere; the trainer replays all but the last token of a
    sample. `min_global_steps` and `max_global_steps` are the oldest and newest version, None if a version is not an
    integer. Raises ValueError if a sample does not fit or a row is missing.
    """
    check_batch(trajectories, rewards)
    left = prompt_length or max(each.prompt_len for each in trajectories)
    right = response_length or max(len(each.token_ids) - each.prompt_len for each in trajectories)
    firsts = [left - each.prompt_len for each in trajectories]
    here = [np.ones(len(each.token_ids)) for each in trajectories]
    attention = placed(here, firsts, width=left + right, dtype=np.int64)
    prompts = [each.token_ids[: each.prompt_len] for each in trajectories]
    laid_prompts = placed(prompts, firsts, width=left, dtype=np.int64, filler=pad_token_id)
    responses = _responses(
        [each.token_ids.astype(np.int64) for each in trajectories], trajectories, width=right, filler=pad_token_id
    )
    rows = [hidden_rows(each, layout, dtype=np.int16) for each in trajectories]
    scores = np.zeros((len(trajectories), right), np.float32)
    scores[np.arange(len(trajectories)), [len(each.token_ids) - each.prompt_len - 1 for each in trajectories]] = rewards
    return {
        "prompts": laid_prompts,
        "responses": responses,
        "input_ids": np.concatenate([laid_prompts, responses], axis=1),
        "attention_mask": attention,
        "position_ids": np.maximum(np.cumsum(attention, axis=1) - 1, 0),
        "response_mask": _responses(
            [each.trained.astype(np.int64) for each in trajectories], trajectories, width=right
        ),
        "rollout_log_probs": _responses([each.logprobs for each in trajectories], trajectories, width=right),
        "rm_scores": scores,
        "routed_experts": placed(rows, firsts, width=left + right, dtype=np.int16),
        "min_global_steps": np.array([min(_steps(each), default=None) for each in trajectories], object),
        "max_global_steps": np.array([max(_steps(each), default=None) for each in trajectories], object),
    }


def _responses(
    values: Sequence[np.ndarray], trajectories: Sequence[Trajectory], *, width: int, filler: int = 0
) -> np.ndarray:
    """Return the responses' part of the values, padded right."""
    parts = [of_all[each.response] for of_all, each in zip(values, trajectories, strict=True)]
    return placed(parts, [0] * len(parts), width=width, dtype=parts[0].dtype.type, filler=filler)


def _steps(trajectory: Trajectory) -> list[int]:
    """Return the versions as integers; an empty list if a version is not an integer."""
    versions = versions_of(trajectory)
    return [int(version) for version in versions] if all(map(str.isdigit, versions)) else []
