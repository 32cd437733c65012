"""Index rows for Megatron-Core, whose layers replay them by a registry: `IndexerReplay.set_replay_data`.

The registry is in an open pull request to NVIDIA/Megatron-LM (`indexer_replay.py`), which was only read.
"""

from __future__ import annotations

import numpy as np

from rayserve_moe.rollouts.adapters.trajectory import Trajectory, index_rows


def indexer_replay_data(trajectory: Trajectory) -> list[np.ndarray]:
    """Return the choices of a sample of T tokens, for each layer with sparse attention int32 [T, top_k].

    A row has the positions that a token sees, ascending, with -1 behind. The last token was never fed and has no row:
    it sees the last `top_k` tokens. Raises ValueError if a row is missing.
    """
    rows = index_rows(trajectory)
    num_tokens, top_k = len(trajectory.token_ids), rows.shape[2]
    last = np.full((1, *rows.shape[1:]), -1, np.int32)
    last[:, :, : min(num_tokens, top_k)] = np.arange(max(0, num_tokens - top_k), num_tokens)
    return [np.ascontiguousarray(of_layer) for of_layer in np.concatenate([rows, last]).swapaxes(0, 1)]
