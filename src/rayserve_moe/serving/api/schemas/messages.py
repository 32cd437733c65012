"""Bodies of Anthropic's `/v1/messages` and `/v1/messages/count_tokens`, and their conversion to fields of a chat."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field

from rayserve_moe.serving.api.schemas.chat_like import chat_like, shared_fields
from rayserve_moe.serving.api.schemas.field_types import MaxTokens, RequestBody
from rayserve_moe.serving.errors import ApiError

CHAT_NAMES = {
    "thinking_token_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}
"""Fields of this dialect by chat field, for errors."""
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
Blocks = Annotated[list[dict[str, Any]], Field(max_length=4096)]


class CountTokensBody(RequestBody):
    """Prompt: messages, system text and tools. `thinking` is on, off or the template's default."""

    model: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    system: Annotated[Any, Field(json_schema_extra={"anyOf": [{"type": "string"}, {"type": "array"}]})] = None
    tools: Blocks = Field(default_factory=list)
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


@chat_like(without=("stop", "thinking_token_budget"))
class MessagesBody(CountTokensBody):
    """Prompt with sampling parameters."""

    max_tokens: MaxTokens
    stop_sequences: list[str] = Field(default_factory=list)
    stream: bool = False


def chat_fields(body: CountTokensBody) -> dict[str, Any]:
    """Return the request as fields of `/v1/chat/completions`.

    Raises: ApiError 400 for a block that is neither text nor a tool.
    """
    system = _content(_texts(body.system, "system"))
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for place, message in enumerate(body.messages):
        messages += _messages_of(message, f"messages.{place}")
    fields: dict[str, Any] = {**shared_fields(body), "messages": messages, "model": body.model}
    fields |= {**_tools(body), **_thinking(body)}
    if messages and _is_begun_answer(messages[-1]):
        fields["continue_final_message"] = True
    config = body.output_config or {}
    fields |= {"reasoning_effort": config.get("effort"), "response_format": _format(config.get("format"))}
    if isinstance(body, MessagesBody):
        fields |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences or None, "stream": body.stream}
    return {name: value for name, value in fields.items() if value is not None}


def _is_begun_answer(message: dict[str, Any]) -> bool:
    """Return True for a final assistant message with content, which the model continues."""
    return message["role"] == "assistant" and bool(message.get("content")) and "tool_calls" not in message


def _texts(value: Any, param: str) -> list[str]:
    """Return the non-empty texts of a string or of text blocks.

    Raises: ApiError 400 for a block of another type.
    """
    if value is None or isinstance(value, str):
        return [value] if value else []
    blocks = value if isinstance(value, list) else [value]
    return [text for block in blocks if (text := _text(block, param))]


def _content(texts: Sequence[str]) -> str | list[dict[str, str]]:
    """Return the content of a chat message: a string, or parts for several texts."""
    return "".join(texts) if len(texts) < 2 else [{"type": "text", "text": text} for text in texts]


def _text(block: Any, param: str) -> str:
    if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
        raise ApiError(400, f"`{param}` should hold text: other kinds of blocks are not supported here", param=param)
    return block["text"]


def _messages_of(message: dict[str, Any], param: str) -> Iterator[dict[str, Any]]:
    """Yield the chat messages of a message: tool results come before the user's text beside them."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise ApiError(400, f"`{param}.role` should be user, assistant or system", param=f"{param}.role")
    if isinstance(content, str) or role == "system":
        yield {"role": role, "content": _content(_texts(content, f"{param}.content"))}
        return
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise ApiError(400, f"`{param}.content` should be a string or a list of blocks", param=f"{param}.content")
    if role == "assistant":
        yield _assistant(content, f"{param}.content")
        return
    for block in content:
        if block.get("type") == "tool_result":
            text = "\n".join(_texts(block.get("content"), f"{param}.content"))
            yield {"role": "tool", "tool_call_id": str(block.get("tool_use_id", "")), "content": text}
    said = [block for block in content if block.get("type") != "tool_result"]
    if said:
        yield {"role": "user", "content": _content(_texts(said, f"{param}.content"))}


def _assistant(blocks: Sequence[dict[str, Any]], param: str) -> dict[str, Any]:
    spoken, calls, thoughts = [], [], []
    for block in blocks:
        match block.get("type"):
            case "tool_use":
                if not isinstance(block.get("name"), str) or not isinstance(block.get("input", {}), dict):
                    raise ApiError(400, f"`{param}`: a tool_use has a name, and an object as input", param=param)
                arguments = json.dumps(block.get("input", {}), ensure_ascii=False)
                function = {"name": block["name"], "arguments": arguments}
                calls.append({"id": str(block.get("id", "")), "type": "function", "function": function})
            case "thinking":
                thoughts.append(str(block.get("thinking", "")))
            case "redacted_thinking":
                continue
            case _:
                spoken += _texts(block, param)
    message: dict[str, Any] = {"role": "assistant", "content": _content(spoken) or ("" if not calls else None)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message


def _tools(body: CountTokensBody) -> dict[str, Any]:
    tools = []
    for tool in body.tools:
        if tool.get("type") not in (None, "custom"):
            raise ApiError(400, "`tools`: only tools with an `input_schema` are supported", param="tools")
        names = {"name": "name", "description": "description", "input_schema": "parameters"}
        function = {name: tool[theirs] for theirs, name in names.items() if tool.get(theirs) is not None}
        tools.append({"type": "function", "function": function})
    choice = body.tool_choice or {}
    kind, name = choice.get("type", "auto"), choice.get("name")
    if kind == "tool" and isinstance(name, str):
        chosen: Any = {"type": "function", "function": {"name": name}}
    elif isinstance(kind, str) and kind in _TOOL_CHOICES:
        chosen = _TOOL_CHOICES[kind]
    else:
        raise ApiError(400, "`tool_choice.type` should be auto, any, tool or none", param="tool_choice")
    if not tools:
        return {"tool_choice": chosen}
    return {"tools": tools, "tool_choice": chosen, "parallel_tool_calls": not choice.get("disable_parallel_tool_use")}


def _thinking(body: CountTokensBody) -> dict[str, Any]:
    """Return the chat fields for `thinking`: the template's switch, and a separate budget."""
    thinking = body.thinking or {}
    kind = thinking.get("type", "adaptive")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise ApiError(400, "`thinking.type` should be enabled, disabled or adaptive", param="thinking")
    given: dict[str, Any] = {"thinking_token_budget": thinking.get("budget_tokens")} if kind == "enabled" else {}
    switch = {} if kind == "adaptive" else {"enable_thinking": kind == "enabled"}
    options = switch | (body.chat_template_kwargs or {})
    return {**given, "chat_template_kwargs": options} if options else given


def _format(wanted: Any) -> Any:
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        return wanted
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted.get("schema")}}
