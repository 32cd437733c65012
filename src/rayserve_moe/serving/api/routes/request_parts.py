"""Preparation of a checked body for the engine, shared by all generating routes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from starlette.requests import Request

from rayserve_moe.replay.encoding import decode_each_forced, decode_each_forced_gates, decode_each_forced_index
from rayserve_moe.requests.records import ModelCard, RoutedExperts
from rayserve_moe.serving.api.answers.request_streams import refusals_named
from rayserve_moe.serving.api.schemas.field_types import RoutingFields
from rayserve_moe.serving.api.schemas.openai import OpenAIGeneration
from rayserve_moe.serving.api.schemas.prompt_types import Prompt
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.middleware.admission import INLINE_BYTES
from rayserve_moe.text.tokenizer import TextTooLongError
from rayserve_moe.text.truncation import Truncation, truncation_to

FORCED, FORCED_INDEX, FORCED_GATES = "forced_routed_experts", "forced_indexer_topk", "forced_router_gates"
_BYTES_PER_ID = 8


def check_model(state: ApiState, model: str | None) -> None:
    """Check the requested model, for a route that computes nothing with it. Raises: ApiError 404 as `adapter_for`."""
    adapter_for(state, model)


def adapter_for(state: ApiState, model: str | None, *, name: str | None = None) -> str:
    """Return the adapter of a request: by `name`, or by its model, `ADAPTER` or `SERVED:ADAPTER`; empty for none.

    Raises: ApiError 404 for a model or an adapter that is not served, 400 if both name an adapter and differ.
    """
    served, known = state.card.name, adapter_names(state)
    if name and name not in known:
        loaded = f"loaded: {_quoted(known)}" if known else "no adapter is loaded"
        raise ApiError(404, f"no such adapter ({loaded})", param="lora_path", code="adapter_not_found")
    by_model = model if model and model in known else next((each for each in known if model == f"{served}:{each}"), "")
    if model not in (None, served) and not by_model:
        message = f"no such model: this server serves {_quoted([served, *known])}"
        raise ApiError(404, message, param="model", code="model_not_found")
    if name and by_model not in ("", served, name):
        raise ApiError(400, "`lora_path` and `model` name different adapters", param="lora_path")
    return name or by_model


def adapters_for_prompts(state: ApiState, names: str | Sequence[str | None] | None, *, num_prompts: int) -> list[str]:
    """Return the adapter of each prompt of a batch, empty for none. Raises: ApiError 404 as `adapter_for`."""
    each = [names] * num_prompts if names is None or isinstance(names, str) else [*names]
    return [adapter_for(state, None, name=name) for name in each]


def adapter_names(state: ApiState) -> list[str]:
    """Return the names of the adapters that requests may name: those beside the weights, then the merged one."""
    control = state.loop.control
    beside = [] if control.adapters is None else [*control.adapters.table.current]
    return [*beside, *([control.adapter] if control.adapter and control.adapter not in beside else [])]


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def truncation_of(state: ApiState, body: OpenAIGeneration) -> Truncation | None:
    """Return the body's truncation of long prompts; -1 leaves space for one output token unless `max_tokens` is 0.

    Raises: ApiError 400 for a number that is neither -1 nor from 1 to the context length.
    """
    if body.truncate_prompt_tokens is None:
        return None
    keeps = max(1, state.card.max_model_len - (dict(body)["max_tokens"] != 0))
    return checked_truncation(state, body.truncate_prompt_tokens, side=body.truncation_side, keeps=keeps)


def checked_truncation(state: ApiState, num_tokens: int | None, *, side: str | None, keeps: int) -> Truncation | None:
    """Return the truncation to `num_tokens`, on the tokenizer's side if `side` is None; -1 stands for `keeps`.

    Raises: ApiError 400 for a number that is neither -1 nor from 1 to the context length.
    """
    keeps_end = (side or state.tokenizer.backing.truncation_side) == "left"
    with refusals_named({}):
        return truncation_to(num_tokens, max_model_len=state.card.max_model_len, keeps=keeps, keeps_end=keeps_end)


async def prompt_ids_of(
    state: ApiState,
    prompts: Sequence[Prompt],
    *,
    param: str,
    request: Request,
    add_special_tokens: bool = True,
    truncation: Truncation | None = None,
) -> list[np.ndarray]:
    """Return prompts as int32 ids, encoded on a thread if they are texts or large.

    Raises: ApiError 400 for a prompt longer than the context.
    """
    encode = partial(_encode_all, state, prompts, param, add_special_tokens, truncation)
    size = sum(len(prompt) if isinstance(prompt, str) else _BYTES_PER_ID * len(prompt) for prompt in prompts)
    if size <= INLINE_BYTES and not any(isinstance(prompt, str) for prompt in prompts):
        return encode(threading.Event())
    with state.admission.holding(size):
        return await state.admission.run(encode, size=size, receive=request.receive)


def _encode_all(
    state: ApiState,
    prompts: Sequence[Prompt],
    param: str,
    adds_special: bool,
    truncation: Truncation | None,
    is_cancelled: threading.Event,
) -> list[np.ndarray]:
    card, all_ids = state.card, []
    encode = partial(state.tokenizer.encode, add_special_tokens=adds_special)
    for prompt in prompts:
        if is_cancelled.is_set():
            break
        ids: Sequence[int] = prompt if isinstance(prompt, list) else []
        if isinstance(prompt, str):
            ids = encoded(partial(encode, prompt), card, param=param, truncation=truncation)
        elif truncation is not None:
            ids = truncation.cut(prompt)
        if len(ids) > card.max_model_len:
            raise _too_long(card, param)
        all_ids.append(np.asarray(ids, np.int32))
    return all_ids


def encoded(
    encode: Callable[..., list[int]], card: ModelCard, *, param: str, truncation: Truncation | None = None
) -> Sequence[int]:
    """Return the ids of a text, cut by `truncation`.

    Raises: ApiError 400 for an untruncated text longer than the context, without encoding it if its length shows that.
    """
    if truncation is not None:
        return truncation.cut(encode())
    try:
        return encode(max_tokens=card.max_model_len)
    except TextTooLongError as error:
        raise _too_long(card, param) from error


def _too_long(card: ModelCard, param: str) -> ApiError:
    return ApiError(400, f"`{param}` exceeds the context of {card.max_model_len} tokens", param=param)


async def forced_rows_of(
    state: ApiState, body: RoutingFields, *, prompts: Sequence[np.ndarray], is_batch: bool
) -> list[RoutedExperts | None]:
    """Decode the routing, index rows and gates to replay in every prompt, off the event loop.

    A batch has a list with an entry per prompt.
    """
    experts, index = body.forced_routed_experts, body.forced_indexer_topk
    forced: list[RoutedExperts | None] = [None] * len(prompts)
    if experts is not None:
        lengths, layout = list(map(len, prompts)), state.card.routing
        decode = partial(decode_each_forced, experts, layout, prompt_lens=lengths, is_batch=is_batch)
        forced = await _decoded(state, decode, FORCED)
    if index is not None:
        decode = partial(decode_each_forced_index, index, forced, layout=state.card.index, is_batch=is_batch)
        forced = await _decoded(state, decode, FORCED_INDEX)
    if (gates := body.forced_router_gates) is not None:
        decode = partial(decode_each_forced_gates, gates, forced, is_batch=is_batch)
        forced = await _decoded(state, decode, FORCED_GATES)
    return forced


async def _decoded(
    state: ApiState, decode: Callable[[], list[RoutedExperts | None]], name: str
) -> list[RoutedExperts | None]:
    try:
        return await asyncio.get_running_loop().run_in_executor(state.encoding, decode)
    except ValueError as error:
        raise ApiError(400, f"`{name}`: {error}", param=name) from error
