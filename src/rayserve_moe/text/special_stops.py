"""Stop strings that hold special tokens, of answers whose text leaves such tokens out.

Each of these tokens is one character in the text that stop strings are looked for in, and is taken out after that. The
characters are noncharacters of Unicode, which no text has.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rayserve_moe.text.tokenizer import Tokenizer

_FIRST, _NUM_CHARACTERS = 0xFDD0, 32


class SpecialStops:
    """Stop strings, and special tokens that they hold, as characters. Without such tokens nothing changes."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], *, hidden_ids: frozenset[int]) -> None:
        """`hidden_ids` are the special tokens that a text leaves out. Of many different ones the first 32 count."""
        texts = {tokenizer.token_text(token_id): token_id for token_id in hidden_ids} if any(stops) else {}
        inside = sorted((text for text in texts if text and any(text in stop for stop in stops)), key=len, reverse=True)
        self._text_of = {chr(_FIRST + i): text for i, text in enumerate(inside[:_NUM_CHARACTERS])}
        self.characters = {texts[text]: character for character, text in self._text_of.items()}
        """A character for each of these tokens, by id."""
        self._given = {self._hide(stop): stop for stop in stops}

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, with characters in the place of tokens."""
        return tuple(self._given)

    def given(self, matched: str) -> str:
        """Return a stop string as it was given."""
        return self._given.get(matched, matched)

    def shown(self, text: str, *, matched: str | None = None) -> str:
        """Return a text without the characters, but for those of a stop string in it that was `matched` and kept."""
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
