"""Messages of a conversation in the form that a chat template reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rayserve_moe.text.chat_traits import PARAGRAPH, REASONING_NAMES, TemplateTraits

Message = dict[str, Any]

_TESTS_FOR_NONE = re.compile(r"(\bcontent['\"]?\]?)(\s+is\s+(?:not\s+)?none\b)")
_LEADING_ROLES = ("system", "developer")
_NAMED_ID = "functions.{name}:"
_SHORT_ID = 9
_EMPTY_TOOL = {"description": "", "parameters": {"type": "object", "properties": {}}}


def with_missing_content(template: str) -> str:
    """Return the template with missing content treated as none in its `is none` tests.

    transformers removes null fields before it renders; without this change such templates drop the message's calls.
    """
    return _TESTS_FOR_NONE.sub(r"\1|default(none)\2", template)


def conversation_for(template: str, messages: Sequence[Mapping[str, Any]], *, traits: TemplateTraits) -> list[Message]:
    """Return the messages as a template with these traits reads them; arguments of calls stay unchanged."""
    written = [
        with_reasoning(_with_calls(_with_joined_parts(with_known_role(message, template=template), traits=traits)))
        for message in messages
    ]
    if traits.moves_system_to_front:
        written = _with_first_system(written)
    if traits.folds_system_into_user:
        written = _with_folded_system(written)
    return list(_with_turns_of_calls(written, traits=traits))


def with_known_role(message: Mapping[str, Any], *, template: str) -> Message:
    """Return the message under a role that templates know.

    `developer` becomes `system` if the template does not mention it, and OpenAI's former `function` becomes `tool`.
    """
    if message["role"] == "developer" and "developer" not in template:
        return {**message, "role": "system"}
    return {**message, "role": "tool"} if message["role"] == "function" else dict(message)


def with_reasoning(message: Mapping[str, Any]) -> Message:
    """Return a message with its reasoning under all names that templates read."""
    given = next((message[name] for name in REASONING_NAMES if message.get(name)), None)
    return {**message, **dict.fromkeys(REASONING_NAMES, given)} if isinstance(given, str) else dict(message)


def with_arguments(message: Mapping[str, Any], *, as_objects: bool) -> Message:
    """Return a message whose calls have arguments as objects or as JSON text; missing arguments become `{}`."""
    calls = _calls(message)
    return {**message, "tool_calls": [_with_arguments(call, as_objects) for call in calls]} if calls else dict(message)


def filled(message: Mapping[str, Any]) -> Message:
    """Return a message with empty text as its content if it has none."""
    return {**message, "content": message.get("content") or ""}


def filled_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool with an empty description and no parameters if it lacks them."""
    function = tool.get("function")
    if not isinstance(function, dict):
        return dict(tool)
    lacking = {name: value for name, value in _EMPTY_TOOL.items() if function.get(name) is None}
    return {**tool, "function": function | lacking}


def _calls(message: Mapping[str, Any]) -> list[Any]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) else []


def _with_joined_parts(message: Message, *, traits: TemplateTraits) -> Message:
    """Return a message with its text parts joined: by newlines in a result, else by the template's separator."""
    content = message.get("content") or ""
    if not isinstance(content, list):
        return {**message, "content": content}
    separator = "\n" if message["role"] == "tool" else traits.part_separator
    return {**message, "content": separator.join(part["text"] for part in content)}


def _with_calls(message: Message) -> Message:
    """Return a message without an empty list of calls; content that is empty beside calls becomes None.

    OpenAI's former `function_call` becomes a call, and a call without a type has the type `function`.
    """
    former = message.get("function_call")
    calls = _calls(message) or ([{"function": former}] if isinstance(former, dict) else [])
    if not calls:
        return {name: value for name, value in message.items() if name != "tool_calls" or value != []}
    others = {name: value for name, value in message.items() if name != "function_call"}
    typed = [{"type": "function", **call} if isinstance(call, dict) else call for call in calls]
    return {**others, "content": message.get("content") or None, "tool_calls": typed}


def _with_first_system(messages: Sequence[Message]) -> list[Message]:
    """Return messages with all system content joined by paragraphs in a single message at the front."""
    leading = [message for message in messages if message["role"] in _LEADING_ROLES]
    if leading in ([], messages[:1]):
        return list(messages)
    content = PARAGRAPH.join(message["content"] for message in leading if message.get("content"))
    others = [message for message in messages if message["role"] not in _LEADING_ROLES]
    return [{**leading[0], "content": content}, *others]


def _with_folded_system(messages: Sequence[Message]) -> list[Message]:
    """Return messages with the content of a leading system message moved to the front of the last user message."""
    *_, last = (None, *(place for place, message in enumerate(messages) if message["role"] == "user"))
    if last is None or messages[0]["role"] != "system" or not messages[0].get("content"):
        return list(messages)
    content = messages[0]["content"] + PARAGRAPH + (messages[last].get("content") or "")
    return [*messages[1:last], {**messages[last], "content": content}, *messages[last + 1 :]]


def _with_turns_of_calls(messages: Sequence[Message], *, traits: TemplateTraits) -> Iterator[Message]:
    """Yield the messages, with results in the order of their calls, and calls in the form that the template reads."""
    place, num_calls = 0, 0
    while place < len(messages):
        message, place = messages[place], place + 1
        calls = _calls(message)
        if not calls:
            yield message
            continue
        first = place
        while place < len(messages) and messages[place]["role"] == "tool":
            place += 1
        results = _results_by_call(calls, messages[first:place])
        renamed = [_renamed(call, traits=traits, number=num_calls + index) for index, call in enumerate(calls)]
        num_calls += len(calls)
        answers = [
            [_with_names_of(call, result, traits=traits) for result in taken]
            for call, taken in zip(renamed, results, strict=True)
        ]
        yield from _turn({**message, "tool_calls": renamed}, answers, traits=traits)


def _results_by_call(calls: Sequence[Any], results: Sequence[Message]) -> list[list[Message]]:
    """Return the results of each call: by its id, else by their order."""
    indices = {call.get("id"): index for index, call in enumerate(calls) if isinstance(call, dict)}
    taken: list[list[Message]] = [[] for _ in calls]
    for position, result in enumerate(results):
        call_id = result.get("tool_call_id")
        by_order = min(position, len(calls) - 1)
        taken[indices.get(call_id, by_order) if isinstance(call_id, str) else by_order].append(result)
    return taken


def _turn(message: Message, answers: Sequence[list[Message]], *, traits: TemplateTraits) -> Iterator[Message]:
    """Yield a message with calls and their results, split into messages that the template accepts."""
    said = message.get("content")
    if said and traits.joins_reasoning_to_content:
        message = _with_reasoning_as_content(message)
    if said and traits.splits_calls_from_content:
        yield {name: value for name, value in message.items() if name != "tool_calls"}
        message = {"role": message["role"], "tool_calls": message["tool_calls"]}
    if not traits.takes_one_call:
        yield message
    for index, (call, taken) in enumerate(zip(message["tool_calls"], answers, strict=True)):
        if traits.takes_one_call:
            yield {**(message if index == 0 else {"role": message["role"]}), "tool_calls": [call]}
        yield from taken


def _with_reasoning_as_content(message: Message) -> Message:
    """Return a message with its reasoning as the first paragraph of its content."""
    reasoning = message.get(REASONING_NAMES[0])
    if not isinstance(reasoning, str):
        return message
    others = {name: value for name, value in message.items() if name not in REASONING_NAMES}
    return {**others, "content": reasoning + PARAGRAPH + message["content"]}


def _renamed(call: Any, *, traits: TemplateTraits, number: int) -> Any:
    """Return a call with an id that the template can show; `number` counts the calls of the conversation."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    given = call.get("id")
    call_id = given if isinstance(given, str) else ""
    if traits.names_calls_by_id:
        start = _NAMED_ID.format(name=function.get("name"))
        return {**call, "id": call_id if call_id.startswith(start) else f"{start}{number}"}
    if traits.shortens_call_ids and len(call_id) != _SHORT_ID:
        kept = re.sub(r"[^a-zA-Z0-9]", "", call_id) or str(number)
        return {**call, "id": kept[-_SHORT_ID:].rjust(_SHORT_ID, "0")}
    return call


def _with_names_of(call: Any, result: Message, *, traits: TemplateTraits) -> Message:
    """Return a result with its call's id if ids are renamed, and with its function's name if the template needs it."""
    if not isinstance(call, dict):
        return result
    if traits.names_calls_by_id or traits.shortens_call_ids:
        result = {**result, "tool_call_id": call.get("id")}
    if traits.names_results and isinstance(call.get("function"), dict):
        result = {"name": call["function"].get("name"), **result}
    return result


def _with_arguments(call: Any, as_objects: bool) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    given = function.get("arguments")
    if given is None or given == "":
        given = {}
    if as_objects and isinstance(given, str):
        given = _object(given)
    elif not as_objects and isinstance(given, dict):
        given = json.dumps(given, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": given}}


def _object(text: str) -> Any:
    """Return the object of a JSON text, or other text unchanged."""
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
