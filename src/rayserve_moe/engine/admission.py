"""Which requests the engine can serve at all, decided before they are queued."""

from __future__ import annotations

import numpy as np

from rayserve_moe.requests import GenerationRequest, ModelCard, RequestError


def check_request(request: GenerationRequest, card: ModelCard, *, longest: int) -> None:
    """Raise RequestError for a request that no amount of waiting can serve.

    `longest` is the number of tokens that one sequence can hold in the page pool.
    """
    prompt, sampling = request.prompt_ids, request.sampling
    if len(prompt) == 0:
        raise RequestError("the prompt is empty: at least one token is needed", "prompt")
    if prompt.min() < 0 or prompt.max() >= card.vocab_size:
        raise RequestError(f"token ids must lie in [0, {card.vocab_size})", "prompt")
    if sampling.max_new_tokens < 0 or sampling.n < 1:
        raise RequestError("max_tokens must not be negative, and n must be at least 1", "max_tokens")
    total = len(prompt) + sampling.max_new_tokens
    if total > card.max_model_len:
        raise RequestError(
            f"{len(prompt)} prompt tokens and {sampling.max_new_tokens} new ones exceed the context of "
            f"{card.max_model_len} tokens",
            "prompt" if len(prompt) > card.max_model_len else "max_tokens",
        )
    if total > longest:
        raise RequestError(f"{total} tokens exceed the KV page pool of {longest} tokens", "max_tokens")
    if request.return_routed_experts and not card.returns_routing:
        raise RequestError(
            "routed experts are not captured by this server: start it with enable_return_routed_experts: true",
            "return_routed_experts",
        )
    if not np.isfinite([sampling.temperature, sampling.top_p, sampling.min_p]).all():
        raise RequestError("temperature, top_p and min_p must be finite", "temperature")
