"""Which tokens of a step are looked at, and whose they are."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from typing import NamedTuple

import numpy as np

from rayserve_moe.requests.fields import MAX_LISTED_IDS
from rayserve_moe.scheduling.inspection import TokenInspection
from rayserve_moe.scheduling.row_table import RowTable
from rayserve_moe.scheduling.sequence import NO_ROW, Sequence
from rayserve_moe.scheduling.step_plan import StepResult


class Inspected(NamedTuple):
    """`count` tokens of a sequence from `position` on, and the generation of its row."""

    sequence: Sequence
    generation: int
    position: int
    count: int


def inspection_of(
    table: RowTable, rows: np.ndarray, *, starts: np.ndarray, lengths: np.ndarray
) -> tuple[TokenInspection | None, tuple[Inspected, ...]]:
    """The tokens of chunks that are looked at, and whose they are, in the order of the plan."""
    if not table.num_inspected:
        return None, ()
    firsts, tokens, listed, found = np.cumsum(lengths) - lengths, [], [], []
    for chunk in np.flatnonzero(table.are_inspected[rows]).tolist():
        sequence, start = table.sequences[rows[chunk]], int(starts[chunk])
        assert sequence is not None and sequence.inspection is not None, "a chunk belongs to a sequence"
        for first, last in _wanted(sequence, start, start + int(lengths[chunk])):
            tokens.append(firsts[chunk] - start + np.arange(first, last))
            listed.append(sequence.inspection.ids_at(first, last))
            found.append(Inspected(sequence, int(table.generations[rows[chunk]]), first, last - first))
    if not found:
        return None, ()
    return TokenInspection(np.concatenate(tokens), _stacked(listed)), tuple(found)


def commit_inspections(table: RowTable, inspected: tuple[Inspected, ...], *, result: StepResult) -> Iterator[int]:
    """Store what was found at the tokens of a step; yields the rows of sequences with states that are not finite."""
    end = 0
    for sequence, generation, position, count in inspected:
        assert result.hidden is not None and result.listed is not None, "tokens were looked at"
        part, end = slice(end, end + count), end + count
        hidden, listed = result.hidden[part], result.listed[part]
        is_own = sequence.row != NO_ROW and table.generations[sequence.row] == generation
        if not np.isfinite(hidden).all():
            if is_own:
                yield sequence.row
        elif position < sequence.num_prompt_tokens:
            assert sequence.inspection is not None, "the prompt was looked at"
            sequence.inspection.take(position, hidden, listed=listed)
        elif is_own:
            sequence.hidden_of_outputs += list(hidden)


def _wanted(sequence: Sequence, start: int, stop: int) -> Iterator[tuple[int, int]]:
    inspection, num_prompt = sequence.inspection, sequence.num_prompt_tokens
    assert inspection is not None, "the sequence is looked at"
    ranges = [inspection.wanted(start, min(stop, num_prompt))]
    if sequence.request.return_hidden_states:
        ranges.append((max(start, num_prompt + len(sequence.hidden_of_outputs)), stop))
    yield from (found for found in ranges if found[0] < found[1])


def _stacked(listed: Rows[np.ndarray]) -> np.ndarray:
    """Lists of ids one after the other, as wide as the widest."""
    width = max(ids.shape[1] for ids in listed)
    assert width <= MAX_LISTED_IDS, "more ids are listed than the devices take"
    return np.concatenate([np.pad(ids, ((0, 0), (0, width - ids.shape[1])), constant_values=-1) for ids in listed])
