"""Token ids of banned words, each at the start of a text and after a space.

Unlike vLLM, the form after a space is banned even if it has another number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from rayserve_moe.requests.records import RequestError
from rayserve_moe.text.tokenizer import Tokenizer

MOST_WORDS = 256


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the ids of each word; those after a space too, where they are other ids.

    RequestError for a word without a token, and for too many.
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        plain = word.lstrip()
        ids = tuple(tokenizer.encode(plain, add_special_tokens=False))
        if not ids:
            raise RequestError("should hold words, none of them empty", "bad_words")
        spaced = tuple(tokenizer.encode(f" {plain}", add_special_tokens=False))
        found.append(ids)
        if spaced[-len(ids) :] != ids:
            found.append(spaced)
    if len(found) > MOST_WORDS:
        raise RequestError(f"should be at most {MOST_WORDS} words, those after a space included", "bad_words")
    return tuple(dict.fromkeys(found))
