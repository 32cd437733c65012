"""Text of a single choice, cut at stop strings, with its ids, log-probs and routing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import numpy as np

from rayserve_moe.replay.encoding.ranges import routing_until
from rayserve_moe.requests.columns import take
from rayserve_moe.requests.fields import Repetition
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.records import SamplingParams
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.text.stop_patterns import PatternScanner
from rayserve_moe.text.tokenizer import IncrementalDetokenizer, Tokenizer

REPEATED = FinishReason("repetition")
_FIRST_NONCHARACTER, _NUM_NONCHARACTERS = 0xFDD0, 32


class StopStringScanner:
    """Scanner that passes text up to the first stop string and holds back a possible beginning of a stop string.

    The first stop string is the string that ends first; a tie goes to the earlier start. The cut therefore depends on
    the text alone, not on the pieces in which it arrives. With keeps="stop" the stop string is passed too; with
    keeps="rest" also the remainder of its piece.
    """

    def __init__(self, stops: Sequence[str], *, keeps: Literal["stop", "rest"] | None = None) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._keeps = keeps
        self._held = ""
        self._begun = [0] * len(self._stops)
        self.matched: str | None = None

    def push(self, piece: str, *, may_end: bool = True) -> str:
        """Take the next piece and return the text that certainly precedes any stop string; empty after a match.

        If `may_end` is False, no stop string ends in this piece.
        """
        if self.matched is not None:
            return ""
        text, first_end = self._held + piece, len(self._held) + 1
        found = [
            (start + len(stop), start, stop) for stop in self._stops if (start := _find(text, stop, first_end)) >= 0
        ]
        if found and may_end:
            end, start, self.matched = min(found)
            self._held = ""
            return text[: {None: start, "stop": end, "rest": len(text)}[self._keeps]]
        num_passed = len(text) - self._num_undecided(piece)
        self._held = text[num_passed:]
        return text[:num_passed]

    def flush(self) -> str:
        """End the text and return the held-back rest."""
        held, self._held = self._held, ""
        return held

    def _num_undecided(self, piece: str) -> int:
        """Return the length of the longest suffix of the text, including `piece`, that begins a stop string."""
        self._begun = [_advanced(stop, begun, piece) for stop, begun in zip(self._stops, self._begun, strict=True)]
        return max(self._begun, default=0)


def _advanced(stop: str, begun: int, piece: str) -> int:
    """Return the matched prefix length of `stop` after `piece`, given the length `begun` before it.

    Knuth-Morris-Pratt: amortized constant time per character.
    """
    borders = _borders(stop)
    for character in piece:
        while begun and (begun == len(stop) or stop[begun] != character):
            begun = borders[begun - 1]
        begun += stop[begun] == character
    return borders[begun - 1] if begun == len(stop) else begun


@lru_cache(maxsize=256)
def _borders(stop: str) -> tuple[int, ...]:
    """Return the Knuth-Morris-Pratt failure table: the longest proper border of every prefix of `stop`."""
    borders, length = [0], 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = borders[length - 1]
        length += stop[length] == character
        borders.append(length)
    return tuple(borders)


def _find(text: str, stop: str, first_end: int) -> int:
    """Return the first start of a `stop` that ends at `first_end` or later, or -1 if none is found."""
    return text.find(stop, max(0, first_end - len(stop)))


class ChoiceText:
    """Conversion of a choice's updates to text deltas. Every update of the choice must be fed in order."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        *,
        num_prompt_tokens: int,
        kept_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Begin a choice. `kept_ids` are special tokens that stay in the text even if special tokens are skipped."""
        hidden = tokenizer.special_ids - kept_ids if sampling.skip_special_tokens else frozenset()
        self._stops = SpecialStops(tokenizer, sampling.stop, hidden_ids=hidden)
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, hidden_ids=hidden, characters=self._stops.characters, continues=num_prompt_tokens > 0
        )
        keeps = "rest" if sampling.no_stop_trim else "stop" if sampling.include_stop_str_in_output else None
        self._scanner: StopStringScanner | PatternScanner | None = None
        if sampling.stop_regex:
            self._scanner = PatternScanner(sampling.stop_regex, self._stops.stops, keeps=keeps)
        elif sampling.stop:
            self._scanner = StopStringScanner(self._stops.stops, keeps=keeps)
        wanted = sampling.repetition_detection
        self._repetition = None if wanted is None else RepetitionDetector(Repetition(*wanted))
        self._has_repeated = False
        self._keeps_stops, self._stops_after = keeps is not None, sampling.stop_strings_after
        self._num_prompt_tokens = num_prompt_tokens
        self._num_kept = 0

    @property
    def ending(self) -> FinishReason | None:
        """Return the finish reason found in the text, or None; the engine may still be generating."""
        if self._scanner is not None and self._scanner.matched is not None:
            return FinishReason("stop", matched=self._stops.given(self._scanner.matched))
        return REPEATED if self._has_repeated else None

    def feed(self, update: ChoiceResult) -> ChoiceResult:
        """Add the text to an update of the engine, cut it at the first stop string, and return it.

        The text ends before the stop string. Ids, log-probs and routing rows end with the token that completed it. A
        stop id stays among the ids and adds no text. With kept stops, stop strings and stop ids are ordinary text.
        """
        update.text, num_kept = self._take(update)
        self._num_kept += num_kept
        if update.finish is not None:
            update.text += self._end_text()
        if self.ending is not None:
            self._cut(update, num_kept)
        return update

    def _take(self, update: ChoiceResult) -> tuple[str, int]:
        """Add the update's tokens up to the end of the text; return their text and the number of kept tokens."""
        if self.ending is not None:
            return "", 0
        drops_last = _ends_at_token(update.finish) and not self._keeps_stops
        silent = len(update.token_ids) - drops_last
        if self._scanner is None and self._repetition is None:
            return self._detokenizer.extend(update.token_ids[:silent]), len(update.token_ids)
        pieces: list[str] = []
        for position, token_id in enumerate(update.token_ids[:silent]):
            pieces.append(self._take_token(token_id, may_end=self._num_kept + position >= self._stops_after))
            if self.ending is not None:
                return "".join(pieces), position + 1
        return "".join(pieces), len(update.token_ids)

    def _take_token(self, token_id: int, *, may_end: bool) -> str:
        piece = self._detokenizer.push(token_id)
        if self._scanner is not None:
            piece = self._shown(self._scanner.push(piece, may_end=may_end))
        if self.ending is None and self._repetition is not None and self._repetition.push(token_id) and may_end:
            self._has_repeated = True
            piece += self._rest()
        return piece

    def _end_text(self) -> str:
        """Return the unfinished character and the held-back text; empty if the text has already ended."""
        return "" if self.ending is not None else self._rest()

    def _rest(self) -> str:
        rest = self._detokenizer.flush()
        if self._scanner is None:
            return rest
        return self._shown(self._scanner.push(rest, may_end=self._num_kept > self._stops_after) + self._scanner.flush())

    def _shown(self, piece: str) -> str:
        matched = self._scanner.matched if self._scanner is not None and self._keeps_stops else None
        return self._stops.shown(piece, matched=matched)

    def _cut(self, update: ChoiceResult, num_kept: int) -> None:
        """Drop everything generated after the stop string and set the finish reason; an error stays an error."""
        for values in (update.token_ids, update.logprobs, update.ranks):
            del values[num_kept:]
        update.columns = take(update.columns, slice(0, num_kept))
        if update.routing is not None:
            update.routing = routing_until(update.routing, self._num_prompt_tokens + self._num_kept - 1)
        if update.finish is not None and update.finish.kind != "error":
            update.finish = self.ending


def _ends_at_token(finish: FinishReason | None) -> bool:
    return finish is not None and finish.kind == "stop" and isinstance(finish.matched, int)


class RepetitionDetector:
    """Detector of repeated token patterns at the end of an output."""

    def __init__(self, wanted: Repetition) -> None:
        self._wanted = wanted
        self._sizes = np.arange(wanted.min_size, wanted.max_size + 1)
        self._latest = np.full(wanted.max_size, -1, np.int64)
        # Index: pattern size. Number of last tokens that equal the token `size` positions earlier.
        self._num_equal = np.zeros(len(self._sizes), np.int64)

    def push(self, token_id: int) -> bool:
        """Take the next token; return True if the output now ends with a pattern repeated `count` times."""
        is_equal = self._latest[-self._sizes] == token_id
        self._num_equal = np.where(is_equal, self._num_equal + 1, 0)
        self._latest = np.append(self._latest[1:], token_id)
        return bool((self._num_equal >= self._sizes * (self._wanted.count - 1)).any())


class SpecialStops:
    """Stop strings with special tokens, for answers whose text omits special tokens.

    The scanned text holds a Unicode noncharacter for each such token. The client's text omits these characters.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], *, hidden_ids: frozenset[int]) -> None:
        """Map the special tokens in `stops` that the text omits (`hidden_ids`) to characters, at most 32."""
        texts = {tokenizer.token_text(token_id): token_id for token_id in hidden_ids} if any(stops) else {}
        inside = sorted((text for text in texts if text and any(text in stop for stop in stops)), key=len, reverse=True)
        self._text_of = {chr(_FIRST_NONCHARACTER + i): text for i, text in enumerate(inside[:_NUM_NONCHARACTERS])}
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
