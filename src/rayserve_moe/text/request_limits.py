"""Limits of a request that only a tokenizer can turn into ids: banned words, and reasoning with its markers.

Unlike vLLM, the form of a banned word after a space is banned even if it has another number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rayserve_moe.requests.reasoning_span import ThinkingLimit
from rayserve_moe.requests.records import GenerationRequest, RequestError
from rayserve_moe.text.chat_output import ChatOutput
from rayserve_moe.text.tokenizer import Tokenizer

MOST_WORDS = 256
NO_LIMIT = -1


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the ids of each word; those after a space too, where they are other ids.

    RequestError for a word without a token, and for too many.
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        plain = word.lstrip()
        ids = tuple(tokenizer.encode(plain, add_special_tokens=False))
        if not ids:
            raise RequestError("should hold words, none of them empty", "bad_words")
        spaced = tuple(tokenizer.encode(f" {plain}", add_special_tokens=False))
        found.append(ids)
        if spaced[-len(ids) :] != ids:
            found.append(spaced)
    if len(found) > MOST_WORDS:
        raise RequestError(f"should be at most {MOST_WORDS} words, those after a space included", "bad_words")
    return tuple(dict.fromkeys(found))


def with_thinking_limit(request: GenerationRequest, output: ChatOutput) -> GenerationRequest:
    """The request with the markers of the reasoning that it limits, if it does. RequestError where none are known."""
    budget, param = request.thinking_token_budget, "thinking_token_budget"
    if budget is None or budget == NO_LIMIT:
        return request
    markers = output.reasoning_markers(request.prompt_ids)
    if markers is None:
        raise RequestError("how this model marks its reasoning is not known: set `reasoning_parser`", param)
    if set(markers.end_ids) & set(request.sampling.stop_token_ids):
        raise RequestError("reasoning would end with one of the ids that end the answer", "stop_token_ids")
    return replace(request, thinking=ThinkingLimit(budget, markers))
