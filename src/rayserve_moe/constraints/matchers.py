"""Matchers of the grammar engine: what each token writes, and which tokens a grammar lets follow.

The engine is given bytes, not a tokenizer: what a grammar wants written may be written by any tokens that write it,
added tokens and pieces of words alike, whatever the tokenizer would choose for that text.
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
    """What matchers are made for: what every id of a model writes, and which ids end an answer or write no text.

    `token_bytes[i]` are the bytes that id i adds to an answer, empty for an id of no token. Of `special_ids` they are
    names: a grammar has such an id only where it asks for it.
    """

    token_bytes: tuple[bytes, ...]
    special_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]

    @property
    def num_ids(self) -> int:
        """Ids that the model has."""
        return len(self.token_bytes)

    @property
    def mask_words(self) -> int:
        """Numbers of 32 bits that hold one of every id."""
        return -(-self.num_ids // 32)

    def tokens(self) -> LLTokenizer:
        """Return the engine's own form of it; takes about a second for large vocabularies."""
        nameless = {i for i, written in enumerate(self.token_bytes) if not written}
        special = sorted({*self.special_ids, *self.eos_ids, *nameless})
        written = [each or b"<[%d]>" % i for i, each in enumerate(self.token_bytes)]
        given = _GivenTokens(written, special_token_ids=special, eos_token_id=self.eos_ids[0])
        given.engine = LLTokenizer(TokenizerWrapper(given), eos_token=list(self.eos_ids))
        return given.engine


class _GivenTokens:
    """Tokens under the names by which the grammar engine asks for them."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], *, special_token_ids: list[int], eos_token_id: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special_token_ids, eos_token_id
        self.engine: LLTokenizer | None = None

    def __call__(self, text: str) -> list[int]:
        """Return some ids that write a text. Grammars that force no ids do without."""
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
