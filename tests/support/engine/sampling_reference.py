"""Requests that ask for more than tokens, and what their log-probs have to be, in numpy from logits of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from rayserve_moe.requests.records import GenerationRequest, RoutedExperts, SamplingParams
from tests.support.engine.workload import draw_prompt, request_for

Logits = Callable[[Sequence[int]], np.ndarray]
"""From the ids of a sequence to its logits, float32 [T, V]."""

ENDING = tuple(range(120))
"""So many ids end a choice that it hardly lives without being kept from them; the end of sequence is one."""
BIASES = ((17, 4.0), (99, -50.0), (301, 2.5))
SAMPLED = {"temperature": 1.0, "top_p": 1.0}


def adjusted_requests() -> list[GenerationRequest]:
    """Return requests with every penalty and bias, alone and together, beside requests that adjust nothing."""
    generator = np.random.default_rng(20)
    asked: list[tuple[int, int, dict]] = [
        (5, 0, {"repetition_penalty": 1.7}),
        (40, 3, {"presence_penalty": 1.5, **SAMPLED, "seed": 3}),
        (33, 20, {"frequency_penalty": 0.8, **SAMPLED, "temperature": 0.8, "n": 2, "seed": 4}),
        (90, 5, {"logit_bias": BIASES}),
        (21, 0, {}),
        (64, 1, {"repetition_penalty": 0.8, "presence_penalty": -0.7, "frequency_penalty": 0.3, "logit_bias": BIASES}),
        (12, 2, {**SAMPLED, "seed": 5, "top_k": 30}),
        (35, 0, {"min_new_tokens": 9, "stop_token_ids": ENDING}),
        (50, 4, {"min_new_tokens": 11, "stop_token_ids": ENDING, **SAMPLED, "n": 2, "seed": 6, "logit_bias": BIASES}),
        (
            28,
            0,
            {"allowed_token_ids": (333, 4, 60, 61), **SAMPLED, "temperature": 0.3, "seed": 7, "presence_penalty": 1},
        ),
    ]
    return [
        replace(
            request_for(draw_prompt(generator, length), f"adjusted {i}", max_new_tokens=18, **sampling),
            num_top_logprobs=num_top,
        )
        for i, (length, num_top, sampling) in enumerate(asked)
    ]


def scoring_requests() -> list[GenerationRequest]:
    """Prompts scored from different places on, some of them generated on from, with and without likeliest tokens."""
    generator = np.random.default_rng(30)
    asked = [(70, 0, 0, 0), (45, 17, 4, 3), (100, 63, 0, 20), (33, 32, 2, 1), (2, 0, 5, 0), (64, 31, 6, 0)]
    requests = []
    for i, (length, first, num_new, num_top) in enumerate(asked):
        request = request_for(
            draw_prompt(generator, length), f"scored {i}", max_new_tokens=num_new, n=1 + i % 2, presence_penalty=i % 3
        )
        requests.append(replace(request, score_prompt_from=first, num_top_logprobs=num_top))
    return requests


def other_rows(rows: np.ndarray, *, num_experts: int) -> np.ndarray:
    """Rows of as many different experts, but others."""
    return ((rows.astype(np.int64) + 1 + np.arange(len(rows))[:, None, None] % 3) % num_experts).astype(rows.dtype)


def forcing(request: GenerationRequest, rows: np.ndarray, *, start: int = 0, **changes: object) -> GenerationRequest:
    """Return the request with its prompt's routing forced to `rows` from position `start` on."""
    return replace(request, forced_routing=RoutedExperts(rows, start=start), **changes)


def log_softmax(values: np.ndarray) -> np.ndarray:
    wide = values.astype(np.float64)
    wide = wide - wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def adjusted_by_definition(
    logits: np.ndarray, sampling: SamplingParams, *, prompt: list[int], outputs: list[int]
) -> np.ndarray:
    """Return one row of logits [V], float64, as penalties, biases and withheld ids leave it."""
    wide = logits.astype(np.float64)
    for token_id, value in sampling.logit_bias:
        wide[token_id] += value
    for token_id in {*prompt, *outputs}:
        value = wide[token_id]
        wide[token_id] = value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
    for token_id, count in Counter(outputs).items():
        wide[token_id] -= sampling.frequency_penalty * count + sampling.presence_penalty
    if sampling.allowed_token_ids:
        wide[np.isin(np.arange(len(wide)), sampling.allowed_token_ids, invert=True)] = -np.inf
    if len(outputs) < sampling.min_new_tokens:
        wide[list(sampling.stop_token_ids)] = -np.inf
    return wide


def logprobs_by_definition(request: GenerationRequest, outputs: list[int], logits_of: Logits) -> np.ndarray:
    """Return the log-probs of the whole vocabulary from which each output was chosen, [outputs, V]."""
    prompt, sampling = request.prompt_ids.tolist(), request.sampling
    logits = logits_of([*prompt, *outputs])[len(prompt) - 1 : -1]
    temperature = sampling.temperature or 1.0
    return np.stack(
        [
            log_softmax(adjusted_by_definition(row, sampling, prompt=prompt, outputs=outputs[:i]) / temperature)
            for i, row in enumerate(logits)
        ]
    )
