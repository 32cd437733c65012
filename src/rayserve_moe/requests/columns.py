"""Per-token outputs as columns, each declared here once and carried to the writers in a single dict.

A dict of columns maps names to values with an entry per token. The same dict is in the result of a step, in a running
choice, in its results and in the journal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from rayserve_moe.requests.fields import MAX_LISTED_IDS
from rayserve_moe.requests.records import GenerationRequest

MODEL_WIDTH = -1
_MASK, DRAFTED = "return_sampling_mask", "drafted"
WANTS_MASK, WANTS_COLUMNS = 2, 4
"""Added to the first number of an `evidence_row` that requests a sampling mask, or other evidence."""


@dataclass(frozen=True)
class Ragged:
    """Column with entries of different lengths: entry i has `lengths[i]` consecutive `values`."""

    lengths: np.ndarray
    """int32 [N]."""
    values: np.ndarray
    """[sum of the lengths]."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: slice | np.ndarray) -> Ragged:
        entries = self.entries()[index] if isinstance(index, slice) else _masked(self.entries(), index)
        return ragged(entries, self.values.dtype.type)

    @property
    def size(self) -> int:
        """Return the number of values."""
        return len(self.values)

    def tolist(self) -> list[list]:
        """Return the values of each entry as lists."""
        return [entry.tolist() for entry in self.entries()]

    def entries(self) -> list[np.ndarray]:
        """Return the values of each entry."""
        return np.split(self.values, np.cumsum(self.lengths)[:-1]) if len(self.lengths) else []


Values = np.ndarray | Ragged
Columns = dict[str, Values]


@dataclass(frozen=True)
class OutputColumn:
    """Column over the outputs of a choice."""

    source: Literal["step", "evidence"]
    """Producer: every step, or the program that draws deferred samples with evidence."""
    dtype: type
    width: Callable[[GenerationRequest], int | None]
    """Numbers per output; 0 for a scalar, None if it is not requested."""
    param: str = ""
    """Name in errors of the field that requests a column of evidence."""
    native: str = ""
    """Name in the `meta_info` of native answers; empty if their log-prob entries hold the column."""
    is_ragged: bool = False


@dataclass(frozen=True)
class ProbedColumn:
    """Column over positions that the model reads, computed by a token probe after their step."""

    dtype: type
    span: Callable[[GenerationRequest], tuple[int, int] | None]
    """First and end position in the prompt, or None if it is not requested."""
    width: Callable[[GenerationRequest], int | None]
    """Numbers per position; 0 for a scalar, MODEL_WIDTH if the model decides, None if it is not requested."""


def _flag(name: str) -> Callable[[GenerationRequest], int | None]:
    """Return the width of a column of scalars that a flag of the request wants."""
    return lambda request: 0 if getattr(request, name) else None


def _num_top(request: GenerationRequest) -> int | None:
    return request.num_top_logprobs or None


def _scored(request: GenerationRequest) -> tuple[int, int] | None:
    start = request.score_prompt_from
    return None if start is None else (start, max(start, len(request.prompt_ids) - 1))


def _listed(request: GenerationRequest) -> tuple[int, int] | None:
    listed = request.listed_in_prompt
    return None if listed is None else (listed.start, listed.start + len(listed.ids))


def _num_listed(request: GenerationRequest) -> int | None:
    listed = request.listed_in_prompt
    return None if listed is None else listed.ids.shape[1]


def _layer_states(request: GenerationRequest) -> tuple[int, int] | None:
    return (request.layer_states_start, len(request.prompt_ids)) if request.return_layer_states else None


def _audited(request: GenerationRequest) -> tuple[int, int] | None:
    return (0, len(request.prompt_ids)) if request.is_audited else None


def _shown(request: GenerationRequest) -> tuple[int, int] | None:
    end = len(request.prompt_ids)
    return {"": None, "all": (0, end), "last": (end - 1, end)}[request.return_hidden_states]


OUTPUT_COLUMNS: Mapping[str, OutputColumn] = {
    "top_ids": OutputColumn("step", np.int32, _num_top),
    "top_logprobs": OutputColumn("step", np.float32, _num_top),
    "listed_logprobs": OutputColumn(
        "evidence", np.float32, lambda request: len(request.logprob_token_ids) or None, "logprob_token_ids"
    ),
    "entropy": OutputColumn("evidence", np.float32, _flag("return_entropy"), "return_entropy", "output_token_entropy"),
    DRAFTED: OutputColumn("step", np.int8, _flag("return_draft_tokens"), native="output_token_drafted"),
    "mask_ids": OutputColumn("evidence", np.int32, _flag(_MASK), _MASK, "output_token_sampling_mask", is_ragged=True),
    "mask_logprobs": OutputColumn("evidence", np.float32, _flag(_MASK), _MASK, "output_token_sampling_logprobs"),
}
"""Columns by name: likeliest tokens in descending order with log-probs, log-probs of listed ids, entropy in nats, 1 for
an accepted draft (a column of the commit), sampling mask, and the output's log-prob within the mask."""

PROBED_COLUMNS: Mapping[str, ProbedColumn] = {
    "logprobs": ProbedColumn(np.float32, _scored, lambda _: 0),
    "ranks": ProbedColumn(np.int32, _scored, lambda _: 0),
    "top_ids": ProbedColumn(np.int32, _scored, _num_top),
    "top_logprobs": ProbedColumn(np.float32, _scored, _num_top),
    "listed_logprobs": ProbedColumn(np.float32, _listed, _num_listed),
    "hidden": ProbedColumn(np.float32, _shown, lambda _: MODEL_WIDTH),
    "native_experts": ProbedColumn(np.int32, _audited, lambda _: MODEL_WIDTH),
    "expert_margins": ProbedColumn(np.float32, _audited, lambda _: MODEL_WIDTH),
    "expert_ranks": ProbedColumn(np.int32, _audited, lambda _: MODEL_WIDTH),
    "sketches": ProbedColumn(np.float32, _audited, lambda _: MODEL_WIDTH),
    "layer_states": ProbedColumn(np.float32, _layer_states, lambda _: MODEL_WIDTH),
}
"""Columns by name: log-prob and rank of the prompt's next token, likeliest tokens at its position with log-probs,
log-probs of listed ids, the state after the last layer and its norm, and the columns of an audit: by MoE layer the
router's own choice, its margin and its rank (`experts.native_choice`), and sketches of the residual stream by layer.
The last column has the inputs of the layers that the server shows.

The distribution is the model's own; ranks count from 1, ties to the smaller id.
"""


AUDIT_COLUMNS = frozenset({"native_experts", "expert_margins", "expert_ranks", "sketches"})
STEP_COLUMNS = AUDIT_COLUMNS | {"layer_states"}
"""Columns that a step with prefill blocks computes itself."""


@dataclass(frozen=True)
class PromptColumns:
    """Computed columns over positions of a prompt; the column of hidden states continues over the outputs."""

    columns: Columns = field(default_factory=dict)
    """Columns by name of `PROBED_COLUMNS`."""
    starts: Mapping[str, int] = field(default_factory=dict)
    """First position of each column."""
    weight_version: str = ""
    """Version of the weights that computed all columns."""


def output_widths(request: GenerationRequest) -> dict[str, int]:
    """Return the requested output columns with their numbers per output."""
    widths = {}
    for name, column in OUTPUT_COLUMNS.items():
        if (width := column.width(request)) is not None:
            widths[name] = width
    return widths


def evidence_row(request: GenerationRequest, columns: Iterable[str]) -> np.ndarray | None:
    """Return the input of the evidence program for each sample of a request, int32 [1 + MAX_LISTED_IDS], or None.

    The first number is 1 for the model's own distribution and 0 for the sampled distribution before truncation, plus
    WANTS_MASK and WANTS_COLUMNS; ids follow, padded with -1.
    """
    evidence = {OUTPUT_COLUMNS[name].param for name in columns if OUTPUT_COLUMNS[name].source == "evidence"}
    if not request.raw_logprobs and not evidence:
        return None
    ids, row = request.logprob_token_ids, np.full(1 + MAX_LISTED_IDS, -1, np.int32)
    wants_columns = request.raw_logprobs or bool(evidence - {_MASK})
    first = request.raw_logprobs + WANTS_MASK * request.return_sampling_mask + WANTS_COLUMNS * wants_columns
    row[: 1 + len(ids)] = (first, *ids)
    return row


def wants_mask(rows: Any) -> Any:
    """Return True for each of the `evidence_row`s that requests a sampling mask, numpy or JAX; rows of -1 do not."""
    return (rows[:, 0] >= 0) & (rows[:, 0] & WANTS_MASK > 0)


def ragged(entries: Iterable[np.ndarray], dtype: type = np.int32) -> Ragged:
    """Return entries of different lengths as a column."""
    entries = list(entries)
    return Ragged(np.asarray([len(each) for each in entries], np.int32), np.concatenate([np.zeros(0, dtype), *entries]))


def as_array(values: Values) -> np.ndarray:
    """Return the values of a column that is not ragged."""
    assert not isinstance(values, Ragged), "a ragged column is no array"
    return values


def take(columns: Columns, index: slice | np.ndarray) -> Columns:
    """Return the entries of every column by a slice or a bool mask."""
    return {name: values[index] for name, values in columns.items()}


def concat(parts: Sequence[Columns]) -> Columns:
    """Join the columns of consecutive runs of tokens; a run without a column adds nothing to it."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _concat([part[name] for part in parts if name in part]) for name in names}


def names_in(bits: int, *, source: str) -> tuple[str, ...]:
    """Return the names of the columns from a source whose bit in `ColumnLog.bits` is set."""
    columns = enumerate(OUTPUT_COLUMNS.items())
    return tuple(name for index, (name, column) in columns if bits >> index & 1 and column.source == source)


class ColumnLog:
    """Output columns of a running choice, which grow by an entry per output."""

    def __init__(self, widths: Mapping[str, int]) -> None:
        self._widths, self.bits = widths, 0
        """Bit i is set if the choice has column i of `OUTPUT_COLUMNS`."""
        self._entries: dict[str, list[np.ndarray]] = {}
        for index, name in enumerate(OUTPUT_COLUMNS):
            if name in widths:
                self.bits |= 1 << index
                self._entries[name] = []

    def __len__(self) -> int:
        return len(next(iter(self._entries.values()), ()))

    def append(self, entries: Mapping[str, Sequence[np.ndarray] | np.ndarray], index: int) -> None:
        """Append entry `index` of a step's columns, for the requested columns."""
        for name, width in self._widths.items():
            if name in entries:
                entry = entries[name][index]
                self._entries[name].append(entry[:width] if width else entry)

    def extend(self, columns: Columns) -> None:
        """Append all entries of `columns`."""
        for name, values in columns.items():
            self._entries[name] += values.entries() if isinstance(values, Ragged) else list(values)

    def slice(self, first: int, stop: int) -> Columns:
        """Return the columns of outputs `first` to `stop`."""
        found: Columns = {}
        for name, width in self._widths.items():
            column, entries = OUTPUT_COLUMNS[name], self._entries[name][first:stop]
            if column.is_ragged:
                found[name] = ragged(entries, column.dtype)
            else:
                shape = (len(entries), width) if width else (len(entries),)
                found[name] = np.asarray(entries, column.dtype).reshape(shape)
        return found


def _masked(entries: list[np.ndarray], is_kept: np.ndarray) -> list[np.ndarray]:
    return [entry for entry, keeps in zip(entries, is_kept.tolist(), strict=True) if keeps]


def _concat(parts: list[Values]) -> Values:
    several = [part for part in parts if isinstance(part, Ragged)]
    if several:
        return Ragged(
            np.concatenate([part.lengths for part in several]), np.concatenate([part.values for part in several])
        )
    return np.concatenate([as_array(part) for part in parts])
