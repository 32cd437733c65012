"""What is looked at of the tokens that steps compute: hidden states, and log-probs of ids that are listed for a prompt.

A token that is looked at is computed even where its keys are cached; what was found of it outlives a preemption.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rayserve_moe.requests.records import GenerationRequest

NO_STATES = np.zeros((0, 0), np.float32)


@dataclass(frozen=True)
class TokenInspection:
    """Tokens that are looked at, by their places in the plan, intp [P], and ids whose log-probs after each are wanted,
    int32 [P, L], -1 for none."""

    tokens: np.ndarray
    listed: np.ndarray


def inspection_for(request: GenerationRequest) -> PromptInspection | None:
    """An inspection of what a request wants of its prompt; None where that is nothing."""
    wants_any = request.return_hidden_states or request.listed_in_prompt is not None
    return PromptInspection(request) if wants_any else None


class PromptInspection:
    """What was found so far at positions of a prompt, shared by the choices of its request.

    `frontier` is the first position that still has to be computed for it: a cached prefix may reach up to it.
    """

    def __init__(self, request: GenerationRequest) -> None:
        prompt_len, listed = len(request.prompt_ids), request.listed_in_prompt
        wanted = [(listed.start, listed.start + len(listed.ids))] if listed is not None else []
        if request.return_hidden_states:  # the last of the two
            wanted.append((0 if request.return_hidden_states == "all" else prompt_len - 1, prompt_len))
        assert wanted, "nothing is to be looked at"
        self._first, self._end = min(first for first, _ in wanted), max(end for _, end in wanted)
        self._shown_from = wanted[-1][0]
        self._request = request
        self._is_found = np.zeros(self._end - self._first, np.bool_)
        self._hidden = self._listed = NO_STATES

    @property
    def is_complete(self) -> bool:
        return bool(self._is_found.all())

    @property
    def frontier(self) -> int:
        return self._end if self.is_complete else self._first + int(np.argmin(self._is_found))

    def wanted(self, start: int, stop: int) -> tuple[int, int]:
        """The positions, of those in `[start, stop)`, that are to be looked at."""
        return max(start, self.frontier), min(stop, self._end)

    def ids_at(self, first: int, last: int) -> np.ndarray:
        """The ids that are listed for positions `[first, last)`, int32 [N, L]."""
        listed = self._request.listed_in_prompt
        if listed is None:
            return np.zeros((last - first, 0), np.int32)
        ids = np.full((last - first, listed.ids.shape[1]), -1, np.int32)
        from_, to = max(first, listed.start), min(last, listed.start + len(listed.ids))
        if from_ < to:
            ids[from_ - first : to - first] = listed.ids[from_ - listed.start : to - listed.start]
        return ids

    def take(self, first: int, hidden: np.ndarray, *, listed: np.ndarray) -> None:
        """Store what was found at positions `first ...`: states [N, D], and log-probs [N, L or more]."""
        places, count = slice(first - self._first, first - self._first + len(hidden)), len(self._is_found)
        if self._request.return_hidden_states:
            self._hidden = self._hidden if len(self._hidden) else np.zeros((count, hidden.shape[1]), np.float32)
            self._hidden[places] = hidden
        if (asked := self._request.listed_in_prompt) is not None:
            num_ids = asked.ids.shape[1]
            self._listed = self._listed if len(self._listed) else np.zeros((count, num_ids), np.float32)
            self._listed[places] = listed[:, :num_ids]
        self._is_found[places] = True

    def states(self) -> np.ndarray:
        """The states that are wanted, float32 [N, D], up to the first that was not found."""
        return self._hidden[self._shown_from - self._first : self.frontier - self._first]

    def listed_logprobs(self) -> np.ndarray | None:
        """The log-probs that are wanted, float32 [N, L], up to the first that was not found; None where none are."""
        if (asked := self._request.listed_in_prompt) is None:
            return None
        first, end = asked.start - self._first, min(self.frontier, asked.start + len(asked.ids)) - self._first
        return self._listed[first : max(first, end)].reshape(-1, asked.ids.shape[1])

    def change_weights(self, _: str) -> None:
        """Discard what was found on a change of weights, unless all is."""
        if not self.is_complete:
            self._is_found[:] = False
