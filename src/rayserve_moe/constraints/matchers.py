"""Matchers of the grammar engine over the bytes of tokens.

The engine receives bytes, not a tokenizer. So any token sequence with the right bytes satisfies a grammar, including
added tokens and tokenizations that the tokenizer would not produce.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from rayserve_moe.constraints.optional_properties import ITEMS_PER_OPTIONAL, MAX_OPTIONAL

LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_lexer_states=50_000,
    max_items_in_row=(MAX_OPTIONAL + 50) * ITEMS_PER_OPTIONAL,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""A fifth of the engine's default limits: about 4 ms of compilation, 5 ms per mask, 100 MB per matcher.

Rows hold MAX_OPTIONAL optional properties with a margin, twice the default. Error messages omit the grammar.
"""


class Vocabulary(NamedTuple):
    """Token bytes and special ids of a model, as matchers need them."""

    token_bytes: tuple[bytes, ...]
    """Bytes by id; empty for an id without a token."""
    special_ids: tuple[int, ...]
    """Ids that match only if a grammar refers to them; their bytes are names."""
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
        assert self.engine is not None, "a text is tokenized before the token table is built"
        return self.engine.greedy_tokenize(text)


def built_matcher(tokens: LLTokenizer, grammar: str) -> LLMatcher:
    """Return a matcher at the start of a grammar; `is_error` on failure. The engine releases the GIL meanwhile."""
    return LLMatcher(tokens, grammar, log_level=0, limits=LIMITS)


def fault_of(matcher: LLMatcher, *, mask_words: int) -> tuple[str, float]:
    """Return the reason why no answer can begin (empty if it can), and the milliseconds of the first mask."""
    if matcher.is_error():
        return matcher.get_error(), 0.0
    mask, begun = np.zeros(mask_words, np.int32), time.thread_time()
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    milliseconds = 1e3 * (time.thread_time() - begun)
    if matcher.is_error():
        return matcher.get_error(), milliseconds
    return ("" if mask.any() else "NoExtension"), milliseconds
