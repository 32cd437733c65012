"""Requests of all kinds: short and long prompts, greedy and sampled, one choice and several."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from rayserve_moe.requests.records import GenerationRequest, SamplingParams
from tests.support.models.core import CORE_CONFIG

FIRST_ORDINARY_ID = 3
"""Ids below belong to special tokens."""


def draw_prompt(generator: np.random.Generator, length: int) -> np.ndarray:
    """Random prompt ids, int32 [length]."""
    return generator.integers(FIRST_ORDINARY_ID, CORE_CONFIG.vocab_size, length).astype(np.int32)


def request_for(
    prompt_ids: np.ndarray | list[int],
    request_id: str = "r",
    *,
    return_routed_experts: bool = True,
    **sampling: object,
) -> GenerationRequest:
    """Return a request; greedy and past the end-of-sequence token unless `sampling` says otherwise."""
    params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "seed": 0, **sampling})
    return GenerationRequest(request_id, np.asarray(prompt_ids, np.int32), params, return_routed_experts)


def mixed_workload() -> list[GenerationRequest]:
    """Sixteen requests, ten of them greedy; 19 choices in all."""
    generator = np.random.default_rng(7)
    lengths = [1, 2, 5, 15, 16, 17, 31, 33, 48, 64, 65, 90, 111, 128, 160, 200]
    samplings = [SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True)] * 10
    samplings += [
        SamplingParams(max_new_tokens=24, temperature=1.0, ignore_eos=True, seed=11),
        SamplingParams(max_new_tokens=20, temperature=0.7, top_k=40, ignore_eos=True, seed=12),
        SamplingParams(max_new_tokens=18, temperature=1.3, top_p=0.9, n=2, ignore_eos=True, seed=13),
        SamplingParams(max_new_tokens=16, temperature=1.0, min_p=0.05, n=3, ignore_eos=True, seed=14),
        SamplingParams(max_new_tokens=24, temperature=2.0, top_k=100, top_p=0.95, min_p=0.01, seed=15),
        SamplingParams(max_new_tokens=0, temperature=0.0),
    ]
    order = generator.permutation(len(lengths))
    return [
        GenerationRequest(f"w{i}", draw_prompt(generator, lengths[place]), samplings[i], True)
        for i, place in enumerate(order)
    ]


def engine_arguments(request: GenerationRequest) -> dict:
    """Return the same request as keyword arguments of `Engine.generate`, which refuses an empty list of allowed ids."""
    sampling = asdict(request.sampling)
    return {
        "input_ids": request.prompt_ids.tolist(),
        "sampling_params": {name: value for name, value in sampling.items() if name != "allowed_token_ids" or value},
        "return_routed_experts": request.return_routed_experts,
        "return_logprob": True,
    }
