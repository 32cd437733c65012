"""Token probe: tokens of a step whose logits or hidden states are returned, and the results for a prompt.

A probed token is computed even if its keys are cached. Its results survive a preemption.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rayserve_moe.requests.columns import PROBED_COLUMNS, Columns, PromptColumns, Ragged, Values, concat
from rayserve_moe.requests.fields import MAX_LISTED_IDS
from rayserve_moe.requests.records import GenerationRequest

IS_FINITE = "is_finite"
"""Column of every probe: bool, False for a token whose state or logits are not finite."""
NO_ID = -1


@dataclass(frozen=True)
class TokenProbe:
    """Tokens of a plan that are probed after its step."""

    tokens: np.ndarray
    """Indices in the plan, intp [P]."""
    targets: np.ndarray
    """Token after each whose log-prob is requested, int32 [P]; -1 for none."""
    listed: np.ndarray
    """Ids whose log-probs are requested, int32 [P, L]; -1 for none."""
    num_top: int = 0
    """Number of most likely tokens requested."""
    columns: tuple[str, ...] = ()
    """Names of `PROBED_COLUMNS` that are requested for some token."""


class ProbedTokens(NamedTuple):
    """Probed tokens of one sequence at consecutive positions."""

    position: int
    """Position of the first."""
    targets: np.ndarray
    listed: np.ndarray

    @property
    def end(self) -> int:
        """Return the position after the last."""
        return self.position + len(self.targets)


def probe_for(request: GenerationRequest, weight_version: str) -> PromptProbe | None:
    """Return the probe of a request's prompt, or None if the request needs none."""
    spans = {}
    for name, column in PROBED_COLUMNS.items():
        if (span := column.span(request)) is not None and column.width(request) is not None:
            spans[name] = span
    return PromptProbe(request, spans, weight_version=weight_version) if spans else None


class PromptProbe:
    """Results at positions of a prompt, shared by the choices of its request and all of the same weights."""

    def __init__(
        self, request: GenerationRequest, spans: dict[str, tuple[int, int]], *, weight_version: str = ""
    ) -> None:
        self.request = request
        self.weight_version = weight_version
        self.wants_hidden = "hidden" in spans
        self._prompt_ids = np.asarray(request.prompt_ids, np.int32)
        self._spans = spans
        self._first, self._end = min(first for first, _ in spans.values()), max(end for _, end in spans.values())
        self._is_found = np.zeros(self._end - self._first, np.bool_)
        self._columns: dict[str, np.ndarray] = {}

    @property
    def is_complete(self) -> bool:
        return bool(self._is_found.all())

    @property
    def frontier(self) -> int:
        """Return the first position that the probe still needs; a cached prefix may extend up to it."""
        return self._end if self.is_complete else self._first + int(np.argmin(self._is_found))

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the names of the requested columns."""
        return tuple(self._spans)

    def pending(self, start: int, stop: int) -> ProbedTokens | None:
        """Return the tokens at positions `[start, stop)` that are still to be probed, or None."""
        first, last = max(start, self.frontier), min(stop, self._end)
        if first >= last:
            return None
        return ProbedTokens(first, self._targets(first, last), self._listed(first, last))

    def needs_block(self, start: int, stop: int) -> bool:
        """Return True if a chunk over `[start, stop)` must occupy prefill blocks, whose hidden states are available.

        A probe for hidden states alone needs no blocks: servers that return hidden states return them for single tokens
        too.
        """
        spans = [span for name, span in self._spans.items() if name != "hidden"]
        if not spans:
            return False
        first, end = min(first for first, _ in spans), max(end for _, end in spans)
        return max(start, self.frontier, first) < min(stop, end)

    def take(self, position: int, found: Columns) -> None:
        """Store the results at consecutive positions from `position` on."""
        for name in self._spans:
            values = found[name]
            assert not isinstance(values, Ragged), "probed columns have one width"
            width = PROBED_COLUMNS[name].width(self.request) or 0
            values = values[:, :width] if width > 0 else values
            if name not in self._columns:
                self._columns[name] = np.zeros((len(self._is_found), *values.shape[1:]), PROBED_COLUMNS[name].dtype)
            self._columns[name][self._places(position, len(values))] = values
        self._is_found[self._places(position, len(found[IS_FINITE]))] = True

    def result(self, states: Values | None = None) -> PromptColumns:
        """Return all columns up to the first position without a result; `states` of outputs follow the prompt's."""
        columns: Columns = {}
        for name, (first, end) in self._spans.items():
            end = max(first, min(end, self.frontier))
            column = PROBED_COLUMNS[name]
            width = column.width(self.request)
            empty = np.zeros((0, max(width, 0)) if width else 0, column.dtype)
            columns[name] = self._columns.get(name, empty)[first - self._first : end - self._first].copy()
        if states is not None and "hidden" in columns and len(columns["hidden"]):
            columns = columns | concat([{"hidden": columns["hidden"]}, {"hidden": states}])
        return PromptColumns(columns, {name: first for name, (first, _) in self._spans.items()}, self.weight_version)

    def change_weights(self, weight_version: str) -> None:
        """Discard incomplete results after a change of weights."""
        if not self.is_complete:
            self._is_found[:] = False
            self.weight_version = weight_version

    def _places(self, position: int, count: int) -> slice:
        return slice(position - self._first, position - self._first + count)

    def _targets(self, first: int, last: int) -> np.ndarray:
        targets = np.full(last - first, NO_ID, np.int32)
        if "logprobs" in self._spans:
            start, end = max(first, self._spans["logprobs"][0]), min(last, self._spans["logprobs"][1])
            targets[start - first : max(start, end) - first] = self._prompt_ids[start + 1 : max(start, end) + 1]
        return targets

    def _listed(self, first: int, last: int) -> np.ndarray:
        listed = self.request.listed_in_prompt
        if listed is None:
            return np.zeros((last - first, 0), np.int32)
        ids = np.full((last - first, listed.ids.shape[1]), NO_ID, np.int32)
        start, end = max(first, listed.start), min(last, listed.start + len(listed.ids))
        if start < end:
            ids[start - first : end - first] = listed.ids[start - listed.start : end - listed.start]
        return ids


def join_probes(parts: list[tuple[int, ProbedTokens]], *, columns: tuple[str, ...], num_top: int) -> TokenProbe:
    """Return the probe of a plan; each part comes with the index of its first token in the plan."""
    indices = [first + np.arange(len(tokens.targets)) for first, tokens in parts]
    width = max(tokens.listed.shape[1] for _, tokens in parts)
    assert width <= MAX_LISTED_IDS, "the devices take fewer listed ids"
    listed = [
        np.pad(tokens.listed, ((0, 0), (0, width - tokens.listed.shape[1])), constant_values=NO_ID)
        for _, tokens in parts
    ]
    targets = [tokens.targets for _, tokens in parts]
    return TokenProbe(np.concatenate(indices), np.concatenate(targets), np.concatenate(listed), num_top, columns)


def runs_of(counts: list[int]) -> Iterator[slice]:
    """Yield the slices of consecutive runs with these lengths."""
    end = 0
    for count in counts:
        yield slice(end, end + count)
        end += count
