"""Chat messages to a prompt, by the checkpoint's template, in the sandbox of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from rayserve_moe.text.chat_history import (
    argument_forms,
    with_calls,
    with_known_role,
    with_missing_content,
    with_reasoning,
)
from rayserve_moe.text.tokenizer import Tokenizer

# What a template may be given by name besides its own variables; every other option of transformers is ours to set.
_OPEN_OPTIONS = {"documents", "add_generation_prompt", "continue_final_message", "kwargs"}
_RESERVED = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - _OPEN_OPTIONS
MOST_TRIED = 64
"""Maximum length of a rejected conversation whose messages are rendered one by one to find the faulty one."""
_REFUSALS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class ChatTemplateError(ValueError):
    """Messages that cannot become a prompt: no template, or the template refuses them."""


class ReservedOptionError(ChatTemplateError):
    """Variables for the template under names that are not for requests."""


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """Render OpenAI messages to the text of a prompt.

    Content may be a string, or a list of text parts, which are joined by newlines. `tools` and `template_kwargs`
    (`chat_template_kwargs` on the wire) reach the template as they are, calls and reasoning as it reads them.
    """
    if not getattr(tokenizer.backing, "chat_template", None):
        raise ChatTemplateError(f"{tokenizer.directory}: the checkpoint has no chat template; send a plain prompt")
    conversation = [_plain(message, position) for position, message in enumerate(messages)]
    if not conversation:
        raise ChatTemplateError("messages: at least one message is needed")
    reserved = sorted(_RESERVED.intersection(template_kwargs or {}))
    if reserved:
        raise ReservedOptionError(f"chat_template_kwargs: {', '.join(reserved)} cannot be set by a request")
    options: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, **(template_kwargs or {})}
    if tools:
        options["tools"] = [dict(tool) for tool in tools]
    try:
        return _rendered(tokenizer, conversation, options)
    except _REFUSALS as error:
        place = _refused_message(tokenizer, conversation, options, refusal=str(error))
        raise ChatTemplateError(f"{place}the chat template refused the messages: {error}") from error


def _rendered(tokenizer: Tokenizer, conversation: Sequence[dict[str, Any]], options: Mapping[str, Any]) -> str:
    """Render the first form of the messages that the template accepts.

    Raises: the first form's error, one of `_REFUSALS`.
    """
    template = template_text(tokenizer)
    given = [with_reasoning(with_known_role(message, template=template), template=template) for message in conversation]
    has_calls = any(message.get("tool_calls") for message in given)
    lacks_content = any(message.get("content") is None for message in given)
    chosen = with_missing_content(str(tokenizer.backing.get_chat_template(None, options.get("tools"))))
    refusal: Exception | None = None
    for fills in (False, True)[: 1 + lacks_content]:
        for as_objects in argument_forms(template)[: 1 + has_calls]:
            written = [with_calls(message, as_objects=as_objects) for message in given]
            if fills:
                written = [{**message, "content": message.get("content") or ""} for message in written]
            try:
                backing = tokenizer.backing
                return str(backing.apply_chat_template(written, tokenize=False, chat_template=chosen, **options))
            except _REFUSALS as error:
                refusal = refusal or error
    assert refusal is not None, "some form was tried"
    raise refusal


def _refused_message(
    tokenizer: Tokenizer, conversation: Sequence[dict[str, Any]], options: Mapping[str, Any], *, refusal: str
) -> str:
    """Return a prefix that names the first message which causes this refusal.

    It is empty if the conversation is long or if only the whole conversation is refused.
    """
    until = {**options, "add_generation_prompt": False, "continue_final_message": False}
    for count in range(1, len(conversation) + 1) if len(conversation) <= MOST_TRIED else ():
        try:
            _rendered(tokenizer, conversation[:count], until)
        except _REFUSALS as error:
            if str(error) == refusal:
                return f"messages[{count - 1}]: "
    return ""


def template_text(tokenizer: Tokenizer) -> str:
    """Return the text of the checkpoint's chat template, of all where it has several; empty without one."""
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

    TextTooLongError where that is certainly more than `max_tokens`: a template may also leave text out.
    """
    text = render_chat(tokenizer, messages, **options)
    return tokenizer.encode(text, add_special_tokens=add_special_tokens, max_tokens=max_tokens)


def _plain(message: Mapping[str, Any], position: int) -> dict[str, Any]:
    """Copy a message with its content as one string (or None, for an assistant that only calls tools)."""
    if "role" not in message:
        raise ChatTemplateError(f"messages[{position}]: role is missing")
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        content = "\n".join(_part_text(part, position) for part in content)
    return {**message, "content": content}


def _part_text(part: Any, position: int) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise ChatTemplateError(f"messages[{position}]: only content parts of type text are supported")
    return part["text"]
