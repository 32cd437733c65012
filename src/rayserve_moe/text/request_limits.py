"""Request limits that need a tokenizer: banned words, and reasoning budgets with their markers.

Unlike vLLM, a banned word is also banned after a space if that form has another number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rayserve_moe.requests.reasoning_span import ThinkingLimit
from rayserve_moe.requests.records import GenerationRequest, RequestError
from rayserve_moe.text.chat_output import ChatOutput
from rayserve_moe.text.tokenizer import Tokenizer

MAX_WORDS = 256
NO_LIMIT = -1


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the ids of each word, and of its form after a space if that differs.

    Raises: RequestError if a word has no token, or if more than `MAX_WORDS` entries result.
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
    if len(found) > MAX_WORDS:
        raise RequestError(f"should be at most {MAX_WORDS} words, including their forms after a space", "bad_words")
    return tuple(dict.fromkeys(found))


def with_thinking_limit(request: GenerationRequest, output: ChatOutput) -> GenerationRequest:
    """Return the request with the model's reasoning markers if it limits reasoning.

    Raises: RequestError if the markers are unknown, or if an end marker is also a stop id.
    """
    budget, param = request.thinking_token_budget, "thinking_token_budget"
    if budget is None or budget == NO_LIMIT:
        return request
    markers = output.reasoning_markers(request.prompt_ids)
    if markers is None:
        raise RequestError("the model's reasoning markers are unknown: set `reasoning_parser`", param)
    if set(markers.end_ids) & set(request.sampling.stop_token_ids):
        raise RequestError("reasoning would end with one of the ids that end the answer", "stop_token_ids")
    return replace(request, thinking=ThinkingLimit(budget, markers))
