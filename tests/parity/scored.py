"""What a reference computes for one sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Scored:
    """T tokens of one sequence; M MoE layers, E experts, V vocabulary.

    `logits` [T, V], `router_logits` [T, M, E] before scores are taken, `chosen` [T, M, k] in any order with the
    `weights` that the router gives them. `tokens_ITK` are the positions that each index of sparse attention chooses, in
    any order, with positions behind its own, or the blocks that each head of an index chooses, with -1, and
    `index_scores_ITT` the scores of all: minus infinity behind its own.
    """

    logits: np.ndarray
    router_logits: np.ndarray
    chosen: np.ndarray
    weights: np.ndarray
    tokens_ITK: np.ndarray | None = None
    index_scores_ITT: np.ndarray | None = None
