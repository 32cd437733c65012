"""Which requests the engine can serve at all, decided before they are queued."""

from __future__ import annotations

from rayserve_moe.requests import GenerationRequest, ModelCard, RequestError, SamplingParams

MAX_TOP_K = 2**31 - 1


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
    _check_sampling(sampling)


def _check_sampling(sampling: SamplingParams) -> None:
    """Raise RequestError for parameters that the sampler is not defined for; NaN is outside of every range."""
    bounds = {
        "temperature": (0.0 <= sampling.temperature < float("inf"), "a finite number, at least 0"),
        "top_k": (0 <= sampling.top_k <= MAX_TOP_K, f"in [0, {MAX_TOP_K}], 0 for the whole vocabulary"),
        "top_p": (0.0 < sampling.top_p <= 1.0, "in (0, 1]"),
        "min_p": (0.0 <= sampling.min_p <= 1.0, "in [0, 1]"),
    }
    for name, (is_within, wanted) in bounds.items():
        if not is_within:
            raise RequestError(f"{name} must be {wanted}", name)
