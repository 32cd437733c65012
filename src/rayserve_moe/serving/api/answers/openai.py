"""Answer objects of the OpenAI routes, whole and in chunks, without I/O."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from rayserve_moe.answers.native import error_of, stop_reason
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.records import GenerationRequest
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.serving.api.answers.answering import Writer
from rayserve_moe.serving.api.answers.chat_parts import ChatParts
from rayserve_moe.serving.api.answers.evidence import EvidenceWriter
from rayserve_moe.serving.api.answers.logprobs import CompletionLogprobs, chat_logprobs, echoed_text
from rayserve_moe.serving.api.answers.request_streams import RequestStreams
from rayserve_moe.serving.api.answers.routing import RoutingWriter
from rayserve_moe.serving.api.schemas.openai import ChatBody, CompletionBody
from rayserve_moe.serving.api_state import ApiState

_PROMPT_ROWS = "prompt_routed_experts"


class OpenAIWriter(Writer):
    """Writer of the answer to a request of `/v1/completions` or `/v1/chat/completions`."""

    def __init__(
        self,
        state: ApiState,
        body: CompletionBody | ChatBody,
        *,
        answer_id: str,
        streams: RequestStreams,
    ) -> None:
        self._card, self._tokenizer, self._output = state.card, state.tokenizer, state.chat_output
        self._body, self._is_chat = body, isinstance(body, ChatBody)
        self._envelope = {"id": answer_id, "created": int(time.time()), "model": self._card.name}
        self._request_of_choice = request_of_choice = streams.request_of_choice
        self._evidence: EvidenceWriter | None = None
        if body.wants_extras:
            self._evidence = EvidenceWriter(body, card=self._card, tokenizer=self._tokenizer, streams=streams)
        self._started: set[int] = set()
        self.routing = RoutingWriter(
            self._card,
            body.routed_experts_format,
            shares_prompt_rows=body.routed_experts_format == "nested",
            request_of_choice=request_of_choice,
            index_form=body.indexer_topk_format,
        )
        self._role, self._parts = "", None
        if isinstance(body, ChatBody):
            parts = ChatParts(state.chat_output, body, request_of_choice=request_of_choice)
            self._role, self._parts = body.answering_role, parts if parts.is_active else None
        self._prompt_texts: list[str | None] = []
        if isinstance(body, CompletionBody) and (body.echo or body.logprobs is not None):
            self._prompt_texts = _prompt_texts(body, request_of_choice)
        self._logprobs: list[CompletionLogprobs] = []
        if isinstance(body, CompletionBody) and body.logprobs is not None:
            self._logprobs = [
                CompletionLogprobs(self._tokenizer, request, body=body, prompt_text=text)
                for request, text in zip(request_of_choice, self._prompt_texts, strict=True)
            ]

    def whole(self, results: Sequence[ChoiceResult]) -> dict:
        """Return the answer of a request that does not stream."""
        choices = []
        for choice, result in enumerate(results):
            choices.append(self._choice(choice, result, self._whole_text(choice, result.text), so_far=result))
        answer: dict = {**self._envelope, "object": "chat.completion" if self._is_chat else "text_completion"}
        prompt_rows = self._prompt_rows(choices)
        if isinstance(self._body, CompletionBody) and self._body.num_samples != dict(self._body)["n"]:
            choices = _best(choices, results, body=self._body)
        answer |= {"choices": choices, **prompt_rows}
        if self._evidence is not None:
            answer |= {**self._evidence.of_chat(results), **self._evidence.sglext(results)}
        return answer | {"usage": self.usage(results)}

    def defers(self, delta: ChoiceResult) -> bool:
        """Return True before the end of a choice with log-probs of an echoed prompt, which precede everything else."""
        return bool(self._logprobs) and self._body.echo and delta.finish is None

    def chunks(self, choice: int, so_far: ChoiceResult, *, delta: ChoiceResult) -> list[dict]:
        """Return the events of a choice; `usage` is null if only the last event counts tokens.

        Everything except text is in the last event. No event is returned while all new parts are held back.
        """
        is_first = choice not in self._started
        self._started.add(choice)
        *earlier, last = self._new_texts(choice, delta, is_first=is_first)
        written = self._choice(choice, delta, last, so_far=so_far, is_first=is_first)
        if not earlier and not any(value for name, value in written.items() if name != "index"):
            return []
        nothing = {"logprobs": None, "finish_reason": None}
        events = [self._event([choice]) for choice in ({"index": choice, **text, **nothing} for text in earlier)]
        events.append(self._event([written]))
        if self._evidence is not None:
            events[0] |= self._evidence.of_chat([so_far], is_first=is_first)
        if (options := self._body.stream_options) and options.include_usage:
            request = self._request_of_choice[choice]
            for event in events:
                event["usage"] = usage_of([request], [so_far]) if options.usage_in_events else None
        return events

    def closing(self, results: Sequence[ChoiceResult]) -> list[dict]:
        """Return the requested events of SGLang's extensions and token counts."""
        extension = {} if self._evidence is None else self._evidence.sglext(results)
        events = [{**self._event([]), **extension}] if extension else []
        if (options := self._body.stream_options) and options.include_usage:
            events.append({**self._event([]), "usage": self.usage(results)})
        return events

    def usage(self, results: Sequence[ChoiceResult]) -> dict:
        """Return token counts as `usage_of`; a chat also counts reasoning tokens."""
        counted = usage_of(self._request_of_choice, results)
        if isinstance(self._body, ChatBody):
            pairs = zip(self._request_of_choice, results, strict=True)
            count = sum(self._output.num_reasoning_tokens(each.prompt_ids, result.token_ids) for each, result in pairs)
            counted["completion_tokens_details"] = {"reasoning_tokens": count}
        return counted

    def _event(self, choices: list[dict]) -> dict:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return {**self._envelope, "object": kind, "choices": choices, **self._prompt_rows(choices)}

    def _whole_text(self, choice: int, text: str) -> dict:
        echoed = self._echoed(choice) if self._body.echo else ""
        if not self._is_chat:
            return {"text": echoed + text}
        plain = {"content": echoed + text, "refusal": None}
        message = plain if self._parts is None else self._parts.message(choice, text, echoed=echoed)
        return {"message": {"role": self._role, **message}}

    def _new_texts(self, choice: int, delta: ChoiceResult, *, is_first: bool) -> list[dict]:
        """Return the texts of the events for new output, at least a single one."""
        echoed = self._echoed(choice) if is_first and self._body.echo else ""
        if not self._is_chat:
            return [{"text": echoed + delta.text}]
        role = {"role": self._role} if is_first else {}
        if self._parts is None:
            return [{"delta": {**role, "content": echoed + delta.text}}]
        deltas = self._parts.deltas(choice, delta.text, is_last=delta.finish is not None)
        first = [{**role, "content": echoed}] if is_first else []
        return [{"delta": each} for each in (first + deltas or [{}])]

    def _finish_reason(self, choice: int, finish: FinishReason | None) -> str | None:
        """Return the finish reason.

        It is `tool_calls` if a choice stopped after calls and was not forced to call a named tool.
        """
        if finish is None or finish.kind != "stop" or self._parts is None or not self._parts.has_calls(choice):
            return None if finish is None else finish.kind
        return "stop" if isinstance(self._body, ChatBody) and isinstance(self._body.tool_choice, dict) else "tool_calls"

    def _echoed(self, choice: int) -> str:
        if isinstance(self._body, ChatBody):
            return self._body.continued_text
        sent = self._prompt_texts[choice]
        return (
            echoed_text(self._tokenizer, self._request_of_choice[choice].prompt_ids.tolist()) if sent is None else sent
        )

    def _choice(
        self, choice: int, delta: ChoiceResult, text: dict, *, so_far: ChoiceResult, is_first: bool = True
    ) -> dict:
        request, finish = self._request_of_choice[choice], delta.finish
        written = {
            "index": choice,
            **text,
            "logprobs": self._logprobs_of(choice, delta),
            "finish_reason": self._finish_reason(choice, finish),
            "stop_reason": stop_reason(delta, request, eos_token_ids=self._card.eos_token_ids),
            "matched_stop": None if finish is None else finish.matched,
            **error_of(finish),
        }
        if self._evidence is not None:
            written |= self._evidence.of_choice(choice, delta, so_far=so_far, is_first=is_first)
        if request.wants_rows:
            written |= self._row_fields(choice, delta)
        if self._evidence is not None and (meta_info := self._evidence.meta_info(choice, so_far)):
            written["meta_info"] = {**meta_info, **written.get("meta_info", {})}
        return written

    def _logprobs_of(self, choice: int, delta: ChoiceResult) -> dict | None:
        if isinstance(self._body, ChatBody):
            is_wanted, num_top = self._body.logprobs, self._body.top_logprobs
            if not is_wanted:
                return None
            as_ids = self._body.return_tokens_as_token_ids
            listed_ids = self._request_of_choice[choice].logprob_token_ids
            return chat_logprobs(self._tokenizer, delta, num_top=num_top, listed_ids=listed_ids, as_ids=as_ids)
        return self._logprobs[choice].write(delta) if self._logprobs else None

    def _row_fields(self, choice: int, delta: ChoiceResult) -> dict:
        if self.routing.dialect != "sglang":
            return {**self.routing.fields(choice, delta), **self.routing.index_fields(choice, delta)}
        fields = self.routing.sglang_fields(choice, delta)
        repeated = {name: fields[name] for name in ("routed_experts", "indexer_topk") if name in fields}
        return {"meta_info": fields, "sgl_ext": repeated} if fields else {}

    def _prompt_rows(self, choices: Sequence[dict]) -> dict:
        """Move the rows of prompts to the answer: of a single prompt, or a list with the rows of each prompt."""
        found: dict[str, list | None] = {}
        for choice in choices:
            if _PROMPT_ROWS in choice:
                request_id = self._request_of_choice[choice["index"]].request_id
                rows = choice.pop(_PROMPT_ROWS)
                found[request_id] = found.get(request_id) or rows
        if not found:
            return {}
        written = {self._request_of_choice[choice["index"]].request_id: None for choice in choices}
        each = list((written | found).values())
        return {_PROMPT_ROWS: each[0] if len(each) == 1 else each}


def _best(choices: list[dict], results: Sequence[ChoiceResult], *, body: CompletionBody) -> list[dict]:
    """Return the `n` choices of each prompt with the highest mean log-prob per token."""
    n, num_samples = dict(body)["n"], body.num_samples
    means = [sum(result.logprobs) / len(result.logprobs) if result.logprobs else -math.inf for result in results]
    samples = [range(first, first + num_samples) for first in range(0, len(choices), num_samples)]
    kept = [place for each in samples for place in sorted(each, key=means.__getitem__, reverse=True)[:n]]
    return [choices[place] | {"index": index} for index, place in enumerate(kept)]


def _prompt_texts(body: CompletionBody, request_of_choice: Sequence[GenerationRequest]) -> list[str | None]:
    """Return the prompt of each choice as sent; None for token ids, and for a prompt that may be truncated."""
    texts = [
        prompt if isinstance(prompt, str) and body.truncate_prompt_tokens is None else None for prompt in body.prompt
    ]
    text_of = dict(zip(dict.fromkeys(map(id, request_of_choice)), texts, strict=True))
    return [text_of[id(request)] for request in request_of_choice]


def usage_of(request_of_choice: Sequence[GenerationRequest], results: Sequence[ChoiceResult]) -> dict:
    """Return token counts: each prompt once, and every choice's output."""
    earlier = [None, *request_of_choice]
    first_choices = [choice for choice, request in enumerate(request_of_choice) if request is not earlier[choice]]
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
