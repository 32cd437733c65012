"""After warming up nothing is compiled any more, whatever is asked for."""

from __future__ import annotations

import numpy as np
import pytest

from rayserve_moe import Engine
from rayserve_moe.answers.streams import GenerationStream
from rayserve_moe.requests.records import GenerationRequest, RoutedExperts, SamplingParams
from tests.support.engine.workload import draw_prompt
from tests.support.models.core import CORE_CONFIG

COMMON = draw_prompt(np.random.default_rng(1), 200)
"""How many of the prompts begin."""


def random_rows(generator: np.random.Generator, num_rows: int) -> np.ndarray:
    """Routing rows of two different experts in each of two layers."""
    first = generator.integers(0, CORE_CONFIG.num_experts, (num_rows, 2))
    second = (first + generator.integers(1, CORE_CONFIG.num_experts, (num_rows, 2))) % CORE_CONFIG.num_experts
    return np.stack([first, second], axis=-1)


def random_request(generator: np.random.Generator, number: int) -> GenerationRequest:
    sampling = SamplingParams(
        max_new_tokens=int(generator.integers(0, 24)),
        temperature=float(generator.choice([0.0, 0.7, 1.0])),
        top_k=int(generator.choice([0, 1, 20])),
        top_p=float(generator.choice([1.0, 0.9])),
        min_p=float(generator.choice([0.0, 0.05])),
        ignore_eos=bool(generator.integers(2)),
        stop_token_ids=tuple(generator.integers(3, 512, generator.integers(3)).tolist()),
        n=int(generator.integers(1, 5)),
        seed=int(generator.integers(100)) if generator.integers(2) else None,
        repetition_penalty=float(generator.choice([1.0, 1.0, 1.2])),
        presence_penalty=float(generator.choice([0.0, 0.0, 0.5])),
        frequency_penalty=float(generator.choice([0.0, 0.0, -0.5])),
        logit_bias=((5, 1.5), (300, -3.0)) if generator.random() < 0.2 else (),
    )
    prompt = draw_prompt(generator, int(generator.integers(1, 201)))
    num_common = int(generator.choice([0, 0, 40, len(prompt)]))
    prompt[:num_common] = COMMON[: len(prompt)][:num_common]
    start = int(generator.integers(0, len(prompt)))
    forced = RoutedExperts(random_rows(generator, len(prompt) - start), start=start)
    return GenerationRequest(
        f"random {number}",
        prompt,
        sampling,
        bool(generator.integers(2)),
        num_top_logprobs=int(generator.choice([0, 0, 1, 20])),
        score_prompt_from=int(generator.integers(0, len(prompt))) if generator.random() < 0.3 else None,
        forced_routing=forced if generator.random() < 0.2 else None,
        stream_routed_experts=bool(generator.integers(2)),
    )


@pytest.mark.parametrize("num_requests", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_nothing_is_compiled_for_random_requests(engine: Engine, num_requests: int):
    # Other engines of this process may have started since; their compilations are in this count.
    before = engine.runner.num_compilations_since_start
    generator = np.random.default_rng(2024)
    running = []
    for number in range(num_requests):
        request = random_request(generator, number)
        running.append((request, GenerationStream(engine.loop, engine.tokenizer, request=request)))
        if generator.random() < 0.15:
            engine.loop.abort_stem(str(generator.choice([request.request_id for request, _ in running])))
    for request, stream in running:
        ends = [delta for delta in stream if delta.finish is not None]
        assert sorted(delta.choice_index for delta in ends) == list(range(request.sampling.n))
        for delta in ends:
            assert delta.finish is not None and delta.finish.kind in ("stop", "length", "abort")
            assert (delta.routing is not None) == request.return_routed_experts
            assert (delta.prompt is not None) == (request.score_prompt_from is not None)
    assert engine.runner.num_compilations_since_start == before
