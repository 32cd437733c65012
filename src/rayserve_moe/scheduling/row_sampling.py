"""What plans carry for rows that sequences take: how to sample, and what adjusts their logits."""

from __future__ import annotations

import numpy as np

from rayserve_moe.requests import SamplingParams
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.step_plan import (
    NO_NEW_ROWS,
    WITHHELD,
    RowAdjustment,
    RowFloats,
    RowIntegers,
    RowSampling,
)

NO_IDS = np.zeros(0, np.int32)


def row_sampling_of(sequences: list[Sequence]) -> RowSampling:
    """Sampling parameters of sequences that have just taken their rows."""
    if not sequences:
        return NO_NEW_ROWS
    floats = [[getattr(s.request.sampling, name) for name in RowFloats._fields] for s in sequences]
    return RowSampling(
        np.asarray([sequence.row for sequence in sequences], np.int32),
        np.asarray(floats, np.float32),
        np.asarray([_integers_of(sequence) for sequence in sequences], np.uint32),
    )


def _integers_of(sequence: Sequence) -> RowIntegers:
    params = sequence.request.sampling
    return RowIntegers(
        top_k=params.top_k,
        seed=sequence.seed,
        choice=params.first_choice + sequence.choice_index,
        adjusts=_adjusts(params),
        num_top=sequence.num_top,
        first_end=_first_end(sequence),
    )


def adjustments_of(sequences: list[Sequence]) -> tuple[RowAdjustment, ...]:
    """What the logits of those are adjusted by whose requests ask for it: all known tokens count as seen."""
    return tuple(_adjustment(s) for s in sequences if _adjusts(s.request.sampling) or _first_end(s))


def _adjustment(sequence: Sequence) -> RowAdjustment:
    sampling, num_prompt = sequence.request.sampling, sequence.num_prompt_tokens
    counts = _penalizes(sampling)
    withheld = [(token_id, WITHHELD) for token_id in sorted(sequence.withheld_ids if _first_end(sequence) else ())]
    biases = [*sampling.logit_bias, *withheld]
    return RowAdjustment(
        sequence.row,
        prompt_ids=sequence.tokens(0, num_prompt).copy() if counts else NO_IDS,
        output_ids=sequence.tokens(num_prompt, sequence.num_tokens).copy() if counts else NO_IDS,
        bias_ids=np.asarray([token_id for token_id, _ in biases], np.int32),
        bias_values=np.asarray([value for _, value in biases], np.float32),
    )


def _first_end(sequence: Sequence) -> int:
    """First position where withheld ids may stand; 0 where nothing is withheld any more."""
    position = sequence.num_prompt_tokens + sequence.request.sampling.min_new_tokens
    return position if sequence.withheld_ids and sequence.num_tokens < position else 0


def _adjusts(params: SamplingParams) -> bool:
    return _penalizes(params) or len(params.logit_bias) > 0


def _penalizes(params: SamplingParams) -> bool:
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)
