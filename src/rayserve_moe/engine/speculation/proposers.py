"""Draft proposers that use a sequence's own tokens or other answers to its prompt, and their token index."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import NamedTuple, Protocol

import numpy as np

from rayserve_moe.config.settings import SpeculationSettings
from rayserve_moe.scheduling.sequence import Sequence

MAX_PROMPTS = 256
"""Maximum number of prompts whose finished answers are kept; the oldest are dropped first."""
MAX_ANSWERS = 64
"""Maximum number of finished answers kept for a prompt."""


class Proposer(Protocol):
    """Source of draft tokens. Wrong drafts only cost time."""

    name: str

    def propose(self, sequence: Sequence, count: int) -> np.ndarray:
        """Return up to `count` drafts that may follow the known tokens of the sequence, int32."""
        ...

    def end(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        ...


class NgramProposer:
    """Proposer that continues an earlier occurrence of a sequence's last tokens (prompt lookup decoding)."""

    name = "ngram"

    def __init__(self, settings: SpeculationSettings) -> None:
        self._settings = settings

    def propose(self, sequence: Sequence, count: int) -> np.ndarray:
        """Return the continuation of the longest suffix that occurs earlier."""
        known = sequence.token_ids[: sequence.num_tokens]
        return continuation(
            known,
            known,
            count=count,
            min_length=self._settings.min_match,
            max_length=self._settings.max_match,
        )

    def end(self, sequence: Sequence) -> None:
        """Do nothing: no state is kept."""


class _Group(NamedTuple):
    """Indexed answers to a prompt, and its running sequences."""

    index: TokenIndex
    running: set[Sequence]


class SiblingProposer:
    """Proposer that drafts from other answers to the same prompt, running or finished, else from the sequence itself.

    The answers of a prompt are indexed while sequences of it run.
    """

    name = "siblings"

    def __init__(self, settings: SpeculationSettings) -> None:
        self._settings = settings
        self._own = NgramProposer(settings)
        self._finished: OrderedDict[Hashable, deque[np.ndarray]] = OrderedDict()
        self._groups: dict[Hashable, _Group] = {}

    def propose(self, sequence: Sequence, count: int) -> np.ndarray:
        """Return the continuation of the sequence's longest suffix in an answer, else in its own tokens."""
        index = self._group(_prompt_of(sequence), sequence).index
        index.extend(sequence, self._answer(sequence))
        drafts = index.continuation(sequence, count)
        return drafts if len(drafts) else self._own.propose(sequence, count)

    def end(self, sequence: Sequence) -> None:
        """Keep the answer for later sequences with the same prompt, unless it failed."""
        prompt = _prompt_of(sequence)
        if group := self._groups.get(prompt):
            group.running.discard(sequence)
            if not group.running:
                del self._groups[prompt]
        if sequence.finish is None or sequence.finish.kind != "error":
            answers = self._finished.setdefault(prompt, deque(maxlen=MAX_ANSWERS))
            answers.append(self._answer(sequence).copy())
            self._finished.move_to_end(prompt)
            while len(self._finished) > MAX_PROMPTS:
                self._finished.popitem(last=False)

    def _group(self, prompt: Hashable, sequence: Sequence) -> _Group:
        """Return the group of a prompt, with `sequence`; it is rebuilt if it has too many answers."""
        group = self._groups.get(prompt)
        if group is None or len(group.index) > 2 * MAX_ANSWERS + len(group.running):
            index = TokenIndex(min_length=self._settings.min_match, max_length=self._settings.max_match)
            group = _Group(index, group.running if group else set())
            for place, answer in enumerate(self._finished.get(prompt, ())):
                group.index.extend(place, answer, is_whole=True)
            self._groups[prompt] = group
        group.running.add(sequence)
        return group

    def _answer(self, sequence: Sequence) -> np.ndarray:
        """Return the outputs of a sequence, after the end of its prompt that a match can reach into."""
        first = max(0, sequence.num_prompt_tokens - self._settings.max_match)
        return sequence.token_ids[first : sequence.num_tokens]


def _prompt_of(sequence: Sequence) -> Hashable:
    """Return the key of a prompt's answers; the cache salt separates them."""
    request = sequence.request
    return request.cache_salt, request.adapter, request.prompt_ids.tobytes()


PROPOSERS = {"NGRAM": NgramProposer, "SIBLINGS": SiblingProposer}
"""Proposers by `speculative_algorithm`."""


NO_DRAFTS = np.zeros(0, np.int32)


def continuation(
    token_ids: np.ndarray, text: np.ndarray, *, count: int, min_length: int, max_length: int
) -> np.ndarray:
    """Return the continuation of the end of `token_ids` in `text`, int32 [`count` or fewer].

    The longest suffix of `token_ids` that occurs in `text` is matched, with at most `max_length` tokens. The result is
    empty if the match is shorter than `min_length`. The latest match with `count` following tokens is taken, otherwise
    the latest match. `text` may be `token_ids` itself: then the suffix does not match itself, and a continuation that
    reaches the end of the text repeats, as in a loop.
    """
    ends, matched = _match_ends(token_ids, text, max_length=max_length)
    if not len(ends) or matched < min_length:
        return NO_DRAFTS
    with_enough = ends[ends + count < len(text)]
    end = with_enough[-1] if len(with_enough) else ends[-1]
    following = text[end + 1 : end + 1 + count]
    return np.resize(following, count) if text is token_ids else following


def _match_ends(token_ids: np.ndarray, text: np.ndarray, *, max_length: int) -> tuple[np.ndarray, int]:
    """Return the indices in `text` at which the longest matching suffix of `token_ids` ends, and its length.

    The last token of `text` is not matched.
    """
    ends, matched = np.flatnonzero(text[:-1] == token_ids[-1]), 1
    if not len(ends):
        return ends, 0
    while matched < min(max_length, len(token_ids)):
        longer = ends[ends >= matched]
        longer = longer[text[longer - matched] == token_ids[-1 - matched]]
        if not len(longer):
            break
        ends, matched = longer, matched + 1
    return ends, matched


MAX_PLACES = 64
"""Latest occurrences that are compared; a longer match before them is not found."""
FIRST_PLACES = 64
"""Minimum reserved size of a growing text; a text that outgrows it reserves twice its size."""
FEW = 8
"""Up to this many tokens are added in a loop; more tokens are added by array operations."""
NOTHING, NOWHERE = -1, -1
FACTOR, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
"""Hash of a run: the sum of its tokens times powers of FACTOR, modulo 2^64."""


class TokenIndex:
    """Index of texts, with a chain of end positions, latest first, for each run of `min_length` tokens, as in LZ77.

    All texts lie in a single array: `[guard | text | free, guard | text | ...]`. Unused entries are NOTHING, so no
    match reaches into another text.
    """

    def __init__(self, *, min_length: int, max_length: int) -> None:
        self._min_length, self._max_length = min_length, max_length
        self._tokens, self._before = array("i", [NOTHING] * max_length), array("i", [NOWHERE] * max_length)
        self._latest: dict[int, int] = {}
        self._spans: dict[Hashable, tuple[int, int, int, int]] = {}
        self._powers = np.array([pow(FACTOR, i, 1 << 64) for i in range(min_length)], np.uint64)

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self._spans)

    def extend(self, name: Hashable, token_ids: np.ndarray, *, is_whole: bool = False) -> None:
        """Add a text, or the new tokens of a known text; `token_ids` int32 is the entire text.

        A text that `is_whole` does not grow. A growing text that outgrows its space continues elsewhere, after a copy
        of its last tokens.
        """
        begin, end, reserved, first = self._spans.get(name, (0, 0, 0, 0))
        if begin + len(token_ids) - first > reserved:
            first = max(0, first + end - begin - self._max_length)
            begin = end = len(self._tokens)
            reserved = begin + (len(token_ids) - first if is_whole else max(FIRST_PLACES, 2 * len(token_ids)))
            for places in (self._tokens, self._before):
                places.extend(array("i", [NOTHING]) * (reserved - begin + self._max_length))
        stop = begin + len(token_ids) - first
        if stop == end:
            return
        added = np.ascontiguousarray(token_ids[first + end - begin :], np.int32)
        self._tokens[end:stop] = array("i", added.tobytes())
        self._spans[name] = (begin, stop, reserved, first)
        places = range(max(end, begin + self._min_length - 1), stop)
        if len(places) > FEW:
            self._add_many(np.arange(places.start, places.stop))
            return
        for place in places:
            run = self._hash(place)
            self._before[place] = self._latest.get(run, NOWHERE)
            self._latest[run] = place

    def continuation(self, name: Hashable, count: int) -> np.ndarray:
        """Return up to `count` tokens, int32, that follow another occurrence of the end of a text.

        The longest suffix that is found counts, with at most `max_length` and at least `min_length` tokens. Among
        several occurrences, the last with `count` following tokens is taken, otherwise the last. A continuation that
        reaches the end of the text itself repeats, as in a loop.
        """
        begin, end, _, _ = self._spans[name]
        tokens, best = self._tokens, (self._min_length, False, 0)
        for place in self._places_of_end(end - 1) if end - begin >= self._min_length else ():
            if tokens[place + 1] != NOTHING:
                has_enough = place + count < len(tokens) and tokens[place + count] != NOTHING
                rank = (self._length_of_match(place, end - 1), has_enough, place)
                best = max(best, rank)
                if rank[:2] == (self._max_length, True):
                    break
        place = best[2]
        if not place:
            return NO_DRAFTS
        if begin <= place < end:
            return np.resize(np.array(tokens[place + 1 : min(end, place + 1 + count)], np.int32), count)
        following = tokens[place + 1 : place + 1 + count]
        known = following[: following.index(NOTHING)] if NOTHING in following else following
        return np.array(known, np.int32)

    def _length_of_match(self, place: int, other: int) -> int:
        """Return the number of equal tokens that end at two places, at most `max_length`."""
        tokens, length = self._tokens, 0
        while length < self._max_length and tokens[place - length] == tokens[other - length] != NOTHING:
            length += 1
        return length

    def _places_of_end(self, end: int) -> list[int]:
        """Return the latest MAX_PLACES other places with the same run hash as the run that ends at `end`."""
        at, before, found = self._latest.get(self._hash(end), NOWHERE), self._before, []
        while at != NOWHERE and len(found) < MAX_PLACES:
            if at != end:
                found.append(at)
            at = before[at]
        return found

    def _hash(self, place: int) -> int:
        found = 0
        for token in self._tokens[place - self._min_length + 1 : place + 1]:
            found = (found * FACTOR + token) & MASK
        return found

    def _add_many(self, places: np.ndarray) -> None:
        """Add the runs that end at ascending `places` to the front of their chains."""
        tokens, before = (np.frombuffer(of_all, np.int32) for of_all in (self._tokens, self._before))
        windows = tokens[places[:, None] - np.arange(self._min_length)].astype(np.uint64)
        runs = (windows * self._powers).sum(axis=1, dtype=np.uint64)
        order = np.argsort(runs, kind="stable")
        runs, places = runs[order], places[order]
        starts = np.flatnonzero(np.concatenate([[True], runs[1:] != runs[:-1]]))
        before[places[1:]] = places[:-1]
        names = runs[starts].tolist()
        before[places[starts]] = [self._latest.get(run, NOWHERE) for run in names]
        ends = np.append(starts[1:], len(runs)) - 1
        self._latest.update(zip(names, places[ends].tolist(), strict=True))
