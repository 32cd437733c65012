"""Stop strings with special tokens, for answers whose text omits special tokens.

The scanned text holds a Unicode noncharacter for each such token. The client's text omits these characters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rayserve_moe.text.tokenizer import Tokenizer

_FIRST, _NUM_CHARACTERS = 0xFDD0, 32


class SpecialStops:
    """Stop strings whose special tokens are replaced by noncharacters."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], *, hidden_ids: frozenset[int]) -> None:
        """Map the special tokens in `stops` that the text omits (`hidden_ids`) to characters, at most 32."""
        texts = {tokenizer.token_text(token_id): token_id for token_id in hidden_ids} if any(stops) else {}
        inside = sorted((text for text in texts if text and any(text in stop for stop in stops)), key=len, reverse=True)
        self._text_of = {chr(_FIRST + i): text for i, text in enumerate(inside[:_NUM_CHARACTERS])}
        self.characters = {texts[text]: character for character, text in self._text_of.items()}
        """Replacement character by token id."""
        self._given = {self._hide(stop): stop for stop in stops}

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the stop strings with replacement characters."""
        return tuple(self._given)

    def given(self, matched: str) -> str:
        """Return the original of a replaced stop string."""
        return self._given.get(matched, matched)

    def shown(self, text: str, *, matched: str | None = None) -> str:
        """Remove replacement characters; in a kept stop string that `matched`, restore the special tokens."""
        if not self._text_of:
            return text
        before, found, rest = text.rpartition(matched) if matched else (text, "", "")
        return self._without(before) + self.given(found) + self._without(rest)

    def _without(self, text: str) -> str:
        return "".join(one for one in text if one not in self._text_of)

    def _hide(self, stop: str) -> str:
        if not self._text_of:
            return stop
        character_of = {text: character for character, text in self._text_of.items()}
        return re.sub("|".join(map(re.escape, character_of)), lambda found: character_of[found.group()], stop)
