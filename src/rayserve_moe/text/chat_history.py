"""Messages of a conversation in the form that chat templates read: calls with their arguments, and reasoning."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_READS_TEXT = re.compile(r"arguments['\"\])]*\s+is\s+string")
_ASKS_FOR_NONE = re.compile(r"(\bcontent['\"]?\]?)(\s+is\s+(?:not\s+)?none\b)")


def argument_forms(template: str) -> tuple[bool, bool]:
    """Return whether to give arguments as objects, at first and where the template refuses that.

    Templates that ask whether arguments are a string take it as it stands; most others expect an object, and some can
    only append text.
    """
    return (False, True) if _READS_TEXT.search(template) else (True, False)


def with_missing_content(template: str) -> str:
    """Return the template with missing content treated as none in its `is none` tests.

    transformers removes null fields before it renders; without this change such templates drop the message's calls.
    """
    return _ASKS_FOR_NONE.sub(r"\1|default(none)\2", template)


def with_known_role(message: Mapping[str, Any], *, template: str) -> dict[str, Any]:
    """Return the message with the role `system` if it is `developer` and the template does not mention that role."""
    is_unknown = message["role"] == "developer" and "developer" not in template
    return {**message, "role": "system"} if is_unknown else dict(message)


def with_calls(message: Mapping[str, Any], *, as_objects: bool) -> dict[str, Any]:
    """Return a message whose calls have arguments as objects or as JSON text; missing arguments become `{}`."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return dict(message)
    return {**message, "tool_calls": [_with_arguments(call, as_objects) for call in calls]}


def with_reasoning(message: Mapping[str, Any], *, template: str) -> dict[str, Any]:
    """Return a message with its reasoning under all names that templates read; `thinking` where they know no other."""
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if not isinstance(reasoning, str):
        return dict(message)
    named = {"reasoning": reasoning, "reasoning_content": reasoning}
    is_taken = message.get("content") and message.get("tool_calls")
    if "reasoning_content" not in template and "thinking" in template and not is_taken:
        named["thinking"] = reasoning
    return {**message, **named}


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
    """The object of a JSON text; other text as it stands."""
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
