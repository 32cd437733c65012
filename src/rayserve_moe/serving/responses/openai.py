"""Answer objects of the OpenAI routes, whole and in chunks. No I/O and no decisions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rayserve_moe.engine.answers import ChoiceResult, stop_reason
from rayserve_moe.requests import GenerationRequest, ModelCard
from rayserve_moe.serving.responses.logprobs import ChatLogprobs, CompletionLogprobs, LogprobWriter, echoed_text
from rayserve_moe.serving.responses.routing import RoutingForm, RoutingWriter
from rayserve_moe.serving.schemas.openai import StreamOptions
from rayserve_moe.text.tokenizer import Tokenizer

_PROMPT_ROWS = "prompt_routed_experts"


@dataclass(frozen=True)
class Dialect:
    """Where the two OpenAI routes differ in their answers."""

    id_prefix: str
    whole_kind: str
    chunk_kind: str
    whole_text: Callable[[str], dict]
    chunk_text: Callable[[str, bool], dict]
    """Fields of a chunk's choice from its text, and whether it is the choice's first."""


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
)
CHAT = Dialect(
    id_prefix="chatcmpl",
    whole_kind="chat.completion",
    chunk_kind="chat.completion.chunk",
    whole_text=_chat_message,
    chunk_text=_chat_delta,
)


def new_answer_id(dialect: Dialect) -> str:
    """Return an id that no other answer has."""
    return f"{dialect.id_prefix}-{uuid.uuid4().hex}"


@dataclass(frozen=True)
class AnswerParts:
    """What an answer shows besides text, as the request asked for it."""

    routing: RoutingForm
    logprobs: bool = False
    echo: bool = False
    usage: StreamOptions = field(default_factory=StreamOptions)


class AnswerWriter:
    """Writes the answer to one HTTP request. `request_of_choice` gives the engine request of every choice."""

    def __init__(
        self,
        dialect: Dialect,
        answer_id: str,
        *,
        model: tuple[ModelCard, Tokenizer],
        parts: AnswerParts,
        request_of_choice: Sequence[GenerationRequest],
    ) -> None:
        self._card, self._tokenizer = model
        self._dialect, self._parts = dialect, parts
        self._envelope = {"id": answer_id, "created": int(time.time()), "model": self._card.name}
        self._request_of_choice = request_of_choice
        self._started: set[int] = set()
        self._routing = RoutingWriter(self._card.routing, parts.routing, request_of_choice=request_of_choice)
        self._logprobs = [self._logprob_writer(request) for request in request_of_choice] if parts.logprobs else []

    def whole(self, results: Sequence[ChoiceResult]) -> dict:
        """Return the answer of a request that does not stream."""
        choices = [
            self._choice(choice, result, self._dialect.whole_text(self._echoed(choice) + result.text))
            for choice, result in enumerate(results)
        ]
        return {
            **self._envelope,
            "object": self._dialect.whole_kind,
            "choices": choices,
            **self._prompt_rows(choices),
            "usage": self._usage(results),
        }

    def waits_for(self, news: ChoiceResult) -> bool:
        """Log-probs of an echoed prompt, which stand before everything else, come with the end of a choice."""
        return self._parts.echo and self._parts.logprobs and news.finish is None

    def chunk(self, choice: int, so_far: ChoiceResult, *, news: ChoiceResult) -> dict:
        """Return the event that brings what is new to one choice; token counts that only the end brings are null."""
        is_first = choice not in self._started
        self._started.add(choice)
        text = self._echoed(choice) + news.text if is_first else news.text
        choices = [self._choice(choice, news, self._dialect.chunk_text(text, is_first))]
        return {
            **self._envelope,
            "object": self._dialect.chunk_kind,
            "choices": choices,
            **self._prompt_rows(choices),
            **({"usage": self._usage_so_far(choice, so_far)} if self._parts.usage.include_usage else {}),
        }

    def closing(self, results: Sequence[ChoiceResult]) -> dict | None:
        """Return the event that counts tokens, if it was asked for."""
        if not self._parts.usage.include_usage:
            return None
        return {
            **self._envelope,
            "object": self._dialect.chunk_kind,
            "choices": [],
            "usage": self._usage(results),
        }

    def _logprob_writer(self, request: GenerationRequest) -> LogprobWriter:
        if self._dialect is CHAT:
            return ChatLogprobs(self._tokenizer, request)
        return CompletionLogprobs(self._tokenizer, request, echo=self._parts.echo)

    def _echoed(self, choice: int) -> str:
        prompt_ids = self._request_of_choice[choice].prompt_ids.tolist()
        return echoed_text(self._tokenizer, prompt_ids) if self._parts.echo else ""

    def _choice(self, choice: int, news: ChoiceResult, text: dict) -> dict:
        logprobs = self._logprobs[choice].write(news) if self._logprobs else None
        finish = None if news.finish is None else news.finish.kind
        routing = self._routing_fields(choice, news)
        request = self._request_of_choice[choice]
        reason = stop_reason(news, request, eos_token_ids=self._card.eos_token_ids)
        matched = None if news.finish is None else news.finish.matched
        ending = {"finish_reason": finish, "stop_reason": reason, "matched_stop": matched}
        return {"index": choice, **text, "logprobs": logprobs, **ending, **routing}

    def _routing_fields(self, choice: int, news: ChoiceResult) -> dict:
        if not self._routing.is_due(choice, news.routing, has_ended=news.finish is not None):
            return {}
        fields = self._routing.fields(choice, news.routing)
        if self._parts.routing.dialect != "sglang":
            return fields
        start = self._routing.first_position(news.routing)
        return {
            "meta_info": {**fields, "routed_experts_start_len": start},
            "sgl_ext": {"routed_experts": fields["routed_experts"]},
        }

    def _prompt_rows(self, choices: Sequence[dict]) -> dict:
        """Move the rows of prompts up to the answer: those of the only prompt, or a list with those of each."""
        found: dict[str, list | None] = {}
        for choice in choices:
            if _PROMPT_ROWS in choice:
                request_id = self._request_of_choice[choice["index"]].request_id
                rows = choice.pop(_PROMPT_ROWS)
                found[request_id] = found.get(request_id) or rows
        if not found:
            return {}
        told = {self._request_of_choice[choice["index"]].request_id: None for choice in choices}
        each = list((told | found).values())
        return {_PROMPT_ROWS: each[0] if len(each) == 1 else each}

    def _usage_so_far(self, choice: int, so_far: ChoiceResult) -> dict | None:
        if not self._parts.usage.usage_in_events:
            return None
        return usage_of([self._request_of_choice[choice]], [so_far])

    def _usage(self, results: Sequence[ChoiceResult]) -> dict:
        return usage_of(self._request_of_choice, results)


def usage_of(request_of_choice: Sequence[GenerationRequest], results: Sequence[ChoiceResult]) -> dict:
    """Count tokens: each prompt once, every choice's output."""
    first_choices = _first_choices(request_of_choice)
    prompt_tokens = sum(len(request_of_choice[choice].prompt_ids) for choice in first_choices)
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
