"""What the devices are told of rows that sequences take: how to sample, and what adjusts their logits."""

from __future__ import annotations

import numpy as np

from rayserve_moe.requests import SamplingParams
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.step_plan import (
    NO_NEW_ROWS,
    NUM_FLOATS,
    NUM_INTEGERS,
    WITHHELD,
    RowAdjustment,
    RowSampling,
)

NO_IDS = np.zeros(0, np.int32)


def row_sampling_of(sequences: list[Sequence]) -> RowSampling:
    """Sampling parameters of sequences that have just taken their rows."""
    if not sequences:
        return NO_NEW_ROWS
    params = [sequence.request.sampling for sequence in sequences]
    floats = [
        (p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params
    ]
    integers = [
        (p.top_k, s.seed, p.first_choice + s.choice_index, _adjusts(p), s.request.num_top_logprobs, _first_end(s))
        for p, s in zip(params, sequences, strict=True)
    ]
    return RowSampling(
        np.asarray([sequence.row for sequence in sequences], np.int32),
        np.asarray(floats, np.float32).reshape(-1, NUM_FLOATS),
        np.asarray(integers, np.uint32).reshape(-1, NUM_INTEGERS),
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
