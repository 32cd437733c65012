"""tunix' trainer payload and token segments.

Read at google/tunix: `experimental/common/datatypes.py` (RLTrainerPayload, TokenSegment) and `rl/common.py`
(align_routed_experts), in the form that has UNSET_ROUTED_EXPERT.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from rayserve_moe.requests.records import RoutingLayout
from rayserve_moe.rollouts.adapters.trajectory import Trajectory, check_batch, hidden_rows, placed, versions_of

UNSET = -1
"""In place of an expert id: the trainer's model asks its own router."""


def payload(
    trajectories: Sequence[Trajectory],
    layout: RoutingLayout,
    *,
    advantages: Sequence[float],
    pad_token_id: int,
    prompt_width: int | None = None,
    completion_width: int | None = None,
) -> dict[str, np.ndarray]:
    """Build the fields of an RLTrainerPayload of B samples, P prompt and C completion columns.

    Prompts int32 [B, P] are padded left, completions int32 [B, C] right; P and C default to the maximum lengths.
    `completion_mask` float32 [B, C] is 1 for trained tokens, `prompt_mask` [B, P] for prompt tokens.
    `old_per_token_logps` float32 [B, C] are the log-probs at sampling, 0 for other tokens. `routed_experts` int16 [B, P
    + C, all layers, k] has each row in the column of its token, UNSET elsewhere: in padding, for the last token, in
    layers without experts. Raises ValueError if a sample does not fit, a row is missing, or a sample contains
    `pad_token_id`: the trainer tells padding by it.
    """
    check_batch(trajectories, advantages)
    for number, each in enumerate(trajectories):
        if pad_token_id in each.token_ids:
            raise ValueError(f"sample {number} contains the token {pad_token_id}, which the trainer takes for padding")
    prompts = [each.token_ids[: each.prompt_len] for each in trajectories]
    completions = [each.token_ids[each.response] for each in trajectories]
    left = prompt_width or max(map(len, prompts))
    right = completion_width or max(map(len, completions))
    firsts, starts = [left - len(prompt) for prompt in prompts], [0] * len(trajectories)
    trained = [each.trained[each.response].astype(np.float32) for each in trajectories]
    logps = [each.logprobs[each.response] for each in trajectories]
    rows = [rows_of(each, layout) for each in trajectories]
    here = [np.ones(len(prompt), np.float32) for prompt in prompts]
    return {
        "prompt_ids": placed(prompts, firsts, width=left, dtype=np.int32, filler=pad_token_id),
        "prompt_mask": placed(here, firsts, width=left, dtype=np.float32),
        "completion_ids": placed(completions, starts, width=right, dtype=np.int32, filler=pad_token_id),
        "completion_mask": placed(trained, starts, width=right, dtype=np.float32),
        "advantages": np.asarray(advantages, np.float32),
        "old_per_token_logps": placed(logps, starts, width=right, dtype=np.float32),
        "routed_experts": placed(rows, firsts, width=left + right, dtype=np.int16, filler=UNSET),
    }


def rows_of(trajectory: Trajectory, layout: RoutingLayout) -> np.ndarray:
    """Return int16 [T, all layers, k], a row per token: what `SamplingResponse.routed_experts` holds.

    The last token has a row of UNSET: tunix counts the completion's rows from the end, so a row less would move all
    rows by a token. Layers without experts have UNSET. Raises ValueError if a row is missing.
    """
    rows = np.full((len(trajectory.token_ids), layout.num_hidden_layers, layout.top_k), UNSET, np.int16)
    layers = list(layout.layer_ids)
    rows[:-1, layers] = hidden_rows(trajectory, layout, dtype=np.int16)[:, layers]
    return rows


def segments(trajectory: Trajectory, layout: RoutingLayout) -> list[dict[str, Any]]:
    """Return the fields of a TokenSegment for each run of tokens after the prompt: of the model, or of the environment.

    Arrays have the run's length: `tokens` int32, `loss_mask` int32, `logps` float32 (None for the environment),
    `routed_experts` as `rows_of`. Raises ValueError if a row is missing.
    """
    rows, found = rows_of(trajectory, layout), []
    sampled = trajectory.versions != ""
    edges = np.flatnonzero(np.diff(sampled[trajectory.response])) + trajectory.prompt_len + 1
    for first, last in itertools.pairwise([trajectory.prompt_len, *edges.tolist(), len(trajectory.token_ids)]):
        is_sampled, part = bool(sampled[first]), slice(first, last)
        found.append(
            {
                "source": "assistant" if is_sampled else "env",
                "tokens": trajectory.token_ids[part],
                "loss_mask": trajectory.trained[part].astype(np.int32),
                "logps": trajectory.logprobs[part] if is_sampled else None,
                "routed_experts": rows[part],
            }
        )
    return found


def policy_version(trajectory: Trajectory, *, allows_mixed: bool = False) -> int:
    """Return the one version under which all tokens were sampled; with `allows_mixed` the oldest of several.

    Raises ValueError if there are several, or a version is not an integer.
    """
    versions = versions_of(trajectory)
    try:
        numbers = {int(version) for version in versions}
    except ValueError as error:
        raise ValueError(f"tunix numbers policy versions; {', '.join(versions)} are not all integers") from error
    if len(numbers) > 1 and not allows_mixed:
        raise ValueError(f"a sample was drawn under the versions {', '.join(versions)}; tunix has one per trajectory")
    return min(numbers)
