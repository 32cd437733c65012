"""Builder of a step's plan for all hosts from the steps of the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rayserve_moe.requests.columns import names_in
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.records import SamplingParams
from rayserve_moe.scheduling.chunk_demands import block_work_of
from rayserve_moe.scheduling.rank_step import ChunkRun, RankStep
from rayserve_moe.scheduling.row_table import RowTable
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.step_plan import (
    ALLOWED,
    AWAITED,
    NO_BLOCK_WORK,
    NO_CHUNKS,
    NO_NEW_ROWS,
    NO_PAGE_CHANGES,
    WITHHELD,
    Chunks,
    PageTableChanges,
    RowAdjustment,
    RowFloats,
    RowIntegers,
    RowSampling,
    StepPlan,
)
from rayserve_moe.scheduling.token_probe import NO_ID, ProbedTokens, TokenProbe, join_probes

NO_RUN = ChunkRun(
    NO_CHUNKS.rows,
    NO_CHUNKS.starts,
    lengths=NO_CHUNKS.lengths,
    token_ids=NO_CHUNKS.token_ids,
    samples=NO_CHUNKS.samples,
)


Ending = tuple[Sequence, FinishReason]
"""A sequence that ends, and its finish reason."""


class Probed(NamedTuple):
    """Tokens of a sequence that a step probes."""

    sequence: Sequence
    generation: int
    """Generation of its row."""
    position: int
    """Position of the first token."""
    count: int


@dataclass(frozen=True)
class Schedule:
    """Plan of a step, with the records needed to commit its result."""

    plan: StepPlan
    sampling_rows: np.ndarray
    """Rows of the chunks that sample, intp [S]."""
    sampling_generations: np.ndarray
    """Generations of those rows, [S]."""
    num_departures: int
    """Number of sequences that had left a row when the step was planned."""
    completed: tuple[tuple[Sequence, int], ...] = ()
    """Sequences whose last known token is computed by a longer chunk of this step, with the generation of their row."""
    probed: tuple[Probed, ...] = ()
    """Sequences with tokens to probe, in the order of the plan."""
    is_awaited: bool = False
    """True if start positions of some chunks are only known to the devices, because drafts have not come back."""
    verifies: bool = False
    """True if some chunks are drafts or awaited, so that samples may be rejected (`samples_that_count`)."""
    endings: tuple[Ending, ...] = ()
    """Sequences that end before the step is submitted, because no token may follow."""


def empty_schedule(plan: StepPlan) -> Schedule:
    """Return the schedule of a plan that computes nothing."""
    return Schedule(plan, NO_CHUNKS.rows, NO_CHUNKS.rows, 0)


def build_schedule(
    step_id: int, steps: list[RankStep], *, table: RowTable, captures_all: bool, max_drafts: int = 0
) -> Schedule:
    """Join the steps of all ranks, in rank order.

    The plan requests routing if a sequence of it does, or if `captures_all`.
    """
    whole, *others = steps
    for other in others:
        whole.extend(other)
    runs = whole.runs
    chunks = _joined(runs)
    rows, samples = chunks.rows, chunks.samples
    sampling_rows = rows if np.count_nonzero(samples) == len(rows) else rows[samples]
    work = NO_BLOCK_WORK
    if whole.has_demands:
        work = block_work_of([(run.demand, run.rows, run.token_ids) for run in runs])
    wants = table.wants
    wants_routing = captures_all or (wants.num_with_routing > 0 and bool(wants.routing[rows].any()))
    probe, probed = _probe(table, chunks) if wants.num_probed else (None, ())
    plan = StepPlan(
        step_id=step_id,
        chunks=Chunks(
            rows,
            starts=chunks.starts,
            lengths=chunks.lengths,
            token_ids=chunks.token_ids,
            samples=samples,
            num_forks=whole.num_forks,
            max_drafts=max_drafts,
        ),
        pages=_pages(whole.pages),
        sampling=row_sampling_of(whole.new_sequences),
        wants_routing=wants_routing and len(rows) > 0,
        adjustments=adjustments_of(whole.new_sequences),
        block_work=work,
        columns=_columns(table, sampling_rows) if wants.num_with_columns else (),
        holds_samples=wants.num_held > 0 and bool(wants.are_held[sampling_rows].any()),
        probe=probe,
    )
    return Schedule(
        plan,
        sampling_rows,
        sampling_generations=table.generations[sampling_rows],
        num_departures=table.num_departures,
        completed=tuple(whole.completed),
        probed=probed,
        is_awaited=whole.verifies and bool((chunks.starts <= AWAITED).any()),
        verifies=whole.verifies,
    )


def _joined(runs: list[ChunkRun]) -> ChunkRun:
    """Return the chunks of all runs as one run, without demands."""
    if len(runs) <= 1:
        return runs[0] if runs else NO_RUN
    rows, starts, lengths, token_ids, samples, *_ = zip(NO_RUN, *runs, strict=True)
    return ChunkRun(
        np.concatenate(rows),
        np.concatenate(starts),
        lengths=np.concatenate(lengths),
        token_ids=np.concatenate(token_ids),
        samples=np.concatenate(samples),
    )


def _pages(changes: list[PageTableChanges]) -> PageTableChanges:
    if len(changes) <= 1:
        return changes[0] if changes else NO_PAGE_CHANGES
    return PageTableChanges(
        np.concatenate([change.rows for change in changes]),
        np.concatenate([change.indices for change in changes]),
        np.concatenate([change.page_ids for change in changes]),
    )


def _columns(table: RowTable, rows: np.ndarray) -> tuple[str, ...]:
    """Return the columns that the samples of `rows` want and that every step computes."""
    return names_in(int(np.bitwise_or.reduce(table.wants.columns[rows], initial=0)), source="step")


def _probe(table: RowTable, chunks: ChunkRun) -> tuple[TokenProbe | None, tuple[Probed, ...]]:
    """Return the probe of a plan with these chunks, and its sequences."""
    rows, starts, lengths = chunks.rows, chunks.starts, chunks.lengths
    firsts, parts, probed = np.cumsum(lengths) - lengths, [], []
    columns: dict[str, None] = {}
    num_top = 0
    for chunk in np.flatnonzero(table.wants.are_probed[rows]).tolist():
        sequence, start = table.sequences[rows[chunk]], int(starts[chunk])
        assert sequence is not None, "a chunk belongs to a sequence"
        assert sequence.evidence.probe is not None, "the sequence is probed"
        for tokens in _pending(sequence, start, start + int(lengths[chunk])):
            parts.append((int(firsts[chunk]) - start + tokens.position, tokens))
            generation = int(table.generations[rows[chunk]])
            probed.append(Probed(sequence, generation, tokens.position, len(tokens.targets)))
            columns |= dict.fromkeys(sequence.evidence.probe.columns)
            num_top = max(num_top, sequence.request.num_top_logprobs)
    if not parts:
        return None, ()
    return join_probes(parts, columns=tuple(columns), num_top=num_top), tuple(probed)


def _pending(sequence: Sequence, start: int, stop: int) -> Iterator[ProbedTokens]:
    """Yield the tokens at positions `[start, stop)` to be probed: prompt tokens, then outputs (hidden states)."""
    evidence, num_prompt_tokens = sequence.evidence, sequence.num_prompt_tokens
    probe = evidence.probe
    assert probe is not None, "the sequence is probed"
    if (of_prompt := probe.pending(start, min(stop, num_prompt_tokens))) is not None:
        yield of_prompt
    first = max(start, num_prompt_tokens + len(evidence.output_states))
    if probe.wants_hidden and first < stop:
        yield ProbedTokens(first, np.full(stop - first, NO_ID, np.int32), np.zeros((stop - first, 0), np.int32))


NO_IDS = np.zeros(0, np.int32)


def row_sampling_of(sequences: list[Sequence]) -> RowSampling:
    """Return the sampling parameters of sequences that have just taken their rows."""
    if not sequences:
        return NO_NEW_ROWS
    floats = [[getattr(s.request.sampling, name) for name in RowFloats._fields] for s in sequences]
    return RowSampling(
        np.asarray([sequence.row for sequence in sequences], np.int32),
        np.asarray(floats, np.float32),
        np.asarray([[integer(sequence) for integer in _INTEGERS] for sequence in sequences], np.uint32),
    )


def adjustments_of(sequences: list[Sequence]) -> tuple[RowAdjustment, ...]:
    """Return the logit adjustments of the sequences that request some; all known tokens count as seen."""
    return tuple(_adjustment(s) for s in sequences if _adjusts(s.request.sampling) or _first_end(s))


def _adjustment(sequence: Sequence) -> RowAdjustment:
    sampling, num_prompt = sequence.request.sampling, sequence.num_prompt_tokens
    counts = _penalizes(sampling)
    withheld_ids = sequence.rules.withheld_ids if _first_end(sequence) else ()
    withheld = [(token_id, WITHHELD) for token_id in sorted(withheld_ids)]
    allowed = [(token_id, ALLOWED) for token_id in sorted(set(sampling.allowed_token_ids))]
    biases = [*allowed, *sampling.logit_bias, *withheld]
    return RowAdjustment(
        sequence.row,
        prompt_ids=sequence.token_ids[:num_prompt].copy() if counts else NO_IDS,
        output_ids=sequence.token_ids[num_prompt : sequence.num_tokens].copy() if counts else NO_IDS,
        bias_ids=np.asarray([token_id for token_id, _ in biases], np.int32),
        bias_values=np.asarray([value for _, value in biases], np.float32),
    )


def _first_end(sequence: Sequence) -> int:
    """Return the first position at which withheld ids may be sampled; 0 if none are withheld."""
    position = sequence.num_prompt_tokens + sequence.request.sampling.min_new_tokens
    return position if sequence.rules.withheld_ids and sequence.num_tokens < position else 0


def _adjusts(params: SamplingParams) -> bool:
    return _penalizes(params) or len(params.logit_bias) + len(params.allowed_token_ids) > 0


def _penalizes(params: SamplingParams) -> bool:
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)


_INTEGERS = RowIntegers(
    top_k=lambda sequence: sequence.request.sampling.top_k,
    seed=lambda sequence: sequence.seed,
    choice=lambda sequence: sequence.request.sampling.first_choice + sequence.choice_index,
    adjusts=lambda sequence: _adjusts(sequence.request.sampling),
    num_top=lambda sequence: sequence.request.num_top_logprobs,
    first_end=_first_end,
)
"""Values of the integer columns, from a sequence."""
