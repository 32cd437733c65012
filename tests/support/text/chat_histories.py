"""Conversations as clients send them, by name. Every text holds a marker, `m` and digits, once in its conversation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Message = Mapping[str, Any]


class History(NamedTuple):
    """Messages, and the fields of a chat that reach its template."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, Any] = {}
    continues: bool = False
    """True if the answer continues the last message."""
    opens_answer: bool = True
    """False if the prompt ends with the last message."""


def _said(role: str, content: Any, **others: Any) -> Message:
    return {"role": role, "content": content, **others}


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def _call(marker: int, *, call_id: str = "call00001", **function: Any) -> dict[str, Any]:
    """Return a call of `find_m<marker>` with the next marker as its argument."""
    arguments = json.dumps({"place": f"hall m{marker + 1}"})
    function = {"name": f"find_m{marker}", "arguments": arguments} | function
    return {"id": call_id, "type": "function", "function": function}


def _calling(*calls: Any, **others: Any) -> Message:
    return {"role": "assistant", "tool_calls": list(calls), **others}


def _result(content: Any, call_id: str = "call00001", **others: Any) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": content, **others}


def _tool(marker: int, **function: Any) -> dict[str, Any]:
    properties = {"place": {"type": "string", "description": f"A place m{marker + 2}"}}
    parameters = {"type": "object", "properties": properties, "required": ["place"]}
    described = {"name": f"find_m{marker}", "description": f"Finds m{marker + 1}", "parameters": parameters}
    return {"type": "function", "function": described | function}


USER, AGAIN = _said("user", "Where is it? m10"), _said("user", "And now? m11")
SYSTEM, ANSWER = _said("system", "Be brief. m12"), _said("assistant", "In the hall. m13")
CALL, OTHER = _call(20), _call(30, call_id="call00002")
RESULT, OTHER_RESULT = _result("found m40"), _result("lost m41", "call00002")
THOUGHT, LATER_THOUGHT = "I wonder m50", "I see m51"
BARE_TOOL = {"type": "function", "function": {"name": "find_m60"}}

HISTORIES: Mapping[str, History] = {
    "user": History([USER]),
    "system and user": History([SYSTEM, USER]),
    "developer": History([_said("developer", "Be exact. m14"), USER]),
    "system and developer": History([SYSTEM, _said("developer", "Be exact. m14"), USER]),
    "two systems": History([SYSTEM, _said("system", "Be kind. m15"), USER]),
    "system in the middle": History([SYSTEM, USER, ANSWER, _said("system", "Be kind. m15"), AGAIN]),
    "system only in the middle": History([USER, ANSWER, SYSTEM, AGAIN]),
    "several turns": History([SYSTEM, USER, ANSWER, AGAIN]),
    "consecutive users": History([USER, AGAIN]),
    "consecutive assistants": History([USER, ANSWER, _said("assistant", "Or not. m16"), AGAIN]),
    "assistant first": History([ANSWER, USER]),
    "one part": History([_said("user", _parts("Where? m70"))]),
    "several parts": History([_said("system", _parts("Be m70", "brief m71")), _said("user", _parts("a m72", "b m73"))]),
    "no parts": History([_said("user", []), ANSWER, AGAIN]),
    "parts of an answer": History([USER, _said("assistant", _parts("here m74", "there m75")), AGAIN]),
    "answer of null": History([USER, _said("assistant", None), AGAIN]),
    "answer without content": History([USER, {"role": "assistant"}, AGAIN]),
    "empty answer": History([USER, _said("assistant", ""), AGAIN]),
    "call": History([USER, _calling(CALL), RESULT]),
    "call beside null": History([USER, _calling(CALL, content=None), RESULT, ANSWER, AGAIN]),
    "call beside empty content": History([USER, _calling(CALL, content=""), RESULT, ANSWER, AGAIN]),
    "call beside content": History([USER, _calling(CALL, content="A moment. m17"), RESULT, ANSWER, AGAIN]),
    "call beside parts": History([USER, _calling(CALL, content=_parts("A moment. m17")), RESULT]),
    "system before a call": History([SYSTEM, USER, _calling(CALL), RESULT]),
    "arguments as an object": History(
        [USER, _calling(_call(20, arguments={"place": "hall m21", "n": [1, None]})), RESULT]
    ),
    "arguments with other spaces": History([USER, _calling(_call(20, arguments='{"place":"m21",  "n":1}')), RESULT]),
    "empty arguments": History([USER, _calling(_call(20, arguments="")), RESULT]),
    "null arguments": History([USER, _calling(_call(20, arguments=None)), RESULT]),
    "no arguments": History(
        [USER, _calling({"id": "call00001", "type": "function", "function": {"name": "find_m20"}}), RESULT]
    ),
    "arguments that are no object": History([USER, _calling(_call(20, arguments='["m21"]')), RESULT]),
    "arguments that are no JSON": History([USER, _calling(_call(20, arguments='{"place": m21')), RESULT]),
    "call without a type": History([USER, _calling({k: v for k, v in CALL.items() if k != "type"}), RESULT]),
    "no calls": History([USER, _said("assistant", "None. m18", tool_calls=[]), AGAIN]),
    "parallel calls": History([USER, _calling(CALL, OTHER), RESULT, OTHER_RESULT]),
    "parallel calls, answered": History([USER, _calling(CALL, OTHER), RESULT, OTHER_RESULT, ANSWER, AGAIN]),
    "results out of order": History([USER, _calling(CALL, OTHER), OTHER_RESULT, RESULT]),
    "one of two results": History([USER, _calling(CALL, OTHER), OTHER_RESULT]),
    "calls in turn": History([USER, _calling(CALL), RESULT, _calling(OTHER), OTHER_RESULT]),
    "foreign ids": History(
        [
            USER,
            _calling(_call(20, call_id="call_9f8e7d6c5b4a")),
            _result("found m40", "call_9f8e7d6c5b4a"),
            ANSWER,
            AGAIN,
        ]
    ),
    "result of parts": History([USER, _calling(CALL), _result(_parts("found m40", "twice m42"))]),
    "empty result": History([USER, _calling(CALL), _result("")]),
    "null result": History([USER, _calling(CALL), _result(None)]),
    "result without a call": History([USER, RESULT]),
    "former names": History(
        [
            USER,
            {"role": "assistant", "content": None, "function_call": CALL["function"]},
            {"role": "function", "name": "find", "content": "found m40"},
        ]
    ),
    "reasoning": History([USER, _said("assistant", "In the hall. m13", reasoning_content=THOUGHT), AGAIN]),
    "reasoning, vLLM's name": History([USER, _said("assistant", "In the hall. m13", reasoning=THOUGHT), AGAIN]),
    "reasoning within content": History(
        [USER, _said("assistant", f"<think>\n{THOUGHT}\n</think>\n\nHere. m13"), AGAIN]
    ),
    "reasoning before a call": History([USER, _calling(CALL, reasoning_content=THOUGHT), RESULT]),
    "reasoning, gpt-oss' name": History([USER, _calling(CALL, thinking=THOUGHT), RESULT]),
    "reasoning and content before a call": History(
        [USER, _calling(CALL, content="A moment. m17", reasoning_content=THOUGHT), RESULT]
    ),
    "reasoning between calls": History(
        [
            USER,
            _calling(CALL, reasoning_content=THOUGHT),
            RESULT,
            _calling(OTHER, reasoning_content=LATER_THOUGHT),
            OTHER_RESULT,
        ]
    ),
    "last message continued": History([USER, _said("assistant", "In the m19")], continues=True),
    "last message continued after reasoning": History(
        [USER, _said("assistant", "In the m19", reasoning_content=THOUGHT)], continues=True
    ),
    "no answer opened": History(
        [USER, _said("assistant", "In the hall. m13", reasoning_content=THOUGHT)], opens_answer=False
    ),
    "ends with the assistant": History([USER, ANSWER]),
    "tools": History([SYSTEM, USER], tools=[_tool(61), _tool(64)]),
    "tools and calls": History([USER, _calling(CALL), RESULT, ANSWER, AGAIN], tools=[_tool(61)]),
    "tool without description": History([USER], tools=[BARE_TOOL]),
    "names of people": History([_said("user", "Where? m10", name="Zoë <m80>"), ANSWER, AGAIN]),
    "special tokens as text": History([_said("user", "m10 <|im_end|></s><think>m81</think><tool_call> {{ m82 }}")]),
    "unicode": History([_said("user", "Grüße m10 日本語 🙂 \u00a0 \u200b e\u0301"), ANSWER, AGAIN]),
    "spaces around": History([_said("user", "  \n m10 \n\n"), _said("assistant", "\n m13 \t\n"), AGAIN]),
    "long": History([_said("user", "m10 " + "so it goes on and on " * 5000 + "m83")]),
    "enable_thinking true": History([USER, ANSWER, AGAIN], options={"enable_thinking": True}),
    "enable_thinking false": History([USER, ANSWER, AGAIN], options={"enable_thinking": False}),
    "thinking true": History([USER, ANSWER, AGAIN], options={"thinking": True}),
    "thinking false": History([USER, ANSWER, AGAIN], options={"thinking": False}),
    "reasoning_effort": History([USER], options={"reasoning_effort": "high"}),
    "documents": History([USER], options={"documents": [{"doc_id": "1", "title": "A m84", "text": "Some text m85"}]}),
    "unknown role": History([USER, _said("critic", "Not so. m86"), AGAIN]),
}
