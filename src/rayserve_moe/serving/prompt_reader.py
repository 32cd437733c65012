"""Reader of request bodies for routers: the prompt as the replica will build it, and its salt.

A router receives only the body, without path and headers, so its fields determine the route. The replica validates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic_core import from_json

from rayserve_moe.checkpoints.model_path import located, model_name, with_small_files
from rayserve_moe.config.load import default_cache_directory
from rayserve_moe.config.settings import Settings
from rayserve_moe.fleet.choosing import UNPARSED, Prompt
from rayserve_moe.scheduling.page_digests import prompt_digests, salt_of
from rayserve_moe.serving.api.routes.chat_prompt import template_options
from rayserve_moe.serving.api.schemas import messages as messages_schema
from rayserve_moe.serving.api.schemas import responses as responses_schema
from rayserve_moe.serving.api.schemas.field_types import MAX_CHOICES
from rayserve_moe.serving.api.schemas.openai import ChatBody
from rayserve_moe.serving.middleware.json_body import chat_from
from rayserve_moe.text.chat import render_chat
from rayserve_moe.text.tokenizer import SegmentEncoder, Tokenizer

_IDS = ("input_ids", "token_ids", "prompt", "text")
"""Fields with prompts, as ids or text."""
_PRIVATE = ("forced_routed_experts", "truncate_prompt_tokens")
"""Fields by which a prompt shares no prefix with others, or differs from its text."""
_ANTHROPIC = ("system", "thinking")
_NATIVE = ("input_ids", "text")
"""Prompts of `/generate`, which reads no `model`."""


@dataclass(frozen=True)
class PromptReaders:
    """Factory of a router's reader, in the router's process, with the tokenizer of the model in `settings`."""

    settings: Settings

    def __call__(self, key: bytes) -> PromptReader:
        kept = default_cache_directory()
        model = self.settings.model
        place = located(model.path, cache_directory=kept)
        served = model.served_name or model_name(place)
        tokenizer = Tokenizer(with_small_files(place, cache_directory=kept))
        return PromptReader(tokenizer, key=key, served_name=served if self.settings.adapters.num_slots else None)


class PromptReader:
    """Reader of bodies for a router whose replicas name pages with `key`.

    `served_name` is the name of the served model. It is None for servers without adapters beside the weights, where a
    body's model does not change the pages of its prompt.
    """

    def __init__(self, tokenizer: Tokenizer, *, key: bytes, served_name: str | None = None) -> None:
        self._tokenizer, self._key, self._served_name = tokenizer, key, served_name
        self._encoder = SegmentEncoder(tokenizer)

    def read(self, body: bytes, *, page_size: int) -> Prompt:
        """Return the first prompt of a body, or UNPARSED without a prompt.

        Any exception may propagate for an invalid body.
        """
        fields = from_json(body)
        ids = self._ids_of(fields) if isinstance(fields, dict) else None
        if ids is None or not page_size:
            return UNPARSED
        num_choices, num_requests = _counts_of(fields)
        if any(fields.get(name) is not None for name in _PRIVATE):
            return Prompt(len(ids), num_choices=num_choices, num_requests=num_requests)
        salt = fields.get("cache_salt") or fields.get("extra_key") or ""
        salt = salt[0] if isinstance(salt, list) else salt
        digests = prompt_digests(self._key, salt_of(salt, self._adapter_in(fields)), token_ids=ids, page_size=page_size)
        return Prompt(len(ids), digests, page_size, num_choices, num_requests)

    def _adapter_in(self, fields: dict[str, Any]) -> str:
        """Return the adapter of the first prompt by `lora_path` or `model`; empty if they name none."""
        if self._served_name is None:
            return ""
        name = fields.get("lora_path")
        if name := name[0] if isinstance(name, list) else name:
            return name
        model = None if any(each in fields for each in _NATIVE) else fields.get("model")
        return "" if model in (None, self._served_name) else model.removeprefix(f"{self._served_name}:")

    def _ids_of(self, fields: dict[str, Any]) -> np.ndarray | None:
        for name in _IDS:
            if (given := fields.get(name)) and isinstance(given, str | list):
                return self._encoded(given, adds_special=fields.get("add_special_tokens", True))
        if fields.get("messages"):
            is_anthropic = any(name in fields for name in _ANTHROPIC)
            return self._chat(_of_messages(fields) if is_anthropic else fields)
        if fields.get("input") and not fields.get("previous_response_id"):
            return self._chat(_of_response(fields))
        return None

    def _encoded(self, given: str | list[Any], *, adds_special: bool) -> np.ndarray:
        first = given[0] if isinstance(given, list) and isinstance(given[0], str | list) else given
        if isinstance(first, str):
            return self._encoder.encode(first, add_special_tokens=adds_special)
        return np.asarray(first, np.int32)

    def _chat(self, fields: dict[str, Any]) -> np.ndarray:
        body: ChatBody = chat_from(fields)
        text = render_chat(
            self._tokenizer,
            [message.model_dump(exclude_none=True) for message in body.messages],
            add_generation_prompt=body.opens_answer,
            tools=body.offered_tools,
            template_kwargs=template_options(body),
        )
        return self._encoder.encode(text, add_special_tokens=bool(body.add_special_tokens))


def _counts_of(fields: dict[str, Any]) -> tuple[int, int]:
    sampling = fields.get("sampling_params") or fields
    sampling = sampling[0] if isinstance(sampling, list) else sampling
    given = next((given for name in _IDS if (given := fields.get(name))), None)
    num_prompts = len(given) if isinstance(given, list) and isinstance(given[0], str | list) else 1
    return min(num_prompts * max(1, int(sampling.get("n") or 1)), MAX_CHOICES), num_prompts


def _of_messages(fields: dict[str, Any]) -> dict[str, Any]:
    return messages_schema.chat_fields(messages_schema.MessagesBody.model_validate(fields))


def _of_response(fields: dict[str, Any]) -> dict[str, Any]:
    body = responses_schema.ResponsesBody.model_validate(fields)
    return responses_schema.chat_fields(body, responses_schema.messages_of(body.input))
