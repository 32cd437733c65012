"""The six dialects of generation requests: one request in the words of each, and one record of what each answers.

A law that holds on every route is written once, over `DIALECTS` or the part of them that has what the law is about.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.support.serving.http_client import CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES, TOKENS, ask, stream

Json = dict[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One prompt in every form that a dialect takes."""

    text: str
    """Content of the only message of a chat."""
    ids: Sequence[int]
    """Token ids of that chat, as the template renders it."""


def rendered(http: Any, text: str) -> Prompt:
    """Return a prompt whose ids are the server's own rendering of the chat."""
    return Prompt(text, ask(http, "/tokenize", messages=[{"role": "user", "content": text}])["tokens"])


@dataclass(frozen=True)
class Choice:
    """One choice of an answer; None for what its dialect does not tell."""

    text: str | None
    ids: list[int] | None
    finish: str
    """`stop`, `length` or `abort`, whatever the dialect calls it."""
    stop: str | int | None
    """Stop string or id that ended the choice."""
    logprobs: list[float] | None
    """Log-prob of each token, if requested."""
    top: list[list[tuple[int, float]]] | None = None
    """Per token, ids and log-probs that are listed with it, if requested from a dialect with ids."""
    versions: list[Json] | None = None
    """Spans of output tokens and the weights that sampled them, if requested."""


@dataclass(frozen=True)
class Answer:
    """A whole answer, or what the events of a stream add up to."""

    choices: list[Choice]
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    prompt_ids: list[int] | None


@dataclass(frozen=True)
class Dialect:
    """How one route is asked, and how its answers are read."""

    name: str
    path: str
    prompt: Callable[[Prompt], Json]
    """Fields of the body that hold a prompt."""
    whole: Callable[[Json], Answer]
    """Read the answer to a request without `stream`."""
    joined: Callable[[list[Json]], Answer]
    """Read the events of a stream with usage."""
    names: Mapping[str, str]
    """Names of sampling fields that are called otherwise here than in vLLM."""
    nested: str = ""
    """Object that holds the sampling fields; empty for the body itself."""
    ids: Mapping[str, Any] | None = None
    """Fields that request token ids; None for a dialect without them."""
    logprobs: Callable[[int], Json] | None = None
    """Fields that request log-probs and a number of the likeliest tokens; None for a dialect without them."""
    usage: Mapping[str, Any] | None = None
    """Fields that request the usage of a stream."""

    def body(self, prompt: Prompt, *, max_tokens: int = 8, num_top: int | None = None, **sampling: Any) -> Json:
        """Return a request for one prompt; `sampling` has vLLM's names. Greedy, unless it says otherwise.

        Log-probs are requested with `num_top` of the likeliest tokens.
        """
        named = {"temperature": 0, "max_tokens": max_tokens, **sampling}
        fields = {self.names.get(name, name): value for name, value in named.items()}
        asked = {} if num_top is None or self.logprobs is None else self.logprobs(num_top)
        if self.nested:
            fields = {self.nested: fields | asked.pop(self.nested, {})}
        return {**self.prompt(prompt), **fields, **asked, **(self.ids or {})}

    def param(self, name: str) -> str:
        """Return what errors call a sampling field."""
        field = self.names.get(name, name)
        return f"{self.nested}.{field}" if self.nested else field

    def ask(self, http: Any, body: Json, *, streams: bool = False) -> Answer:
        """Send a body, whole or streamed, and read what comes."""
        if not streams:
            return self.whole(ask(http, self.path, **body))
        if self.path in (MESSAGES, RESPONSES):
            return self.joined(typed_events(http, self.path, **body))
        return self.joined(stream(http, self.path, **body, **(self.usage or {})))


def typed_events(http: Any, path: str, **body: Any) -> list[Json]:
    """Post a body with `stream`; return its events, each named after its type."""
    answer = http.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    events = []
    for block in answer.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def _counted(choices: list[Choice], usage: Json, prompt_ids: list[int] | None) -> Answer:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return Answer(choices, usage["prompt_tokens"], usage["completion_tokens"], cached, prompt_ids)


def _logprobs_of(choice: Json) -> list[float] | None:
    told = choice.get("logprobs")
    if told is None:
        return None
    return told["token_logprobs"] if "token_logprobs" in told else [entry["logprob"] for entry in told["content"]]


def _top_of(choice: Json) -> list[list[tuple[int, float]]] | None:
    told = choice.get("logprobs")
    if told is None:
        return None
    if "top_logprobs" in told:
        pairs = [list(top.items()) for top in told["top_logprobs"]]
    else:
        pairs = [[(top["token"], top["logprob"]) for top in entry["top_logprobs"]] for entry in told["content"]]
    return [[(int(name.removeprefix("token_id:")), value) for name, value in place] for place in pairs]


def _text_of(choice: Json) -> str | None:
    if message := choice.get("message") or choice.get("delta"):
        return message.get("content")
    return choice.get("text")


def _openai_whole(answer: Json) -> Answer:
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    read = [
        Choice(
            _text_of(choice),
            choice.get("token_ids"),
            choice["finish_reason"],
            choice["stop_reason"],
            _logprobs_of(choice),
            _top_of(choice),
            choice.get("weight_versions"),
        )
        for choice in choices
    ]
    return _counted(read, answer["usage"], answer.get("prompt_token_ids") or choices[0].get("prompt_token_ids"))


def _openai_joined(events: list[Json]) -> Answer:
    *events, last = events
    assert last["choices"] == [] and all(event.get("usage") is None for event in events)
    parts: dict[int, list[Json]] = {}
    prompts = []
    for event in events:
        (choice,) = event["choices"]
        parts.setdefault(choice["index"], []).append(choice)
        prompts += [part["prompt_token_ids"] for part in (event, choice) if "prompt_token_ids" in part]
    read = []
    for index in range(len(parts)):
        *earlier, end = parts[index]
        assert all(part["finish_reason"] is None for part in earlier)
        texts = [_text_of(part) for part in parts[index]]
        ids = [token_id for part in parts[index] for token_id in part.get("token_ids", ())]
        told = [part for part in parts[index] if part.get("logprobs")]
        read.append(
            Choice(
                None if "text" not in end and "delta" not in end else "".join(filter(None, texts)),
                ids if any("token_ids" in part for part in parts[index]) else None,
                end["finish_reason"],
                end["stop_reason"],
                [value for part in told for value in _logprobs_of(part) or ()] if told else None,
                [place for part in told for place in _top_of(part) or ()] if told else None,
                end.get("weight_versions"),
            )
        )
    assert all(prompt == prompts[0] for prompt in prompts) and len(prompts) in (0, 1, len(parts))
    return _counted(read, last["usage"], prompts[0] if prompts else None)


def _native_whole(answer: Json | list[Json]) -> Answer:
    answers = answer if isinstance(answer, list) else [answer]
    metas = [each["meta_info"] for each in answers]
    read = [
        Choice(
            each["text"],
            each["output_ids"],
            meta["finish_reason"]["type"],
            meta["finish_reason"].get("matched"),
            [entry[0] for entry in meta["output_token_logprobs"]] if "output_token_logprobs" in meta else None,
            _native_top(meta),
            meta.get("weight_versions"),
        )
        for each, meta in zip(answers, metas, strict=True)
    ]
    for choice, meta in zip(read, metas, strict=True):
        assert meta["completion_tokens"] == len(choice.ids or ())
    num_tokens = sum(meta["completion_tokens"] for meta in metas)
    prompt_ids = answers[0].get("prompt_token_ids")
    return Answer(read, metas[0]["prompt_tokens"], num_tokens, metas[0]["cached_tokens"], prompt_ids)


def _native_top(meta: Json) -> list[list[tuple[int, float]]] | None:
    """SGLang lists the sampled token apart; in front of listed ids it stands here as in vLLM."""
    if "output_token_logprobs" not in meta:
        return None
    own = [[(token_id, value)] for value, token_id, _ in meta["output_token_logprobs"]]
    listed = meta.get("output_token_ids_logprobs")
    places = listed or meta.get("output_top_logprobs") or [[]] * len(own)
    pairs = [[(token_id, value) for value, token_id, _ in place] for place in places]
    return [[*first, *others] if listed else others for first, others in zip(own, pairs, strict=True)]


def _native_joined(events: list[Json]) -> Answer:
    """Return the answer of a stream whose events repeat all before of their choice; the last one has the end."""
    last: dict[int, Json] = {}
    for event in events:
        before = last.get(event.get("index", 0))
        if before is not None:
            assert event["text"].startswith(before["text"]) and before["meta_info"]["finish_reason"] is None
            assert event["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        last[event.get("index", 0)] = event
    return _native_whole([last[index] for index in sorted(last)])


def _message(message: Json) -> Answer:
    usage = message["usage"]
    finish = {"max_tokens": "length", "abort": "abort"}.get(message["stop_reason"], "stop")
    assert (message["stop_reason"] == "stop_sequence") == (message["stop_sequence"] is not None)
    text = "".join(block["text"] for block in message["content"])
    choice = Choice(text, None, finish, message["stop_sequence"], None)
    cached = usage["cache_read_input_tokens"]
    return Answer([choice], usage["input_tokens"] + cached, usage["output_tokens"], cached, None)


def _message_joined(events: list[Json]) -> Answer:
    message = events[0]["message"]
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    (end,) = (event for event in events if event["type"] == "message_delta")
    assert events[-1] == {"type": "message_stop"}
    return _message({**message, **end["delta"], "usage": end["usage"], "content": [{"text": text}] if text else []})


def _response(response: Json) -> Answer:
    usage = response["usage"]
    parts = [part for item in response["output"] for part in item["content"]]
    finish = {"completed": "stop", "incomplete": "length", "cancelled": "abort"}[response["status"]]
    values = [entry["logprob"] for part in parts for entry in part["logprobs"]] or None
    choice = Choice("".join(part["text"] for part in parts), None, finish, None, values)
    cached = usage["input_tokens_details"]["cached_tokens"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    return Answer([choice], usage["input_tokens"], usage["output_tokens"], cached, None)


def _response_joined(events: list[Json]) -> Answer:
    texts = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    answer = _response(events[-1]["response"])
    assert answer.choices[0].text == "".join(texts)
    return answer


def _in_message(prompt: Prompt) -> Json:
    return {"messages": [{"role": "user", "content": prompt.text}]}


def _in_ids(prompt: Prompt, *, field: str) -> Json:
    return {field: list(prompt.ids)}


_USAGE = {"stream_options": {"include_usage": True}}
_IDS = {"return_token_ids": True}
_AS_IDS = {"return_tokens_as_token_ids": True}
_NATIVE = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}

DIALECTS: tuple[Dialect, ...] = (
    Dialect(
        *("completions", COMPLETIONS, partial(_in_ids, field="prompt"), _openai_whole, _openai_joined),
        names={},
        ids=_IDS,
        logprobs=lambda num_top: {"logprobs": num_top, **_AS_IDS},
        usage=_USAGE,
    ),
    Dialect(
        *("chat", CHAT, _in_message, _openai_whole, _openai_joined),
        names={},
        ids=_IDS,
        logprobs=lambda num_top: {"logprobs": True, "top_logprobs": num_top, **_AS_IDS},
        usage=_USAGE,
    ),
    Dialect(
        *("tokens", TOKENS, partial(_in_ids, field="token_ids"), _openai_whole, _openai_joined),
        names={},
        nested="sampling_params",
        ids=_IDS,
        logprobs=lambda num_top: {"sampling_params": {"logprobs": num_top}},
        usage=_USAGE,
    ),
    Dialect(
        *("generate", GENERATE, partial(_in_ids, field="input_ids"), _native_whole, _native_joined),
        names=_NATIVE,
        nested="sampling_params",
        ids={"return_prompt_token_ids": True},
        logprobs=lambda num_top: {"return_logprob": True, "top_logprobs_num": num_top},
    ),
    Dialect(
        *("responses", RESPONSES, lambda prompt: {"input": prompt.text}, _response, _response_joined),
        names={"max_tokens": "max_output_tokens"},
        logprobs=lambda num_top: {"include": ["message.output_text.logprobs"], "top_logprobs": num_top},
    ),
    Dialect(*("messages", MESSAGES, _in_message, _message, _message_joined), names={"stop": "stop_sequences"}),
)
