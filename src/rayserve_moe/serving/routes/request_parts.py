"""What all generating routes do with a checked body before the engine gets it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from starlette.requests import Request

from rayserve_moe.replay.encoding import decode_forced
from rayserve_moe.requests import ModelCard, RoutedExperts
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.middleware.admission import INLINE_BYTES
from rayserve_moe.serving.schemas.prompt_types import Prompt
from rayserve_moe.text.tokenizer import TextTooLongError

FORCED = "forced_routed_experts"
_BYTES_PER_ID = 8


def check_model(state: ApiState, model: str | None) -> None:
    """ApiError 404 for any model but the one that is served."""
    if model not in (None, state.card.name):
        raise ApiError(
            404, f"no such model: this server serves `{state.card.name}`", param="model", code="model_not_found"
        )


async def prompt_ids_of(
    state: ApiState, prompts: Sequence[Prompt], *, param: str, request: Request
) -> list[np.ndarray]:
    """Turn prompts into int32 ids, on a thread where they are texts or many. ApiError for ids the model lacks."""
    encode = partial(_encode_all, state, prompts, param)
    size = sum(len(prompt) if isinstance(prompt, str) else _BYTES_PER_ID * len(prompt) for prompt in prompts)
    if size <= INLINE_BYTES and not any(isinstance(prompt, str) for prompt in prompts):
        return encode(threading.Event())
    with state.admission.holding(size):
        return await state.admission.run(encode, size=size, receive=request.receive)


def _encode_all(
    state: ApiState, prompts: Sequence[Prompt], param: str, is_cancelled: threading.Event
) -> list[np.ndarray]:
    card, all_ids = state.card, []
    for prompt in prompts:
        if is_cancelled.is_set():
            break
        ids = encoded(partial(state.tokenizer.encode, prompt), card, param=param) if isinstance(prompt, str) else prompt
        if not ids:
            raise ApiError(400, f"`{param}` has no tokens", param=param)
        if len(ids) > card.max_model_len:
            raise _too_long(card, param)
        all_ids.append(np.asarray(ids, np.int32))
        if all_ids[-1].max() >= card.vocab_size:
            limit = card.vocab_size
            raise ApiError(400, f"`{param}` holds token ids outside the vocabulary of {limit} tokens", param=param)
    return all_ids


def encoded(encode: Callable[..., list[int]], card: ModelCard, *, param: str) -> list[int]:
    """Encode a text. ApiError, before any work where its length tells so, for one longer than the context."""
    try:
        return encode(max_tokens=card.max_model_len)
    except TextTooLongError as error:
        raise _too_long(card, param) from error


def _too_long(card: ModelCard, param: str) -> ApiError:
    return ApiError(400, f"`{param}` exceeds the context of {card.max_model_len} tokens", param=param)


def num_new_tokens(state: ApiState, wanted: int | None, *, default: int, prompt_len: int) -> int:
    """Return the limit that was given, or the default, or what the context has room for where that is less."""
    room = max(1, state.card.max_model_len - prompt_len)
    return min(default, room) if wanted is None else wanted


def check_start(start: int, prompts: Sequence[np.ndarray], *, param: str) -> None:
    """ApiError for a first row after the end of a prompt."""
    if start > min(map(len, prompts)):
        raise ApiError(400, f"`{param}` must not exceed the number of prompt tokens", param=param)


async def forced_routing_of(
    state: ApiState, value: Any, *, prompts: Sequence[np.ndarray], is_batch: bool
) -> list[RoutedExperts | None]:
    """Decode the routing to replay in every prompt, off the event loop: a batch brings a list of as many."""
    if value is None:
        return [None] * len(prompts)
    if is_batch and (not isinstance(value, list) or len(value) != len(prompts)):
        raise ApiError(400, f"`{FORCED}` should be a list with one entry, or null, per prompt", param=FORCED)
    each = value if is_batch else [value]
    decode = partial(_decode_all, state, each, [len(prompt_ids) for prompt_ids in prompts])
    try:
        return await asyncio.get_running_loop().run_in_executor(state.encoding, decode)
    except ValueError as error:
        raise ApiError(400, f"`{FORCED}`: {error}", param=FORCED) from error


def _decode_all(state: ApiState, values: Sequence[Any], lengths: Sequence[int]) -> list[RoutedExperts | None]:
    layout = state.card.routing
    return [
        None if value is None else decode_forced(value, layout, prompt_len=length)
        for value, length in zip(values, lengths, strict=True)
    ]
