"""Text of a growing output, piece by piece, never with half a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from rayserve_moe.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns the ids of one output into pieces of text whose concatenation is `Tokenizer.decode` of all ids.

    Bytes that may still become a character are held back until they do, cannot any more, or the output ends. The
    cost of a token does not depend on how many came before.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Take the next id; return the characters that it completes, perhaps none."""
        return self.extend((token_id,))

    def extend(self, token_ids: Iterable[int]) -> str:
        """Take the next ids at once; the text is what pushing each would have come to."""
        skipped, token_bytes = self._skipped, self._tokenizer.token_bytes
        return self._decoder.decode(b"".join(token_bytes(each) for each in token_ids if each not in skipped))

    def flush(self) -> str:
        """End the output; bytes of an unfinished character come out as U+FFFD."""
        return self._decoder.decode(b"", final=True)
