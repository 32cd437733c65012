"""One choice as the client sees it: its text, cut at stop strings, with the ids, log-probs and routing that belong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from rayserve_moe.requests import (
    FinishReason,
    GenerationUpdate,
    PromptScores,
    RoutedExperts,
    SamplingParams,
    TopLogprobs,
)
from rayserve_moe.text.detokenizer import IncrementalDetokenizer
from rayserve_moe.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ChoiceDelta:
    """What one update of the engine adds to a choice.

    `stop_found`: a stop string was found while the engine is still generating, which has to be told to end the
    choice; its last update then brings `finish`.
    """

    choice_index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish: FinishReason | None = None
    routing: RoutedExperts | None = None
    num_cached_tokens: int = 0
    stop_found: bool = False
    top: TopLogprobs | None = None
    prompt_scores: PromptScores | None = None
    weight_versions: tuple[tuple[int, str], ...] = ()
    ranks: tuple[int, ...] = ()


class StopStringScanner:
    """Passes text on up to the first stop string, and holds back what could be the start of one.

    The first stop string is the one that ends first; of several that end together, the one that starts first. So the
    cut depends on the text alone, not on the pieces it came in. Where it `keeps` the stop string, that is passed on
    too, and where it keeps the `rest`, what follows it in its piece.
    """

    def __init__(self, stops: Sequence[str], *, keeps: Literal["stop", "rest"] | None = None) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._keeps = keeps
        self._held = ""
        self._begun = [0] * len(self._stops)
        self.matched: str | None = None

    @property
    def watches(self) -> bool:
        """Whether there is a stop string to look for."""
        return bool(self._stops)

    def push(self, piece: str, *, may_end: bool = True) -> str:
        """Take the next piece; return what is certain to precede any stop string. After a match, nothing.

        Unless it `may_end`, no stop string ends in this piece.
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
        """End the text; return what was held back."""
        held, self._held = self._held, ""
        return held

    def _num_undecided(self, piece: str) -> int:
        """Length of the longest end of all text, of which `piece` is the last, that begins a stop string."""
        self._begun = [_advanced(stop, begun, piece) for stop, begun in zip(self._stops, self._begun, strict=True)]
        return max(self._begun, default=0)


def _advanced(stop: str, begun: int, piece: str) -> int:
    """How much of `stop` a text ends with after `piece`, where it ended with `begun` characters of it before.

    That takes a few operations per character, however long and repetitive the stop string is.
    """
    borders = _borders(stop)
    for character in piece:
        while begun and (begun == len(stop) or stop[begun] != character):
            begun = borders[begun - 1]
        begun += stop[begun] == character
    return borders[begun - 1] if begun == len(stop) else begun


@lru_cache(maxsize=256)
def _borders(stop: str) -> tuple[int, ...]:
    """For every beginning of `stop`, the longest shorter one that it ends with (Knuth, Morris and Pratt)."""
    borders, longest = [0], 0
    for character in stop[1:]:
        while longest and stop[longest] != character:
            longest = borders[longest - 1]
        longest += stop[longest] == character
        borders.append(longest)
    return tuple(borders)


def _find(text: str, stop: str, first_end: int) -> int:
    """Where `stop` starts first among those that end at `first_end` or later; below 0 where there is none."""
    return text.find(stop, max(0, first_end - len(stop)))


class ChoiceText:
    """Follows one choice from update to delta. Feed it every update of that choice, in order."""

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams, *, num_prompt_tokens: int) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=sampling.skip_special_tokens)
        keeps = "rest" if sampling.no_stop_trim else "stop" if sampling.include_stop_str_in_output else None
        self._scanner = StopStringScanner(sampling.stop, keeps=keeps)
        self._keeps_stops, self._stops_after = keeps is not None, sampling.stop_strings_after
        self._num_prompt_tokens = num_prompt_tokens
        self._num_kept = 0

    def feed(self, update: GenerationUpdate) -> ChoiceDelta:
        """Turn the engine's update into what the client is to get.

        Text ends before the first stop string; ids and log-probs end with the token that completed it, and so do the
        routing rows, streamed or not. An id that the engine stopped at stays among the ids and adds no text. Unless
        stops are to be kept: then they are text like any other.
        """
        was_matched = self._scanner.matched is not None
        text, num_kept = self._take(update)
        self._num_kept += num_kept
        if update.finish is not None:
            text += self._end_text()
        matched = self._scanner.matched
        return ChoiceDelta(
            choice_index=update.choice_index,
            text=text,
            token_ids=update.token_ids[:num_kept],
            logprobs=update.logprobs[:num_kept],
            finish=_finish(update.finish, matched),
            routing=update.routing if matched is None else self._trim(update.routing),
            num_cached_tokens=update.num_cached_tokens,
            stop_found=matched is not None and not was_matched and update.finish is None,
            top=_first_of(update.top, num_kept),
            prompt_scores=update.prompt_scores,
            weight_versions=update.weight_versions,
            ranks=update.ranks[:num_kept],
        )

    def _take(self, update: GenerationUpdate) -> tuple[str, int]:
        """Add the update's tokens up to a stop string; return their text and how many were kept."""
        if self._scanner.matched is not None:
            return "", 0
        drops_last = _ends_at_token(update.finish) and not self._keeps_stops
        silent = len(update.token_ids) - drops_last
        if not self._scanner.watches:
            return self._detokenizer.extend(update.token_ids[:silent]), len(update.token_ids)
        pieces: list[str] = []
        for position, token_id in enumerate(update.token_ids[:silent]):
            may_end = self._num_kept + position >= self._stops_after
            pieces.append(self._scanner.push(self._detokenizer.push(token_id), may_end=may_end))
            if self._scanner.matched is not None:
                return "".join(pieces), position + 1
        return "".join(pieces), len(update.token_ids)

    def _end_text(self) -> str:
        """Release the unfinished character and the held text, unless a stop string has ended it all."""
        if self._scanner.matched is not None:
            return ""
        may_end = self._num_kept > self._stops_after
        return self._scanner.push(self._detokenizer.flush(), may_end=may_end) + self._scanner.flush()

    def _trim(self, routing: RoutedExperts | None) -> RoutedExperts | None:
        """Drop the rows of tokens that were generated after the stop string."""
        if routing is None:
            return None
        end = max(routing.start, self._num_prompt_tokens + self._num_kept - 1)
        return replace(
            routing,
            rows=routing.rows[: end - routing.start],
            missing=tuple((a, min(b, end)) for a, b in routing.missing if a < end),
            source=tuple((a, min(b, end), name) for a, b, name in routing.source if a < end),
            weight_version=tuple((a, min(b, end), name) for a, b, name in routing.weight_version if a < end),
        )


def _first_of(top: TopLogprobs | None, count: int) -> TopLogprobs | None:
    return top and TopLogprobs(top.token_ids[:count], top.logprobs[:count])


def _ends_at_token(finish: FinishReason | None) -> bool:
    return finish is not None and finish.kind == "stop" and isinstance(finish.matched, int)


def _finish(finish: FinishReason | None, matched: str | None) -> FinishReason | None:
    """Name the stop string as the reason once there is one; an error stays an error."""
    if finish is None or finish.kind == "error" or matched is None:
        return finish
    return FinishReason("stop", matched=matched)
