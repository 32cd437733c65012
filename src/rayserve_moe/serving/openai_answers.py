"""Answer objects of the OpenAI routes, whole and in chunks. No I/O and no decisions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rayserve_moe.engine.answers import ChoiceResult, routing_fields
from rayserve_moe.requests import GenerationRequest, ModelCard
from rayserve_moe.text.detokenizer import IncrementalDetokenizer
from rayserve_moe.text.tokenizer import Tokenizer


class CompletionLogprobs:
    """Writes the `logprobs` objects of one choice of `/v1/completions`, chunk after chunk.

    `text_offset` counts the characters of the choice's own text before each token. Alternatives are not served:
    `top_logprobs` is null.
    """

    def __init__(self, tokenizer: Tokenizer, request: GenerationRequest) -> None:
        self._tokenizer = tokenizer
        skip_special_tokens = request.sampling.skip_special_tokens
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._offset = 0

    def write(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> dict:
        """Return the object for the next tokens."""
        tokens = [self._tokenizer.token_text(token_id) for token_id in token_ids]
        return {
            "tokens": tokens,
            "token_logprobs": list(logprobs),
            "top_logprobs": None,
            "text_offset": [self._advance(*pair) for pair in zip(token_ids, tokens, strict=True)],
        }

    def _advance(self, token_id: int, token: str) -> int:
        """Return where the token begins: half a character before it may have come out with it, and is not its own."""
        before = self._offset
        self._offset += len(self._detokenizer.push(token_id))
        return max(before, self._offset - len(token))


class ChatLogprobs:
    """Writes the `logprobs` objects of one choice of `/v1/chat/completions`."""

    def __init__(self, tokenizer: Tokenizer, request: GenerationRequest) -> None:
        self._tokenizer = tokenizer

    def write(self, token_ids: Sequence[int], logprobs: Sequence[float]) -> dict:
        """Return the object for the next tokens."""
        content = [
            {
                "token": self._tokenizer.token_text(token_id),
                "logprob": logprob,
                "bytes": list(self._tokenizer.token_bytes(token_id)),
                "top_logprobs": [],
            }
            for token_id, logprob in zip(token_ids, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}


@dataclass(frozen=True)
class Dialect:
    """Where the two OpenAI routes differ in their answers."""

    id_prefix: str
    whole_kind: str
    chunk_kind: str
    whole_text: Callable[[str], dict]
    chunk_text: Callable[[str, bool], dict]
    """Fields of a chunk's choice from its text, and whether it is the choice's first."""
    logprobs: Callable[[Tokenizer, GenerationRequest], CompletionLogprobs | ChatLogprobs]


def _chat_message(text: str) -> dict:
    return {"message": {"role": "assistant", "content": text, "refusal": None}}


def _chat_delta(text: str, is_first: bool) -> dict:
    return {"delta": {"role": "assistant", "content": text} if is_first else {"content": text}}


COMPLETION = Dialect(
    id_prefix="cmpl",
    whole_kind="text_completion",
    chunk_kind="text_completion",
    whole_text=lambda text: {"text": text},
    chunk_text=lambda text, is_first: {"text": text},
    logprobs=CompletionLogprobs,
)
CHAT = Dialect(
    id_prefix="chatcmpl",
    whole_kind="chat.completion",
    chunk_kind="chat.completion.chunk",
    whole_text=_chat_message,
    chunk_text=_chat_delta,
    logprobs=ChatLogprobs,
)


def new_answer_id(dialect: Dialect) -> str:
    """Return an id that no other answer has."""
    return f"{dialect.id_prefix}-{uuid.uuid4().hex}"


class AnswerWriter:
    """Writes the answer to one HTTP request. `request_of_choice` gives the engine request of every choice."""

    def __init__(
        self,
        dialect: Dialect,
        answer_id: str,
        *,
        card: ModelCard,
        tokenizer: Tokenizer | None,
        request_of_choice: Sequence[GenerationRequest],
    ) -> None:
        """Without a tokenizer the answer carries no log-probs."""
        self._dialect = dialect
        self._card = card
        self._envelope = {"id": answer_id, "created": int(time.time()), "model": card.name}
        self._request_of_choice = request_of_choice
        self._started: set[int] = set()
        self._logprobs = [dialect.logprobs(tokenizer, request) for request in request_of_choice] if tokenizer else []

    def whole(self, results: Sequence[ChoiceResult]) -> dict:
        """Return the answer of a request that does not stream."""
        choices = [
            self._choice(choice, result, self._dialect.whole_text(result.text)) for choice, result in enumerate(results)
        ]
        return {
            **self._envelope,
            "object": self._dialect.whole_kind,
            "choices": choices,
            "usage": self._usage(results),
        }

    def chunk(self, choice: int, news: ChoiceResult) -> dict:
        """Return the event that brings what is new to one choice."""
        text = self._dialect.chunk_text(news.text, choice not in self._started)
        self._started.add(choice)
        return {
            **self._envelope,
            "object": self._dialect.chunk_kind,
            "choices": [self._choice(choice, news, text)],
        }

    def usage_event(self, results: Sequence[ChoiceResult]) -> dict:
        """Return the event after the last choice's, which counts tokens."""
        return {
            **self._envelope,
            "object": self._dialect.chunk_kind,
            "choices": [],
            "usage": self._usage(results),
        }

    def _choice(self, choice: int, result: ChoiceResult, text: dict) -> dict:
        logprobs = self._logprobs[choice].write(result.token_ids, result.logprobs) if self._logprobs else None
        return {"index": choice, **text, "logprobs": logprobs, **self._finish_fields(choice, result)}

    def _finish_fields(self, choice: int, result: ChoiceResult) -> dict:
        if result.finish is None:
            return {"finish_reason": None}
        fields: dict = {"finish_reason": result.finish.kind}
        if self._request_of_choice[choice].return_routed_experts:
            fields["meta_info"] = routing_fields(result.routing, self._card.routing)
            fields["sgl_ext"] = {"routed_experts": fields["meta_info"]["routed_experts"]}
        return fields

    def _usage(self, results: Sequence[ChoiceResult]) -> dict:
        """Count tokens: each prompt once, every choice's output."""
        first_choices = _first_choices(self._request_of_choice)
        prompt_tokens = sum(len(self._request_of_choice[choice].prompt_ids) for choice in first_choices)
        completion_tokens = sum(len(result.token_ids) for result in results)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {
                "cached_tokens": sum(results[choice].num_cached_tokens for choice in first_choices),
            },
        }


def _first_choices(request_of_choice: Sequence[GenerationRequest]) -> list[int]:
    choice, first = 0, []
    while choice < len(request_of_choice):
        first.append(choice)
        choice += request_of_choice[choice].sampling.n
    return first
