"""SkyRL's training input. Read at NovaSky-AI/SkyRL a9564572: `skyrl/train/dataset/preprocess.py`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rayserve_moe.requests.records import RoutingLayout
from rayserve_moe.rollouts.adapters.trajectory import Trajectory, check_batch, hidden_rows, placed


def training_input(
    trajectories: Sequence[Trajectory], layout: RoutingLayout, *, rewards: Sequence[float], pad_token_id: int
) -> dict[str, np.ndarray]:
    """Build the fields of a `TrainingInputBatch`: B samples padded left to S columns, responses right-aligned in R
    columns.

    `loss_mask`, `rewards` (at the last token) and `rollout_logprobs` are float32 [B, R] and match the trainer's
    `log_probs[:, -R - 1 : -1]`. `rollout_expert_indices` [B, S, all layers, k] is uint8 if all ids are below 256, else
    int16, else int32. A token without a row has experts 0 .. k - 1 (distinct, as Megatron's dispatcher requires) and is
    marked in `router_padding_mask`. Raises ValueError if rows are missing.
    """
    check_batch(trajectories, rewards)
    responses = [each.response for each in trajectories]
    pairs = list(zip(trajectories, responses, strict=True))
    width = max(len(each.token_ids) for each in trajectories)
    firsts = [width - len(each.token_ids) for each in trajectories]
    columns = max(part.stop - part.start for part in responses)
    aligned = [columns - (part.stop - part.start) for part in responses]
    scores = np.zeros((len(trajectories), columns), np.float32)
    scores[:, -1] = rewards
    rows = [hidden_rows(each, layout, dtype=np.int32) for each in trajectories]
    indices = np.broadcast_to(np.arange(layout.top_k), (len(rows), width, *rows[0].shape[1:])).copy()
    has_row = placed([np.ones(len(each)) for each in rows], firsts, width=width, dtype=np.bool_)
    indices[has_row] = np.concatenate(rows)
    return {
        "sequences": placed(
            [each.token_ids for each in trajectories], firsts, width=width, dtype=np.int64, filler=pad_token_id
        ),
        "attention_mask": placed(
            [np.ones(len(e.token_ids)) for e in trajectories], firsts, width=width, dtype=np.int64
        ),
        "response_mask": placed([np.ones(p.stop - p.start) for p in responses], aligned, width=columns, dtype=np.int64),
        "rewards": scores,
        "loss_mask": placed([each.trained[part] for each, part in pairs], aligned, width=columns, dtype=np.float32),
        "rollout_logprobs": placed(
            [each.logprobs[part] for each, part in pairs], aligned, width=columns, dtype=np.float32
        ),
        "rollout_expert_indices": indices.astype(_narrowest(int(indices.max()))),
        "router_padding_mask": ~has_row,
    }


def _narrowest(max_id: int) -> type[np.integer]:
    return np.uint8 if max_id < 2**8 else np.int16 if max_id < 2**15 else np.int32
