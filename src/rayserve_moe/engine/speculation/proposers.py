"""Proposes drafts from a sequence's own tokens, or from other answers to its prompt."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import NamedTuple, Protocol

import numpy as np

from rayserve_moe.config.settings import SpeculationSettings
from rayserve_moe.scheduling.draft_trees import joined
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.token_index import TokenIndex

MOST_PROMPTS = 256
MOST_ANSWERS = 64
"""Prompts whose finished answers are kept, and answers kept of each; the oldest go first."""


class Proposer(Protocol):
    """Drafts tokens for sequences. Any drafts are right to give: wrong ones only cost time."""

    name: str

    def propose(self, sequence: Sequence, count: int) -> np.ndarray:
        """Up to `count` drafts (`draft_trees`) of what may follow the tokens that the sequence knows."""
        ...

    def end(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        ...


class Branching(NamedTuple):
    """How many continuations are drafted, of how many tokens each; 1: a chain."""

    width: int
    num_levels: int

    @classmethod
    def of(cls, settings: SpeculationSettings) -> Branching:
        """As the settings say."""
        return cls(settings.eagle_topk, settings.num_levels)

    def tokens_of(self, count: int) -> int:
        """Tokens of each continuation where `count` are drafted in all."""
        return count if self.width == 1 else min(count, self.num_levels)

    def drafts_of(self, found: list[np.ndarray], count: int) -> np.ndarray:
        """Continuations, the best first, as drafts."""
        if self.width > 1:
            return joined(found, count=count)
        return found[0] if found else NO_DRAFTS


class NgramProposer:
    """Drafts what followed the last tokens of a sequence before, in its prompt or output (prompt lookup decoding)."""

    name = "ngram"

    def __init__(self, settings: SpeculationSettings) -> None:
        self._branching, self._settings = Branching.of(settings), settings

    def propose(self, sequence: Sequence, count: int) -> np.ndarray:
        """The continuations of its longest end that stood before."""
        known = sequence.token_ids[: sequence.num_tokens]
        found = continuations(
            known,
            known,
            count=self._branching.tokens_of(count),
            shortest=self._settings.shortest_match,
            longest=self._settings.longest_match,
            width=self._branching.width,
        )
        return self._branching.drafts_of(found, count)

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
        self._branching, self._settings = Branching.of(settings), settings
        self._own = NgramProposer(settings)
        self._finished: OrderedDict[Hashable, deque[np.ndarray]] = OrderedDict()
        self._groups: dict[Hashable, _Group] = {}

    def propose(self, sequence: Sequence, count: int) -> np.ndarray:
        """The continuation of its longest end that stands in an answer, else of the one that stands in its prompt."""
        index = self._group(_prompt_of(sequence), sequence).index
        index.extend(sequence, self._answer(sequence))
        branching, num_tokens = self._branching, self._branching.tokens_of(count)
        if found := index.continuations(sequence, num_tokens, width=branching.width):
            return branching.drafts_of(found, count)
        return self._own.propose(sequence, count)

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
MAX_MATCHES = 64
"""Maximum number of matches that are searched for different continuations."""


def continuations(
    token_ids: np.ndarray, text: np.ndarray, *, count: int, shortest: int, longest: int, width: int = 1
) -> list[np.ndarray]:
    """Return up to `width` different continuations of the end of `token_ids` in `text`, each int32 [`count` or fewer].

    The longest end of `token_ids` that occurs in `text` is matched, with at most `longest` tokens. The result is empty
    if the match is shorter than `shortest`. The latest matches with `count` following tokens come first, then the
    latest others. `text` may be `token_ids` itself: then the end does not match itself, and a continuation that reaches
    the end of the text repeats, as in a loop.
    """
    ends, matched = _match_ends(token_ids, text, longest=longest)
    if not len(ends) or matched < shortest:
        return []
    has_enough = ends + count < len(text)
    found: dict[bytes, np.ndarray] = {}
    for end in [*ends[has_enough][::-1], *ends[~has_enough][::-1]][:MAX_MATCHES]:
        following = text[end + 1 : end + 1 + count]
        if text is token_ids and len(following):
            following = np.resize(text[end + 1 :], count)
        found.setdefault(following.tobytes(), following)
        if len(found) == width:
            break
    return list(found.values())


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
