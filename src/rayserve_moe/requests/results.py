"""Results of choices, their drafts and their routing, in token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rayserve_moe.requests.columns import Columns, PromptColumns, concat
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.records import RoutedExperts
from rayserve_moe.requests.row_parts import joined_parts


class DraftCounts(NamedTuple):
    """Draft tokens of a choice."""

    chains: int = 0
    """Number of verifications."""
    drafted: int = 0
    """Draft tokens that were verified."""
    accepted: int = 0
    """Draft tokens that were accepted."""


@dataclass
class ChoiceResult:
    """Output of a choice: since its last update or, for accumulated updates, from its start.

    The text layer adds `text` and cuts everything at the first stop string.
    """

    request_id: str = ""
    choice_index: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Log-prob of each output."""
    ranks: list[int] = field(default_factory=list)
    """Rank of each output among all tokens; 1 is the likeliest."""
    columns: Columns = field(default_factory=dict)
    """Other requested columns of the outputs, by name of `OUTPUT_COLUMNS`."""
    finish: FinishReason | None = None
    """Finish reason; set in the last update."""
    text: str = ""
    routing: RoutedExperts | None = None
    """Routing; set in the last update. If streamed, it is set in every update and starts at the end of the previous
    update."""
    prompt: PromptColumns | None = None
    """Requested columns of the prompt; set in the last update."""
    num_cached_tokens: int = 0
    weight_versions: tuple[tuple[int, str], ...] = ()
    """Pairs of a position and the weights that sampled the outputs from that position, for the whole choice so far."""
    drafts: DraftCounts = field(default_factory=DraftCounts)
    """Drafts of the whole choice so far."""

    def add(self, update: ChoiceResult) -> None:
        """Append the next update of this choice."""
        self.text += update.text
        self.token_ids += update.token_ids
        self.logprobs += update.logprobs
        self.ranks += update.ranks
        if update.columns:
            self.columns = concat([self.columns, update.columns])
        self.finish = update.finish or self.finish
        if update.routing is not None:
            self.routing = joined_routing([self.routing, update.routing])
        self.prompt = update.prompt or self.prompt
        self.weight_versions = update.weight_versions or self.weight_versions
        self.num_cached_tokens = max(self.num_cached_tokens, update.num_cached_tokens)
        self.drafts = max(self.drafts, update.drafts)


def joined_routing(pieces: Sequence[RoutedExperts | None]) -> RoutedExperts | None:
    """Join pieces of routing that each start at the end of the piece before, without None; None without any.

    A piece without rows may start anywhere: it remains of tokens beyond a stop string.
    """
    known = [piece for piece in pieces if piece is not None]
    several = [piece for piece in known if len(piece.rows)] or known[:1]
    if len(several) < 2:
        return several[0] if several else None
    ends = [piece.start + len(piece.rows) for piece in several]
    assert [piece.start for piece in several[1:]] == ends[:-1], "a piece of routing does not follow the one before"
    return RoutedExperts(
        rows=np.concatenate([piece.rows for piece in several]),
        start=several[0].start,
        missing=joined_ranges(tuple(each for piece in several for each in piece.missing)),
        source=joined_ranges(tuple(each for piece in several for each in piece.source)),
        weight_version=joined_ranges(tuple(each for piece in several for each in piece.weight_version)),
        parts=joined_parts(several),
    )


def joined_ranges(ranges: tuple) -> tuple:
    """Merge adjacent ranges `(from, to, *label)`, in ascending order, with the same label."""
    joined: list[tuple] = []
    for first, last, *label in ranges:
        if joined and joined[-1][1:] == (first, *label):
            first = joined.pop()[0]
        joined.append((first, last, *label))
    return tuple(joined)
