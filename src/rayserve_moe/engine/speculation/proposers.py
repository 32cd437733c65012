"""Proposers of drafts from a sequence's own tokens, or from other answers to its prompt; the index of tokens."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import NamedTuple, Protocol

import numpy as np

from rayserve_moe.config.settings import SpeculationSettings
from rayserve_moe.scheduling.sequence import Sequence

MOST_PROMPTS = 256
MOST_ANSWERS = 64
"""Prompts whose finished answers are kept, and answers kept of each; the oldest go first."""


class Proposer(Protocol):
    """Drafts tokens for sequences. Any drafts are right to give: wrong ones only cost time."""

    name: str

    def propose(self, sequence: Sequence, count: int) -> np.ndarray:
        """Return up to `count` drafts that may follow the known tokens of the sequence, int32."""
        ...

    def end(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        ...


class NgramProposer:
    """Drafts what followed the last tokens of a sequence before, in its prompt or output (prompt lookup decoding)."""

    name = "ngram"

    def __init__(self, settings: SpeculationSettings) -> None:
        self._settings = settings

    def propose(self, sequence: Sequence, count: int) -> np.ndarray:
        """Return the continuation of its longest end that occurs earlier."""
        known = sequence.token_ids[: sequence.num_tokens]
        return continuation(
            known,
            known,
            count=count,
            shortest=self._settings.shortest_match,
            longest=self._settings.longest_match,
        )

    def end(self, sequence: Sequence) -> None:
        """Nothing is kept."""


class _Group(NamedTuple):
    """The answers to a prompt, and its sequences that run."""

    index: TokenIndex
    running: set[Sequence]


class SiblingProposer:
    """Drafts from other answers to the same prompt, running or finished, else from the sequence itself.

    While sequences of a prompt run, its answers are indexed.
    """

    name = "siblings"

    def __init__(self, settings: SpeculationSettings) -> None:
        self._settings = settings
        self._own = NgramProposer(settings)
        self._finished: OrderedDict[Hashable, deque[np.ndarray]] = OrderedDict()
        self._groups: dict[Hashable, _Group] = {}

    def propose(self, sequence: Sequence, count: int) -> np.ndarray:
        """Return the continuation of its longest end in an answer, or else in its prompt."""
        index = self._group(_prompt_of(sequence), sequence).index
        index.extend(sequence, self._answer(sequence))
        drafts = index.continuation(sequence, count)
        return drafts if len(drafts) else self._own.propose(sequence, count)

    def end(self, sequence: Sequence) -> None:
        """Keep its answer for those that come after it, unless it failed."""
        prompt = _prompt_of(sequence)
        if group := self._groups.get(prompt):
            group.running.discard(sequence)
            if not group.running:
                del self._groups[prompt]
        if sequence.finish is None or sequence.finish.kind != "error":
            answers = self._finished.setdefault(prompt, deque(maxlen=MOST_ANSWERS))
            answers.append(self._answer(sequence).copy())
            self._finished.move_to_end(prompt)
            while len(self._finished) > MOST_PROMPTS:
                self._finished.popitem(last=False)

    def _group(self, prompt: Hashable, sequence: Sequence) -> _Group:
        """The group of a prompt, with `sequence`; made anew where it has become too large."""
        group = self._groups.get(prompt)
        if group is None or len(group.index) > 2 * MOST_ANSWERS + len(group.running):
            index = TokenIndex(shortest=self._settings.shortest_match, longest=self._settings.longest_match)
            group = _Group(index, group.running if group else set())
            for place, answer in enumerate(self._finished.get(prompt, ())):
                group.index.extend(place, answer, is_whole=True)
            self._groups[prompt] = group
        group.running.add(sequence)
        return group

    def _answer(self, sequence: Sequence) -> np.ndarray:
        """The outputs of a sequence, after as much of its prompt as an end can reach into."""
        first = max(0, sequence.num_prompt_tokens - self._settings.longest_match)
        return sequence.token_ids[first : sequence.num_tokens]


def _prompt_of(sequence: Sequence) -> Hashable:
    """What answers are kept under: those of another salt are none of its business."""
    request = sequence.request
    return request.cache_salt, request.prompt_ids.tobytes()


PROPOSERS = {"NGRAM": NgramProposer, "SIBLINGS": SiblingProposer}
"""By `speculative_algorithm`."""


NO_DRAFTS = np.zeros(0, np.int32)


def continuation(token_ids: np.ndarray, text: np.ndarray, *, count: int, shortest: int, longest: int) -> np.ndarray:
    """Return the continuation of the end of `token_ids` in `text`, int32 [`count` or fewer].

    The longest end of `token_ids` that occurs in `text` is matched, with at most `longest` tokens. The result is empty
    if the match is shorter than `shortest`. The latest match with `count` following tokens is taken, otherwise the
    latest match. `text` may be `token_ids` itself: then the end does not match itself, and a continuation that reaches
    the end of the text repeats, as in a loop.
    """
    ends, matched = _match_ends(token_ids, text, longest=longest)
    if not len(ends) or matched < shortest:
        return NO_DRAFTS
    with_enough = ends[ends + count < len(text)]
    end = with_enough[-1] if len(with_enough) else ends[-1]
    following = text[end + 1 : end + 1 + count]
    return np.resize(following, count) if text is token_ids else following


def _match_ends(token_ids: np.ndarray, text: np.ndarray, *, longest: int) -> tuple[np.ndarray, int]:
    """Return the indices in `text` at which the longest matching end of `token_ids` ends, and its length.

    The last token of `text` is not matched.
    """
    ends, matched = np.flatnonzero(text[:-1] == token_ids[-1]), 1
    if not len(ends):
        return ends, 0
    while matched < min(longest, len(token_ids)):
        longer = ends[ends >= matched]
        longer = longer[text[longer - matched] == token_ids[-1 - matched]]
        if not len(longer):
            break
        ends, matched = longer, matched + 1
    return ends, matched


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

    def continuation(self, name: Hashable, count: int) -> np.ndarray:
        """Return up to `count` tokens, int32, that follow another occurrence of the end of a text.

        The longest end that is found counts, of `longest` tokens at most and `shortest` at least. Of several places the
        last with `count` following tokens is taken, otherwise the last. A continuation that reaches the end of the text
        itself repeats, as in a loop.
        """
        begin, end, _, _ = self._spans[name]
        tokens, best = self._tokens, (self._shortest, False, 0)
        for place in self._places_of_end(end - 1) if end - begin >= self._shortest else ():
            if tokens[place + 1] != NOTHING:
                has_enough = place + count < len(tokens) and tokens[place + count] != NOTHING
                rank = (self._length_of_match(place, end - 1), has_enough, place)
                best = max(best, rank)
                if rank[:2] == (self._longest, True):
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
