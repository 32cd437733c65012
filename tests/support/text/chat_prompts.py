"""The law of chat prompts: transformers' rendering of the messages, after the documented choices for the template.

`READINGS` declares by hand how each template reads messages. The code under test derives the same by rendering, and
shares nothing with this module.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from jinja2.exceptions import TemplateError

from rayserve_moe.checkpoints.synthetic_tokenizer import MIN_VOCAB_SIZE, write_tokenizer
from rayserve_moe.text.chat import ChatTemplateError, render_chat
from rayserve_moe.text.tokenizer import Tokenizer
from tests.support.text.chat_histories import HISTORIES, History

Message = dict[str, Any]
MARKER = re.compile(r"m\d\d")
REFUSALS = (TemplateError, LookupError, TypeError, ValueError)


class Reading(NamedTuple):
    """Message forms that a template reads."""

    losses: frozenset[str] = frozenset()
    """Kinds of text (see `kinds_of`) that it drops in some history, also in transformers' rendering."""
    takes_parts: bool = False
    """True if it joins text parts itself."""
    takes_system_parts: bool = True
    """False if it joins text parts itself, but for those of a system message."""
    takes_argument_text: bool = False
    none_test: str = ""
    """Expression for the content that it compares with none before it writes calls."""
    one_call: bool = False
    joins_reasoning: bool = False
    calls_apart: bool = False
    short_ids: bool = False
    ids_with_names: bool = False
    result_names: bool = False
    system_first: bool = False
    system_with_user: bool = False
    described_tools: bool = False


_KINDS_OF_ROLES = {"developer": "system", "tool": "result", "function": "result"} | {
    role: role for role in ("system", "user", "assistant")
}
_FIELDS = frozenset({"name of a person", "document"})
_ROLES = _FIELDS | {"other role"}
_OLD_THOUGHTS = frozenset({"earlier reasoning"})
_THOUGHTS = _OLD_THOUGHTS | {"reasoning", "continued reasoning"}
_CALLS = frozenset({"call", "arguments"})
_SPOKEN = frozenset({"content beside calls"})
_GLM = Reading(_ROLES | _OLD_THOUGHTS, takes_parts=True)
_KIMI = Reading(_OLD_THOUGHTS | {"document", "continued reasoning"}, takes_parts=True)
_QWEN3 = Reading(_ROLES | _OLD_THOUGHTS, takes_argument_text=True)
_MISTRAL = Reading(_FIELDS | _THOUGHTS | _SPOKEN, short_ids=True, system_first=True, system_with_user=True)
_DEEPSEEK = Reading(
    _ROLES | _THOUGHTS | {"tool"}, takes_argument_text=True, none_test="message['content']", calls_apart=True
)

READINGS: Mapping[str, Reading] = {
    "deepseek_v2": Reading(_ROLES | _THOUGHTS | _CALLS | {"tool", "result"}),
    "deepseek_v25": _DEEPSEEK._replace(system_first=True),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v3_0324": Reading(_ROLES | _THOUGHTS | {"tool"}, takes_argument_text=True),
    "deepseek_r1_0528": Reading(_ROLES | _THOUGHTS, takes_argument_text=True),
    "deepseek_v31": Reading(_ROLES | _THOUGHTS, described_tools=True),
    "ernie45": Reading(_ROLES | _THOUGHTS | _CALLS | {"tool", "result"}),
    "gemma4": Reading(
        _FIELDS | _OLD_THOUGHTS | {"continued reasoning", "result"}, takes_parts=True, takes_system_parts=False
    ),
    "glm45": _GLM,
    "glm46": _GLM,
    "glm47": _GLM,
    "glm47_flash": _GLM,
    "gpt_oss": Reading(
        _ROLES | _OLD_THOUGHTS | _SPOKEN, one_call=True, joins_reasoning=True, system_first=True, described_tools=True
    ),
    "granite33": Reading(_FIELDS | _THOUGHTS | _CALLS),
    "granite40": Reading(_THOUGHTS | {"name of a person", "other role"}, takes_parts=True, takes_argument_text=True),
    "hunyuan_a13b": Reading(_ROLES | _THOUGHTS, takes_argument_text=True),
    "hy_v3": Reading(_ROLES | _OLD_THOUGHTS, takes_parts=True),
    "kimi_k2": Reading(_FIELDS | _THOUGHTS, takes_parts=True),
    "kimi_k2_thinking": _KIMI,
    "kimi_k25": _KIMI._replace(takes_argument_text=True, ids_with_names=True),
    "laguna_xs": Reading(_ROLES),
    "ling2": Reading(_ROLES | _OLD_THOUGHTS | {"reasoning"}, takes_argument_text=True),
    "ling3": Reading(_ROLES),
    "minimax_m2": Reading(_ROLES | _OLD_THOUGHTS, takes_parts=True, system_first=True),
    "minimax_m3": Reading(_ROLES, takes_parts=True, system_first=True),
    "ministral3": Reading(_FIELDS | _THOUGHTS, takes_parts=True, takes_argument_text=True, system_first=True),
    "mistral_nemo": _MISTRAL,
    "mistral_nemo_2407": _MISTRAL,
    "mixtral": Reading(_FIELDS | {"tool", "earlier reasoning", "continued reasoning"}, system_first=True),
    "mixtral_8x22b": _MISTRAL,
    "moonlight": Reading(_FIELDS | _THOUGHTS | _CALLS | {"tool"}),
    "olmoe": Reading(_ROLES | _THOUGHTS | _CALLS | {"tool", "result"}),
    "qwen2_moe": Reading(_ROLES | _THOUGHTS, calls_apart=True, result_names=True, described_tools=True),
    "qwen2_moe_plain": Reading(_FIELDS | _THOUGHTS | _CALLS | {"tool"}),
    "qwen3": _QWEN3,
    "qwen3_coder": Reading(_FIELDS | _THOUGHTS),
    "qwen3_instruct": _QWEN3,
    "qwen3_thinking": _QWEN3,
    "step35": Reading(_ROLES | _OLD_THOUGHTS, takes_parts=True),
}


def expected(tokenizer: Tokenizer, history: History, *, reading: Reading) -> str:
    """Return transformers' rendering of a history after the documented choices.

    Raises: an exception in `REFUSALS` if the template refuses.
    """
    template = str(tokenizer.backing.chat_template)
    options: dict[str, Any] = dict(history.options)
    if history.tools:
        options["tools"] = [_described(tool) if reading.described_tools else tool for tool in history.tools]
    messages = [_handed_over(message, template, reading=reading) for message in history.messages]
    messages = list(_turns(_systems(messages, reading=reading), reading=reading))
    if reading.none_test:
        content = reading.none_test
        template = template.replace(
            f"{content} is ", f"({content} if {content} or not message['tool_calls'] else none) is "
        )
    rendered = tokenizer.backing.apply_chat_template(
        messages,
        tokenize=False,
        chat_template=template,
        add_generation_prompt=history.opens_answer and not history.continues,
        continue_final_message=history.continues,
        **options,
    )
    return str(rendered)


def with_template(template: str, *, directory: Path) -> Tokenizer:
    """Return a small tokenizer with a chat template, saved in a directory."""
    directory.mkdir(exist_ok=True)
    write_tokenizer(directory, MIN_VOCAB_SIZE)
    (directory / "chat_template.jinja").write_text(template)
    return Tokenizer(directory)


def check_history(tokenizer: Tokenizer, history: History, *, reading: Reading) -> None:
    """Check that a prompt is as expected, or that its error has the template's reason and names the refused message."""
    wanted = _outcome(tokenizer, history, reading=reading)
    if isinstance(wanted, str):
        assert prompt_of(tokenizer, history) == wanted
        return
    with pytest.raises(ChatTemplateError) as raised:
        prompt_of(tokenizer, history)
    place, _, reason = str(raised.value).partition(": the chat template refused the messages: ")
    assert reason == str(wanted)
    number = int(place.removeprefix("messages[").removesuffix("]"))
    until = History(history.messages[: number + 1], tools=history.tools, options=history.options)
    assert str(_outcome(tokenizer, until, reading=reading)) == reason


def _outcome(tokenizer: Tokenizer, history: History, *, reading: Reading) -> str | Exception:
    try:
        return expected(tokenizer, history, reading=reading)
    except REFUSALS as refusal:
        return refusal


def lost_kinds(tokenizer: Tokenizer) -> set[str]:
    """Return the kinds of text with a marker that some prompt lacks."""
    lost: set[str] = set()
    for history in HISTORIES.values():
        try:
            prompt = prompt_of(tokenizer, history)
        except ChatTemplateError:
            continue
        lost |= {kind for marker, kind in kinds_of(history).items() if marker not in prompt}
    return lost


def prompt_of(tokenizer: Tokenizer, history: History) -> str:
    """Return the prompt of a history by the code under test."""
    continued = {"continue_final_message": True} if history.continues else {}
    return render_chat(
        tokenizer,
        history.messages,
        tools=history.tools,
        template_kwargs={**history.options, **continued},
        add_generation_prompt=history.opens_answer and not history.continues,
    )


def kinds_of(history: History) -> dict[str, str]:
    """Return the kind of text that each marker of a history belongs to."""
    kinds: dict[str, str] = {}
    last_question = max([place for place, each in enumerate(history.messages) if each["role"] == "user"], default=0)
    for place, message in enumerate(history.messages):
        is_last = place == len(history.messages) - 1
        reasoning = "continued reasoning" if is_last else "earlier reasoning" if place < last_question else "reasoning"
        kinds |= _kinds_of_message(message, reasoning=reasoning)
    kinds |= _marked("tool", history.tools)
    return kinds | _marked("document", history.options)


def _marked(kind: str, value: Any) -> dict[str, str]:
    return dict.fromkeys(MARKER.findall(json.dumps(value)), kind)


def _kinds_of_message(message: Mapping[str, Any], *, reasoning: str) -> dict[str, str]:
    calls = message.get("tool_calls") or [{"function": message[name]} for name in ("function_call",) if name in message]
    content, role = message.get("content"), message["role"]
    kinds = _marked("content beside calls" if calls else _KINDS_OF_ROLES.get(role, "other role"), content)
    if role == "assistant" and "</think>" in str(content):
        kinds |= _marked(reasoning, str(content).partition("</think>")[0])
    for name in ("reasoning_content", "reasoning", "thinking"):
        kinds |= _marked(reasoning, message.get(name))
    if role == "user":
        kinds |= _marked("name of a person", message.get("name"))
    for call in calls:
        kinds |= _marked("call", call["function"]["name"]) | _marked("arguments", call["function"].get("arguments"))
    return kinds


def _handed_over(message: Mapping[str, Any], template: str, *, reading: Reading) -> Message:
    """Return a message as vLLM hands it over: text or parts, calls with arguments, no empty list of calls."""
    given: Message = copy.deepcopy(dict(message))
    if given["role"] == "developer" and "developer" not in template:
        given["role"] = "system"
    if given["role"] == "function":
        given["role"] = "tool"
    content = given.get("content") or ""
    if isinstance(content, list) and (not reading.takes_parts or given["role"] == "tool"):
        content = "\n".join(part["text"] for part in content)
    elif isinstance(content, list) and (
        given.get("tool_calls") or (given["role"] == "system" and not reading.takes_system_parts)
    ):
        content = "".join(part["text"] for part in content)
    given["content"] = content
    if given.get("reasoning"):
        given["reasoning_content"] = given["reasoning"]
    if "function_call" in given:
        given["tool_calls"] = [{"function": given.pop("function_call")}]
    if not given.get("tool_calls", True):
        del given["tool_calls"]
    for call in given.get("tool_calls", ()):
        call.setdefault("type", "function")
        call["function"]["arguments"] = _arguments(call["function"].get("arguments"), reading=reading)
    return given


def _arguments(given: Any, *, reading: Reading) -> Any:
    if reading.takes_argument_text:
        return given if isinstance(given, str) and given else json.dumps(given or {})
    try:
        value = json.loads(given) if isinstance(given, str) and given else given
    except ValueError:
        return given
    return value if isinstance(value, dict) else given or {}


def _described(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    empty = {"description": "", "parameters": {"type": "object", "properties": {}}}
    return {**tool, "function": {**empty, **tool["function"]}}


def _systems(messages: list[Message], *, reading: Reading) -> list[Message]:
    """Return messages with system messages at the front, or in the last user message, if the template needs that."""
    said = [message for message in messages if message["role"] in ("system", "developer")]
    if reading.system_first and said and said != messages[:1]:
        others = [message for message in messages if message not in said]
        messages = [{"role": said[0]["role"], "content": "\n\n".join(message["content"] for message in said)}, *others]
    if reading.system_with_user and messages[0]["role"] == "system" and messages[-1]["role"] != "user":
        first, *messages = messages
        last = max(place for place, message in enumerate(messages) if message["role"] == "user")
        messages[last] = {**messages[last], "content": first["content"] + "\n\n" + messages[last]["content"]}
    return messages


def _turns(messages: Sequence[Message], *, reading: Reading) -> Iterator[Message]:
    """Yield messages, with calls and their results in the form that the template needs."""
    queue, number = list(messages), 0
    while queue:
        message = queue.pop(0)
        calls = message.get("tool_calls", [])
        results: list[Message] = []
        while calls and queue and queue[0]["role"] == "tool":
            results.append(queue.pop(0))
        order = [call.get("id") for call in calls]
        if all(result.get("tool_call_id") in order for result in results):
            results.sort(key=lambda result: order.index(result.get("tool_call_id")))
        answered = [result.get("tool_call_id", order[0] if order else None) for result in results]
        for call in calls:
            call["new_id"] = _new_id(call, number, reading=reading)
            number += 1
        owners = [calls[order.index(call_id)] for call_id in answered] if calls else []
        for owner, result in zip(owners, results, strict=True):
            if reading.short_ids or reading.ids_with_names:
                result["tool_call_id"] = owner["new_id"]
            if reading.result_names:
                result.setdefault("name", owner["function"]["name"])
        for call in calls:
            new_id = call.pop("new_id")
            if reading.short_ids or reading.ids_with_names:
                call["id"] = new_id
        yield from _turn(message, results, owners, reading=reading)


def _new_id(call: Message, number: int, *, reading: Reading) -> Any:
    given = call.get("id")
    if reading.ids_with_names:
        return f"functions.{call['function']['name']}:{number}"
    if given is None:
        return f"{number:09}"
    return given if len(given) == 9 else given.replace("_", "")[-9:]


def _turn(message: Message, results: list[Message], owners: list[Message], *, reading: Reading) -> Iterator[Message]:
    calls, content = message.get("tool_calls", []), message["content"]
    reasoning = message.get("reasoning_content") or message.get("thinking")
    if calls and content and reasoning and reading.joins_reasoning:
        message = {"role": "assistant", "content": f"{reasoning}\n\n{content}", "tool_calls": calls}
    if calls and content and reading.calls_apart:
        yield {name: value for name, value in message.items() if name != "tool_calls"}
        message = {"role": "assistant", "content": "", "tool_calls": calls}
    if not calls or not reading.one_call:
        yield message
        yield from results
        return
    for call in calls:
        yield {**message, "tool_calls": [call]}
        yield from (result for owner, result in zip(owners, results, strict=True) if owner is call)
        message = {"role": "assistant", "content": ""}
