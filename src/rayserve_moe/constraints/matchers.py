"""Matchers of the grammar engine over the bytes of tokens.

The engine receives bytes, not a tokenizer. So any token sequence with the right bytes satisfies a grammar, including
added tokens and tokenizations that the tokenizer would not produce.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

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
    """Token bytes and special ids of a model, as matchers need them."""

    token_bytes: tuple[bytes, ...]
    """Bytes by id; empty for an id without a token."""
    special_ids: tuple[int, ...]
    """Ids that match only where a grammar names them; their bytes are names."""
    eos_ids: tuple[int, ...]
    """Ids that end an answer."""

    @property
    def num_ids(self) -> int:
        """Return the number of ids."""
        return len(self.token_bytes)

    @property
    def mask_words(self) -> int:
        """Return the number of 32-bit words in a mask."""
        return -(-self.num_ids // 32)

    def tokens(self) -> LLTokenizer:
        """Return the engine's token table; large vocabularies take about a second."""
        nameless = {i for i, written in enumerate(self.token_bytes) if not written}
        special = sorted({*self.special_ids, *self.eos_ids, *nameless})
        written = [each or b"<[%d]>" % i for i, each in enumerate(self.token_bytes)]
        given = _GivenTokens(written, special_token_ids=special, eos_token_id=self.eos_ids[0])
        given.engine = LLTokenizer(TokenizerWrapper(given), eos_token=list(self.eos_ids))
        return given.engine


class _GivenTokens:
    """Tokens with the attribute names of llguidance's tokenizer interface."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], *, special_token_ids: list[int], eos_token_id: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special_token_ids, eos_token_id
        self.engine: LLTokenizer | None = None

    def __call__(self, text: str) -> list[int]:
        """Return a greedy tokenization; grammars with `no_forcing` do not use it."""
        assert self.engine is not None, "a text is asked for before the tokens are there"
        return self.engine.greedy_tokenize(text)


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
