"""Truncation of long prompts to a number of tokens, like vLLM's `truncate_prompt_tokens`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from rayserve_moe.requests.records import RequestError

_Ids = TypeVar("_Ids", Sequence[int], np.ndarray)


class Truncation(NamedTuple):
    """Number of prompt tokens to keep, from the end or from the start."""

    num_tokens: int
    keeps_end: bool

    def cut(self, ids: _Ids) -> _Ids:
        """Return the kept tokens of a prompt."""
        return ids[max(0, len(ids) - self.num_tokens) :] if self.keeps_end else ids[: self.num_tokens]


def truncation_to(num_tokens: int | None, *, max_model_len: int, keeps: int, keeps_end: bool) -> Truncation | None:
    """Return the truncation to `num_tokens`; -1 stands for `keeps`, None for no truncation.

    Raises: RequestError for other values that are no whole number from 1 to `max_model_len`.
    """
    if num_tokens is None:
        return None
    if type(num_tokens) is not int or num_tokens == 0 or not -1 <= num_tokens <= max_model_len:
        sentence = f"`truncate_prompt_tokens` should be -1, or lie in [1, {max_model_len}], the context"
        raise RequestError(sentence, "truncate_prompt_tokens")
    return Truncation(keeps if num_tokens < 0 else num_tokens, keeps_end)
