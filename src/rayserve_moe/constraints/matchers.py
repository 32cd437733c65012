"""Matchers of the grammar engine: what tokens a tokenizer has, and which of them a grammar lets follow."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from rayserve_moe.constraints.optional_properties import ITEMS_PER_OPTIONAL, MOST_OPTIONAL

LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_lexer_states=50_000,
    max_items_in_row=(MOST_OPTIONAL + 50) * ITEMS_PER_OPTIONAL,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""A fifth of the engine's own: about 4 ms of building, 5 ms of a mask, 100 MB of a matcher. Rows are as wide as
MOST_OPTIONAL makes them, with something to spare, which is twice the engine's own. Errors hold no grammar."""


class Vocabulary(NamedTuple):
    """What matchers are made for: a tokenizer as the JSON of the tokenizers library, the ids that a model has, and
    those that end an answer."""

    tokenizer_json: str
    num_ids: int
    eos_ids: tuple[int, ...]

    def tokens(self) -> LLTokenizer:
        """The engine's own form of it; takes seconds for large vocabularies."""
        return LLTokenizer(self.tokenizer_json, n_vocab=self.num_ids, eos_token=list(self.eos_ids))

    @property
    def mask_words(self) -> int:
        """Numbers of 32 bits that hold one of every id."""
        return -(-self.num_ids // 32)


def built_matcher(tokens: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the start of a grammar; `is_error` where there can be none. Other threads run while it is built."""
    return LLMatcher(tokens, grammar, log_level=0, limits=LIMITS)


def fault_of(matcher: LLMatcher, *, mask_words: int) -> tuple[str, float]:
    """Why nothing can begin with a matcher, or an empty text; and the milliseconds of its first mask."""
    if matcher.is_error():
        return matcher.get_error(), 0.0
    mask, begun = np.zeros(mask_words, np.int32), time.thread_time()
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    milliseconds = 1e3 * (time.thread_time() - begun)
    if matcher.is_error():
        return matcher.get_error(), milliseconds
    return ("" if mask.any() else "NoExtension"), milliseconds
