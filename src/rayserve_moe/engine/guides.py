"""Guides of constrained requests: one for each choice, from what its constraint was compiled to."""

from __future__ import annotations

from collections.abc import Sequence

from rayserve_moe.config.settings import StructuredSettings
from rayserve_moe.constraints.compiler import ConstraintCompiler
from rayserve_moe.constraints.matchers import Vocabulary
from rayserve_moe.constraints.thinking_budget import ThinkingBudget
from rayserve_moe.constraints.word_bans import WordBans
from rayserve_moe.requests import GenerationRequest, ModelCard, RequestError
from rayserve_moe.scheduling.sequence import Guide
from rayserve_moe.text.tokenizer import Tokenizer


def constraint_compiler(
    tokenizer: Tokenizer, card: ModelCard, *, settings: StructuredSettings
) -> ConstraintCompiler | None:
    """A compiler for the tokenizer of a model; None where constraints are switched off, or answers have no end."""
    if not settings.enabled or not card.eos_token_ids:
        return None
    return ConstraintCompiler(vocabulary_of(tokenizer, card.vocab_size, eos_ids=card.eos_token_ids), settings)


def vocabulary_of(tokenizer: Tokenizer, num_ids: int, *, eos_ids: Sequence[int]) -> Vocabulary:
    """Return the vocabulary of a tokenizer for a model with `num_ids` ids."""
    special = tuple(sorted(token_id for token_id in tokenizer.special_ids if token_id < num_ids))
    return Vocabulary(tuple(map(tokenizer.token_bytes, range(num_ids))), special, tuple(eos_ids))


def guides_of(
    request: GenerationRequest, compiler: ConstraintCompiler | None, *, num_ids: int
) -> Sequence[Guide | None]:
    """A guide for every choice of a request, None for those of one that may answer anything.

    Waits for the constraint where it is not compiled yet. RequestError where it cannot be.
    """
    constraint, sampling, words = request.constraint, request.sampling, request.bad_word_ids
    guides: list[Guide | None] = [None] * sampling.n
    wanting = _wanting(request)
    if wanting is None:
        return guides
    if compiler is None:
        raise RequestError(
            "structured output is off: it needs `structured_output: true`, and a tokenizer with an end of sequence",
            wanting,
        )
    if constraint is not None:
        compiled = compiler.submit(constraint).result()
        guides = [compiled.guide(sampling) for _ in guides]
    allowed = sampling.allowed_token_ids
    if (limit := request.thinking) is not None:
        guides = [ThinkingBudget(limit, num_ids=num_ids, allowed_ids=allowed, inner=guide) for guide in guides]
    if not words:
        return guides
    return [WordBans(words, num_ids=num_ids, allowed_ids=allowed, inner=guide) for guide in guides]


def _wanting(request: GenerationRequest) -> str | None:
    """The field for which samples of a request are held; None where none are."""
    if request.constraint is not None:
        return request.constraint.param
    wants = {
        "bad_words": request.bad_word_ids,
        "thinking_token_budget": request.thinking,
        "logprob_token_ids": request.logprob_token_ids,
        "return_entropy": request.return_entropy,
        "return_sampling_mask": request.return_sampling_mask,
        "vllm_xargs": request.sampling.processor_arguments,
        "logprobs_mode": request.raw_logprobs,
    }
    return next((name for name, is_wanted in wants.items() if is_wanted), None)
