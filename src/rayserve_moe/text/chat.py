"""Rendering of chat messages to a prompt by the checkpoint's template, in the sandbox of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from rayserve_moe.text.chat_history import (
    conversation_for,
    filled,
    filled_tool,
    with_arguments,
    with_missing_content,
)
from rayserve_moe.text.chat_traits import REFUSALS, traits_of
from rayserve_moe.text.tokenizer import Tokenizer

# Options of transformers that a request may set besides the template's variables; all others are reserved.
_OPEN_OPTIONS = {"documents", "add_generation_prompt", "continue_final_message", "kwargs"}
_RESERVED = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - _OPEN_OPTIONS
MAX_TRIED = 64
"""Maximum length of a rejected conversation whose messages are rendered in turn to find the faulty message."""


class ChatTemplateError(ValueError):
    """Error for messages that cannot become a prompt: no template, or the template refuses them."""


class ReservedOptionError(ChatTemplateError):
    """Error for template variables under names that a request cannot set."""


@dataclass(frozen=True)
class _Options:
    """Options of one rendering."""

    tools: list[Any] | None
    add_generation_prompt: Any
    continue_final_message: Any
    variables: Mapping[str, Any]
    """Variables of the template by name, as a request gives them."""


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """Render OpenAI messages to the text of a prompt, each in the form that the checkpoint's template reads.

    Content may be text, or a list of text parts. `tools` and `template_kwargs` (`chat_template_kwargs` on the wire)
    reach the template as they are.

    Raises: ChatTemplateError if the template refuses the messages; it names the first message that is refused.
    """
    if not getattr(tokenizer.backing, "chat_template", None):
        raise ChatTemplateError(f"{tokenizer.directory}: the checkpoint has no chat template; send a plain prompt")
    for position, message in enumerate(messages):
        _check_message(message, position)
    if not messages:
        raise ChatTemplateError("messages: at least one message is needed")
    reserved = sorted(_RESERVED.intersection(template_kwargs or {}))
    if reserved:
        raise ReservedOptionError(f"chat_template_kwargs: {', '.join(reserved)} cannot be set by a request")
    given = dict(template_kwargs or {})
    options = _Options(
        [dict(tool) for tool in tools] if tools else None,
        given.pop("add_generation_prompt", add_generation_prompt),
        given.pop("continue_final_message", False),
        given,
    )
    try:
        return _rendered(tokenizer, messages, options)
    except REFUSALS as error:
        place = _refused_place(tokenizer, messages, options, refusal=str(error))
        raise ChatTemplateError(f"{place}the chat template refused the messages: {error}") from error


def _rendered(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], options: _Options) -> str:
    """Render messages and tools as given, or with empty text in missing fields if the template refuses them.

    Raises: an exception in `REFUSALS`, from the form without missing fields.
    """
    tools = options.tools
    template = with_missing_content(str(tokenizer.backing.get_chat_template(None, tools)))
    traits = traits_of(template, special_tokens=tokenizer.backing.special_tokens_map)
    conversation = conversation_for(template, messages, traits=traits)
    whole = [filled(message) for message in conversation]
    described = replace(options, tools=[filled_tool(tool) for tool in tools]) if tools else options
    forms = [(written, given) for given in (options, described) for written in (conversation, whole)]
    for index, (written, given) in enumerate(forms):
        if (written, given) not in forms[:index]:
            try:
                return _applied(tokenizer, written, given, template=template, as_text=traits.takes_argument_text)
            except REFUSALS as error:
                refusal = error
    raise refusal


def _applied(
    tokenizer: Tokenizer,
    conversation: Sequence[Mapping[str, Any]],
    options: _Options,
    *,
    template: str,
    as_text: bool,
) -> str:
    """Render a conversation with the arguments of calls as text or objects, or in the other form if it is refused.

    Raises: an exception in `REFUSALS`, from the form that `as_text` selects.
    """
    forms = [not as_text, as_text] if any(message.get("tool_calls") for message in conversation) else [True]
    refusals: list[Exception] = []
    for as_objects in forms:
        written = [with_arguments(message, as_objects=as_objects) for message in conversation]
        try:
            rendered = tokenizer.backing.apply_chat_template(
                written,
                tools=options.tools,
                chat_template=template,
                add_generation_prompt=options.add_generation_prompt,
                continue_final_message=options.continue_final_message,
                tokenize=False,
                **options.variables,
            )
            return str(rendered)
        except REFUSALS as error:
            refusals.append(error)
    raise refusals[0]


def _refused_place(
    tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], options: _Options, *, refusal: str
) -> str:
    """Return a prefix that names the first message which causes this refusal, or the tools if only they do.

    It is empty if the conversation is long or if only the whole conversation is refused.
    """
    if options.tools and _refusal_of(tokenizer, messages, replace(options, tools=None)) is None:
        return "tools: "
    until = replace(options, add_generation_prompt=False, continue_final_message=False)
    for count in range(1, len(messages) + 1) if len(messages) <= MAX_TRIED else ():
        if _refusal_of(tokenizer, messages[:count], until) == refusal:
            return f"messages[{count - 1}]: "
    return ""


def _refusal_of(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], options: _Options) -> str | None:
    try:
        _rendered(tokenizer, messages, options)
    except REFUSALS as error:
        return str(error)
    return None


def template_text(tokenizer: Tokenizer) -> str:
    """Return the text of the checkpoint's chat templates; empty without a template."""
    template = getattr(tokenizer.backing, "chat_template", None)
    return "\n".join(template.values()) if isinstance(template, dict) else template or ""


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    max_tokens: int | None = None,
    add_special_tokens: bool = False,
    **options: Any,
) -> list[int]:
    """Render OpenAI messages to prompt ids, by the `options` of `render_chat`; the template writes special tokens.

    Raises: TextTooLongError if the rendered text certainly has more than `max_tokens` tokens.
    """
    text = render_chat(tokenizer, messages, **options)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens, max_tokens=max_tokens)


def _check_message(message: Mapping[str, Any], position: int) -> None:
    """Check that a message has a role, and text as its content if any.

    Raises: ChatTemplateError if not.
    """
    if "role" not in message:
        raise ChatTemplateError(f"messages[{position}]: role is missing")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise ChatTemplateError(f"messages[{position}]: content should be text or a list of text parts")
    if not all(map(_is_text_part, content)):
        raise ChatTemplateError(f"messages[{position}]: only content parts of type text are supported")


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
