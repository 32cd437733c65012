"""prime-rl's training samples. Read at PrimeIntellect-ai/prime-rl 559b4477: `orchestrator/trajectories.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rayserve_moe.requests.records import RoutingLayout
from rayserve_moe.rollouts.adapters.trajectory import Trajectory, check_batch, hidden_rows


def training_samples(
    trajectories: Sequence[Trajectory],
    layout: RoutingLayout,
    *,
    advantages: Sequence[float],
    temperature: float = 1.0,
    env_name: str = "rayserve_moe",
) -> list[dict[str, Any]]:
    """Build the fields of a `TrainingSample` per sample, for `prepare_batch`: `TrainingSample(**fields)`.

    All lists cover the whole sequence: entry t of `mask`, `logprobs` and `advantages` belongs to token t; the trainer
    shifts its own log-probs right to match. `routed_experts` holds the bytes of [tokens, all layers, k], uint8 up to
    256 experts and uint16 above. The last token has no row; it copies the row before, as renderers do. Raises
    ValueError if rows are missing.
    """
    check_batch(trajectories, advantages)
    return [
        {
            "token_ids": each.token_ids.tolist(),
            "mask": each.trained.tolist(),
            "logprobs": each.logprobs.tolist(),
            "temperatures": [float(temperature)] * len(each.token_ids),
            "env_name": env_name,
            "routed_experts": _encoded(hidden_rows(each, layout, dtype=layout.dtype.type)),
            "advantages": (each.trained * float(advantage)).tolist(),
        }
        for each, advantage in zip(trajectories, advantages, strict=True)
    ]


def _encoded(rows: np.ndarray) -> dict[str, Any]:
    """Return the fields of a `RoutedExperts`."""
    whole = np.concatenate([rows, rows[-1:]])
    return {"data": whole.tobytes(), "shape": list(whole.shape), "dtype": str(whole.dtype)}
