"""Random requests of every kind, for runs with drafts that must come to what runs without them do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rayserve_moe.requests import GenerationRequest, SamplingParams
from tests.support.checkpoints import CORE_CONFIG
from tests.support.workload import draw_prompt

NUM_STEMS = 3
LONGEST_STEM = 40


def random_requests(seed: int, *, count: int) -> list[GenerationRequest]:
    """Requests that share prompts, greedy and sampled, with penalties, biases, ends, several choices and scores."""
    generator = np.random.default_rng(seed)
    stems = [draw_prompt(generator, int(generator.integers(1, LONGEST_STEM))) for _ in range(NUM_STEMS)]
    return [_random_request(generator, stems, f"{seed}-{i}") for i in range(count)]


def _random_request(generator: np.random.Generator, stems: list[np.ndarray], name: str) -> GenerationRequest:
    tail = draw_prompt(generator, int(generator.integers(1, 30)))
    prompt_ids = np.concatenate([stems[generator.integers(len(stems))], tail])
    request = GenerationRequest(name, prompt_ids, _random_sampling(generator), bool(generator.random() < 0.7))
    if generator.random() < 0.2:
        request = replace(request, num_top_logprobs=int(generator.integers(1, 5)))
    if generator.random() < 0.2:
        request = replace(request, score_prompt_from=int(generator.integers(len(prompt_ids))))
    return replace(request, speculative=bool(generator.random() < 0.9))


def _random_sampling(generator: np.random.Generator) -> SamplingParams:
    def often(share: float) -> bool:
        return bool(generator.random() < share)

    words = CORE_CONFIG.vocab_size
    temperature = float(generator.choice([0.0, 0.0, 0.7, 1.0, 1.5]))
    some_ids = tuple(int(word) for word in generator.integers(0, words, 8))
    return SamplingParams(
        n=int(generator.integers(1, 4)) if often(0.3) else 1,
        max_new_tokens=int(generator.integers(0, 30)),
        temperature=temperature,
        top_p=0.8 if often(0.2) else 1.0,
        top_k=int(generator.integers(2, 50)) if often(0.2) else 0,
        min_p=0.05 if often(0.1) else 0.0,
        seed=int(generator.integers(1 << 32)),
        presence_penalty=float(generator.uniform(-2, 2)) if often(0.2) else 0.0,
        frequency_penalty=float(generator.uniform(-2, 2)) if often(0.3) else 0.0,
        repetition_penalty=float(generator.uniform(0.7, 1.6)) if often(0.2) else 1.0,
        logit_bias=tuple((word, 2.5) for word in sorted(set(some_ids[:3]))) if often(0.3) else (),
        stop_token_ids=tuple(int(word) for word in generator.integers(0, words, 40)) if often(0.4) else (),
        min_new_tokens=int(generator.integers(0, 10)) if often(0.2) else 0,
        ignore_eos=often(0.7),
    )
