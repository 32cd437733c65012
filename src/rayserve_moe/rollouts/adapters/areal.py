"""AReaL's padded batch with router replay.

Read at inclusionAI/AReaL 4aef98d8 and at its later `areal/engine/r3`, whose merge was not seen.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rayserve_moe.requests.records import RoutingLayout
from rayserve_moe.rollouts.adapters.trajectory import Trajectory, check_batch, placed

NO_VERSION = -1


def batch(
    trajectories: Sequence[Trajectory], layout: RoutingLayout, *, rewards: Sequence[float], pad_token_id: int = 0
) -> dict[str, np.ndarray]:
    """Build the tensors of B samples, padded right to the maximum length S.

    `input_ids`, `loss_mask` and `versions` are int32 [B, S], `logprobs` float32 [B, S] in the column of their token,
    `attention_mask` bool [B, S], `rewards` float32 [B]. `versions` is NO_VERSION for tokens that were not sampled.
    `routed_experts` is int32 [B, S, MoE layers, k]: the last token, and padding, repeat the last row.
    `r3_routing_valid` is bool [B], False where a row is missing: AReaL then routes the whole micro-batch itself. These
    two travel beside the batch. Raises ValueError if a version is not an integer, or a sample is of another model.
    """
    check_batch(trajectories, rewards)
    starts, width = [0] * len(trajectories), max(len(each.token_ids) for each in trajectories)
    here = [np.ones(len(each.token_ids), np.bool_) for each in trajectories]
    tokens, masks = [each.token_ids for each in trajectories], [each.trained for each in trajectories]
    logprobs, versions = [each.logprobs for each in trajectories], [_versions(each) for each in trajectories]
    return {
        "input_ids": placed(tokens, starts, width=width, dtype=np.int32, filler=pad_token_id),
        "loss_mask": placed(masks, starts, width=width, dtype=np.int32),
        "logprobs": placed(logprobs, starts, width=width, dtype=np.float32),
        "versions": placed(versions, starts, width=width, dtype=np.int32),
        "attention_mask": placed(here, starts, width=width, dtype=np.bool_),
        "rewards": np.asarray(rewards, np.float32),
        "routed_experts": np.stack([_rows(each, layout, width=width) for each in trajectories]),
        "r3_routing_valid": np.array([_is_whole(each) for each in trajectories]),
    }


def _is_whole(trajectory: Trajectory) -> bool:
    routing = trajectory.routing
    return not routing.missing and routing.start == 0 and len(routing.rows) == len(trajectory.token_ids) - 1


def _rows(trajectory: Trajectory, layout: RoutingLayout, *, width: int) -> np.ndarray:
    """Return int32 [width, MoE layers, k]; zeros if a row is missing."""
    rows = trajectory.routing.rows
    if rows.shape[1:] != layout.row_shape:
        raise ValueError(f"a sample has rows {list(rows.shape[1:])} of another model, not {list(layout.row_shape)}")
    if not _is_whole(trajectory) or not len(rows):
        return np.zeros((width, *layout.row_shape), np.int32)
    return rows[np.minimum(np.arange(width), len(rows) - 1)].astype(np.int32)


def _versions(trajectory: Trajectory) -> np.ndarray:
    names = trajectory.versions
    try:
        return np.array([int(name) if name else NO_VERSION for name in names], np.int32)
    except ValueError as error:
        raise ValueError(
            f"AReaL numbers versions; {', '.join(sorted({*names} - {''}))} are not all integers"
        ) from error
