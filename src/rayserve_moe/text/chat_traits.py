"""Traits of a chat template: the text that it drops or refuses, found by rendering small conversations."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

REFUSALS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Exceptions by which a template refuses messages."""
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message that hold its reasoning, by descending preference."""
PARAGRAPH = "\n\n"

Messages = Sequence[Mapping[str, Any]]
_Render = Callable[[Messages], str | None]

_ARGUMENTS, _VALUE = '{"color":  "teal"}', "teal"
_QUOTED = re.compile(f"[\"']{_VALUE}[\"']")
_NAME, _ID, _LONG_ID = "peel", "a1b2c3d4e", "call_a1b2c3d4e5f6"
_RULES, _OTHER_RULES, _SAID, _DONE = "be wise", "stay calm", "one moment", "all done"
_USER = {"role": "user", "content": "hello"}


class TemplateTraits(NamedTuple):
    """Message forms that a template reads. Traits of calls have defaults if it refuses or drops the simplest call."""

    part_separator: str = "\n"
    """Text that the template writes between text parts; newline for a template that takes content only as text."""
    takes_argument_text: bool = False
    """True if arguments given as JSON text appear unchanged, and objects in no other form than JSON or Python's."""
    splits_calls_from_content: bool = False
    """True if content and calls of a message only appear as two messages."""
    takes_one_call: bool = False
    """True if a message with two calls is refused or loses a call."""
    joins_reasoning_to_content: bool = False
    """True if reasoning and content beside calls are refused together."""
    shortens_call_ids: bool = False
    """True if ids of nine characters are accepted and longer ones are refused."""
    names_calls_by_id: bool = False
    """True if the name of a function appears only as part of the call's id."""
    names_results: bool = False
    """True if results are refused without the name of their function."""
    moves_system_to_front: bool = False
    """True if a system message is refused or dropped after another message."""
    folds_system_into_user: bool = False
    """True if the system message appears in the last user message, and only if no message follows it."""


def traits_of(template: str, *, special_tokens: Mapping[str, Any]) -> TemplateTraits:
    """Return the traits of a template; each template is examined once."""
    tokens = {name: token for name, token in special_tokens.items() if isinstance(token, str)}
    return _traits_of(template, tuple(sorted(tokens.items())))


@lru_cache(maxsize=32)
def _traits_of(template: str, special_tokens: tuple[tuple[str, str], ...]) -> TemplateTraits:
    render = partial(_rendered, template=template, special_tokens=dict(special_tokens))
    parts = [{"type": "text", "text": text} for text in (_SAID, _DONE)]
    traits = TemplateTraits(
        part_separator="" if _shows(render, [{"role": "user", "content": parts}], _SAID + _DONE) else "\n",
        moves_system_to_front=_moves_system_to_front(render),
        folds_system_into_user=_folds_system_into_user(render),
        takes_argument_text=_takes_argument_text(render),
    )
    arguments = _ARGUMENTS if traits.takes_argument_text else {"color": _VALUE}
    if not _shows(render, [_USER, _calling(arguments)], _VALUE):
        return traits
    return _with_traits_of_calls(traits, partial(_calling, arguments), render=render)


def _with_traits_of_calls(
    traits: TemplateTraits, calling: Callable[..., dict[str, Any]], *, render: _Render
) -> TemplateTraits:
    """Return the traits completed for a template that shows calls; `calling` builds a message with calls."""
    call = calling()
    spoken = calling(content=_SAID)
    reasoned = spoken | dict.fromkeys(REASONING_NAMES, _DONE)
    several = {"role": "assistant", "tool_calls": [*call["tool_calls"], *calling(call_id=_ID[::-1])["tool_calls"]]}
    both = render([_USER, several])
    result = {"role": "tool", "tool_call_id": _ID, "content": _DONE}
    names_results = render([_USER, call, result]) is None and render([_USER, call, result | {"name": _NAME}])
    last = result | ({"name": _NAME} if names_results else {})
    apart = [_USER, {"role": "assistant", "content": _SAID}, call, last, {"role": "assistant", "content": _DONE}, _USER]
    keeps_content = _shows(render, [_USER, spoken], _SAID, _VALUE)
    shows_name = _shows(render, [_USER, call], _NAME)
    return traits._replace(
        splits_calls_from_content=not keeps_content and _shows(render, apart, _SAID, _VALUE),
        takes_one_call=both is None or both.count(_VALUE) < 2,
        joins_reasoning_to_content=keeps_content and render([_USER, reasoned]) is None,
        shortens_call_ids=render([_USER, calling(call_id=_LONG_ID)]) is None,
        names_calls_by_id=not shows_name and _shows(render, [_USER, calling(call_id=f"functions.{_NAME}:0")], _NAME),
        names_results=bool(names_results),
    )


def _takes_argument_text(render: _Render) -> bool:
    rendered = render([_USER, _calling({"color": _VALUE})])
    has_own_form = rendered is not None and _VALUE in rendered and not _QUOTED.search(rendered)
    return not has_own_form and _shows(render, [_USER, _calling(_ARGUMENTS)], _ARGUMENTS)


def _moves_system_to_front(render: _Render) -> bool:
    first, other = ({"role": "system", "content": rules} for rules in (_RULES, _OTHER_RULES))
    answer = {"role": "assistant", "content": _SAID}
    later = ([first, other, _USER], [first, _USER, answer, other, _USER])
    is_shown = _shows(render, [first, _USER], _RULES)
    return is_shown and not all(_shows(render, messages, _RULES, _OTHER_RULES) for messages in later)


def _folds_system_into_user(render: _Render) -> bool:
    system, answer = {"role": "system", "content": _RULES}, {"role": "assistant", "content": _SAID}
    folded = {"role": "user", "content": _RULES + PARAGRAPH + _USER["content"]}
    shown, later = render([system, _USER]), render([system, _USER, answer])
    return shown is not None and later is not None and shown == render([folded]) and _RULES not in later


def _calling(arguments: Any, *, call_id: str = _ID, **others: Any) -> dict[str, Any]:
    function = {"name": _NAME, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": call_id, "type": "function", "function": function}], **others}


def _shows(render: _Render, messages: Messages, *texts: str) -> bool:
    """Return True if the template accepts the messages and writes these texts."""
    rendered = render(messages)
    return rendered is not None and all(text in rendered for text in texts)


def _rendered(messages: Messages, *, template: str, special_tokens: Mapping[str, Any]) -> str | None:
    """Return the rendered messages, with empty text for missing content if only this is accepted; None if refused."""
    for written in (messages, [{"content": "", **message} for message in messages]):
        try:
            (rendered,), _ = render_jinja_template(
                conversations=[[dict(message) for message in written]], chat_template=template, **special_tokens
            )
        except REFUSALS:
            continue
        return str(rendered)
    return None
