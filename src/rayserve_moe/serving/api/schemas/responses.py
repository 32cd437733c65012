"""Body of OpenAI's `/v1/responses`, and its conversion to fields of a chat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field

from rayserve_moe.serving.api.schemas.chat_like import chat_like, shared_fields
from rayserve_moe.serving.api.schemas.field_types import MaxTokens, NumTopLogprobs, RequestBody, RequestId
from rayserve_moe.serving.errors import ApiError

LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text")


class ResponsesPrompt(RequestBody):
    """Input, a string or items, after instructions."""

    input: Annotated[Any, Field(json_schema_extra={"anyOf": [{"type": "string"}, {"type": "array"}]})]
    model: str | None = None
    instructions: str | None = None


@chat_like()
class ResponsesBody(ResponsesPrompt):
    """Input, a string or items, and sampling parameters. Sampling fields are validated as in a chat."""

    max_output_tokens: MaxTokens | None = None
    previous_response_id: RequestId | None = None
    store: bool = True
    stream: bool = False
    tools: Annotated[list[dict[str, Any]], Field(max_length=1024)] = Field(default_factory=list)
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    top_logprobs: NumTopLogprobs = 0
    include: list[str] = Field(default_factory=list)
    request_id: RequestId | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None

    @property
    def has_logprobs(self) -> bool:
        """Return True if the text has log-probs."""
        return bool(self.top_logprobs) or LOGPROBS in self.include


CHAT_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "rid": "request_id",
}
"""Fields of this dialect by chat field, for errors."""


def chat_fields(body: ResponsesBody, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the request as fields of a chat over `messages`.

    Raises: ApiError 400 for unsupported values.
    """
    if set(body.include) - set(_INCLUDED):
        raise ApiError(400, f"`include` can hold {', '.join(_INCLUDED)} and nothing else here", param="include")
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    fields = {**shared_fields(body), "messages": [*system, *messages]}
    fields |= {"max_tokens": body.max_output_tokens, "stream": body.stream}
    fields |= {"model": body.model, "reasoning_effort": (body.reasoning or {}).get("effort")}
    fields |= {"logprobs": body.has_logprobs, "top_logprobs": body.top_logprobs, "rid": body.request_id}
    fields |= {"response_format": _format((body.text or {}).get("format")), **_tools(body)}
    return {name: value for name, value in fields.items() if value is not None}


def messages_of(given: Any) -> list[dict[str, Any]]:
    """Return the chat messages of input items. Consecutive calls are joined into a message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given or not all(isinstance(item, dict) for item in given):
        raise ApiError(400, "`input` should be a string or a list of items", param="input")
    messages: list[dict[str, Any]] = []
    for place, item in enumerate(given):
        for message in _messages_of_item(item, f"input.{place}"):
            last = messages[-1] if messages else {}
            if message["role"] == last.get("role") == "assistant" and (message.keys() | last.keys()) & _JOINED:
                messages[-1] = _joined(last, message)
            else:
                messages.append(message)
    return messages


_JOINED = {"tool_calls", "reasoning_content"}


def _joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    calls = [*one.get("tool_calls", ()), *other.get("tool_calls", ())]
    texts = {
        name: "\n".join(filter(None, (one.get(name), other.get(name)))) or None
        for name in ("content", "reasoning_content")
        if name == "content" or name in one or name in other
    }
    return {**one, **other, **texts, **({"tool_calls": calls} if calls else {})}


def _messages_of_item(item: dict[str, Any], param: str) -> Iterator[dict[str, Any]]:
    match item.get("type", "message"):
        case "message":
            yield {"role": item.get("role"), "content": _content(item, param)}
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            if not all(isinstance(value, str) for value in function.values()):
                raise ApiError(400, f"`{param}`: a call has a name, and arguments as a string", param=param)
            call = {"id": str(item.get("call_id", "")), "type": "function", "function": function}
            yield {"role": "assistant", "content": None, "tool_calls": [call]}
        case "function_call_output":
            text = _text_of(item.get("output"), param)
            yield {"role": "tool", "tool_call_id": str(item.get("call_id", "")), "content": text}
        case "reasoning":
            if text := _text_of(item.get("content"), param):
                yield {"role": "assistant", "content": None, "reasoning_content": text}
        case _:
            raise ApiError(400, f"`{param}`: items of this type are not supported here", param=param)


def _content(item: dict[str, Any], param: str) -> str | list[dict[str, str]]:
    """Return the content of a chat message; several texts become the lines of an answer, or parts otherwise."""
    texts = _texts_of(item.get("content"), param)
    if item.get("role") == "assistant" or len(texts) < 2:
        return "\n".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _text_of(content: Any, param: str) -> str:
    return "\n".join(_texts_of(content, param))


def _texts_of(content: Any, param: str) -> list[str]:
    if content is None or isinstance(content, str):
        return [content or ""]
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise ApiError(400, f"`{param}` should hold text: other parts are not supported here", param=param)
    return [part["text"] for part in parts]


def _tools(body: ResponsesBody) -> dict[str, Any]:
    if not all(tool.get("type") == "function" for tool in body.tools):
        raise ApiError(400, "`tools`: only tools of type function are supported", param="tools")
    names = ("name", "description", "parameters", "strict")
    tools = [
        {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}
        for tool in body.tools
    ]
    choice = body.tool_choice
    if isinstance(choice, dict):
        choice = {"type": choice.get("type"), "function": {"name": choice.get("name")}}
    if not tools:
        return {"tool_choice": choice}
    return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": body.parallel_tool_calls}


def _format(wanted: Any) -> Any:
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        return wanted
    return {"type": "json_schema", "json_schema": {k: v for k, v in wanted.items() if k != "type"}}
