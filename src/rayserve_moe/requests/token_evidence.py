"""What can be asked and returned of tokens besides themselves: log-probs, hidden states, what truncation left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

WANTS_SUPPORT = 2
"""Added to the first number of what is asked of a sample whose support is wanted."""


@dataclass(frozen=True)
class TopLogprobs:
    """The likeliest tokens at each of N positions, falling: `token_ids` int32 and `logprobs` float32, both [N, n]."""

    token_ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True)
class PromptScores:
    """Log-probs float32 [N] of the prompt tokens at positions `start + 1 .. start + N`, each given those before it.

    `ranks` int32 [N] are their places among all tokens, the likeliest first, from 1 on.
    N is the prompt's length - 1 - `start`, or less where the request ended before its prompt was computed. All are
    computed under the weights `weight_version`.
    """

    start: int
    logprobs: np.ndarray
    ranks: np.ndarray
    top: TopLogprobs | None = None
    weight_version: str = ""


class ListedInPrompt(NamedTuple):
    """Token ids, int32 [N, L], -1 for none, whose log-probs are wanted behind each of N positions of a prompt, from
    `start` on."""

    start: int
    ids: np.ndarray


class SampleSupport(NamedTuple):
    """Words that truncation left to samples: `counts` int32 [samples], their `token_ids` int32 one after the other, and
    the log-probs float32 [samples] of the samples among them."""

    counts: np.ndarray
    token_ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True)
class HiddenStates:
    """States float32 [N, D] after the last layer and its norm: at the prompt's last N tokens, and at the outputs, but
    for the last one, which the model has not read."""

    prompt: np.ndarray
    outputs: np.ndarray

    def last(self, num_outputs: int) -> np.ndarray:
        """The state [D] that the last of so many outputs was sampled from, or that of the prompt's last token."""
        return self.outputs[num_outputs - 2] if num_outputs > 1 else self.prompt[-1]
