"""Where runs of tokens stand in texts that grow, for drafts of what followed them."""

from __future__ import annotations

from array import array
from collections.abc import Hashable

import numpy as np

MOST_PLACES = 64
"""Latest places of an end that are looked at; a longer match before them is not found."""
FIRST_PLACES = 64
"""Of a text that grows; when it outgrows them, twice as many as it has tokens."""
FEW = 8
"""Tokens that are added one by one; more at once by arrays."""
NOTHING, NOWHERE = -1, -1
FACTOR, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
"""Of the hash of a run: the sum of its tokens by powers of FACTOR, modulo 2^64."""


class TokenIndex:
    """Texts by name in one array, and for each run of `shortest` tokens a chain of the places where it ends, latest
    first, as in LZ77.

    `[guard | text | free, guard | text | ...]`: what is not known is NOTHING, so no match reaches into another text.
    """

    def __init__(self, *, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._tokens, self._before = array("i", [NOTHING] * longest), array("i", [NOWHERE] * longest)
        self._latest: dict[int, int] = {}
        self._spans: dict[Hashable, tuple[int, int, int, int]] = {}
        self._powers = np.array([pow(FACTOR, i, 1 << 64) for i in range(shortest)], np.uint64)

    def __len__(self) -> int:
        """Number of texts."""
        return len(self._spans)

    def extend(self, name: Hashable, token_ids: np.ndarray, *, is_whole: bool = False) -> None:
        """Take over a new text, or what one has grown by: int32 `token_ids` are all of it. It grows no more if it
        `is_whole`, else it goes on after its last tokens elsewhere where it finds no more place."""
        begin, end, reserved, first = self._spans.get(name, (0, 0, 0, 0))
        if begin + len(token_ids) - first > reserved:
            first = max(0, first + end - begin - self._longest)
            begin = end = len(self._tokens)
            reserved = begin + (len(token_ids) - first if is_whole else max(FIRST_PLACES, 2 * len(token_ids)))
            for places in (self._tokens, self._before):
                places.extend(array("i", [NOTHING]) * (reserved - begin + self._longest))
        stop = begin + len(token_ids) - first
        if stop == end:
            return
        added = np.ascontiguousarray(token_ids[first + end - begin :], np.int32)
        self._tokens[end:stop] = array("i", added.tobytes())
        self._spans[name] = (begin, stop, reserved, first)
        places = range(max(end, begin + self._shortest - 1), stop)
        if len(places) > FEW:
            self._note_many(np.arange(places.start, places.stop))
            return
        for place in places:
            run = self._hash(place)
            self._before[place] = self._latest.get(run, NOWHERE)
            self._latest[run] = place

    def continuations(self, name: Hashable, count: int, *, width: int = 1) -> list[np.ndarray]:
        """Return up to `count` tokens, int32, that followed the end of a text where it stood elsewhere.

        The longest ends that are found count, of `longest` tokens at most and `shortest` at least; of several places
        the last ones that as many tokens follow, else the last: of `width` different continuations. What runs into the
        end of the text itself continues with what it drafted, as in a loop.
        """
        begin, end, _, _ = self._spans[name]
        tokens, ranked, least = self._tokens, [], (self._shortest, False, 0)
        for place in self._places_of_end(end - 1) if end - begin >= self._shortest else ():
            if tokens[place + 1] != NOTHING:
                has_enough = place + count < len(tokens) and tokens[place + count] != NOTHING
                rank = (self._length_of_match(place, end - 1), has_enough, place)
                ranked.extend([rank] if rank > least else ())
                if width == 1 and rank[:2] == (self._longest, True):
                    break
        found: dict[bytes, np.ndarray] = {}
        for _, _, place in sorted(ranked, reverse=True):
            following = tokens[place + 1 : place + 1 + count]
            if begin <= place < end:
                drafts = np.resize(np.array(tokens[place + 1 : end], np.int32), count)
            else:
                known = following[: following.index(NOTHING)] if NOTHING in following else following
                drafts = np.array(known, np.int32)
            found.setdefault(drafts.tobytes(), drafts)
            if len(found) == width:
                break
        return list(found.values())

    def _length_of_match(self, place: int, other: int) -> int:
        """How many tokens are the same up to two places, at most `longest`."""
        tokens, length = self._tokens, 0
        while length < self._longest and tokens[place - length] == tokens[other - length] != NOTHING:
            length += 1
        return length

    def _places_of_end(self, end: int) -> list[int]:
        """Where else a run ends that has the hash of that which ends at `end`: the latest MOST_PLACES."""
        at, before, found = self._latest.get(self._hash(end), NOWHERE), self._before, []
        while at != NOWHERE and len(found) < MOST_PLACES:
            if at != end:
                found.append(at)
            at = before[at]
        return found

    def _hash(self, place: int) -> int:
        found = 0
        for token in self._tokens[place - self._shortest + 1 : place + 1]:
            found = (found * FACTOR + token) & MASK
        return found

    def _note_many(self, places: np.ndarray) -> None:
        """Put the runs that end at ascending `places` at the front of their chains."""
        tokens, before = (np.frombuffer(of_all, np.int32) for of_all in (self._tokens, self._before))
        windows = tokens[places[:, None] - np.arange(self._shortest)].astype(np.uint64)
        runs = (windows * self._powers).sum(axis=1, dtype=np.uint64)
        order = np.argsort(runs, kind="stable")
        runs, places = runs[order], places[order]
        starts = np.flatnonzero(np.concatenate([[True], runs[1:] != runs[:-1]]))
        before[places[1:]] = places[:-1]
        names = runs[starts].tolist()
        before[places[starts]] = [self._latest.get(run, NOWHERE) for run in names]
        ends = np.append(starts[1:], len(runs)) - 1
        self._latest.update(zip(names, places[ends].tolist(), strict=True))
