"""Routes `/tokenize` and `/detokenize`, with the field names of vLLM and SGLang, and `/finish_session`."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rayserve_moe.serving.api.answers.streaming import json_answer
from rayserve_moe.serving.api.routes.chat_prompt import rendered_ids
from rayserve_moe.serving.api.routes.request_parts import check_model, prompt_ids_of
from rayserve_moe.serving.api.schemas.text_tokens import DetokenizeBody, SessionOptions, TokenizeBody
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.control.fleet import Fleet
from rayserve_moe.serving.errors import ApiError
from rayserve_moe.serving.middleware.json_body import read_body, read_options
from rayserve_moe.serving.openapi import takes
from rayserve_moe.serving.session_identity import session_key

_Value = TypeVar("_Value")
_REFUSALS = (400, 404, 413, 429, 503)


def text_tokens_router(state: ApiState) -> APIRouter:
    """Return the routes over a tokenizer."""
    router = APIRouter()

    @router.post("/tokenize", **takes(TokenizeBody, *_REFUSALS))
    async def tokenize(request: Request) -> Response:
        body = await read_body(request, TokenizeBody, admission=state.admission)
        check_model(state, body.model)
        if body.prompt is None:
            each = [await rendered_ids(state, body, request=request)]
        else:
            texts, adds_special = body.prompt.prompts, body.add_special_tokens is not False
            each = await prompt_ids_of(state, texts, param="prompt", request=request, add_special_tokens=adds_special)
        names_of = state.tokenizer.backing.convert_ids_to_tokens
        is_batch = body.prompt is not None and body.prompt.is_batch
        answer = {
            "count": _as_given(list(map(len, each)), is_batch),
            "max_model_len": state.card.max_model_len,
            "tokens": _as_given([ids.tolist() for ids in each], is_batch),
            "token_strs": _as_given([names_of(ids.tolist()) for ids in each], is_batch)
            if body.return_token_strs
            else None,
        }
        return json_answer(answer)

    @router.post("/detokenize", **takes(DetokenizeBody, *_REFUSALS))
    async def detokenize(request: Request) -> Response:
        body = await read_body(request, DetokenizeBody, admission=state.admission)
        check_model(state, body.model)
        each: list[Any] = body.tokens.prompts
        skips, is_batch, size = body.skip_special_tokens, body.tokens.is_batch, state.card.vocab_size
        if any(token_id >= size for ids in each for token_id in ids):
            raise ApiError(400, f"`tokens`: token ids must lie in the vocabulary, [0, {size})", param="tokens")

        def texts() -> dict[str, Any]:
            by_name = {"prompt": bool(skips), "text": skips is not False}
            decode = state.tokenizer.decode
            return {
                name: _as_given([decode(ids, skip_special_tokens=skipped) for ids in each], is_batch)
                for name, skipped in by_name.items()
            }

        return json_answer(await asyncio.get_running_loop().run_in_executor(state.encoding, texts))

    async def finish_session(request: Request) -> Response:
        body = await read_options(request, SessionOptions, admission=state.admission)
        key = session_key(body.session_id, scope=request.scope, cache_salt=body.cache_salt)
        await Fleet(state).every("finish_session", key)
        return json_answer({"success": True, "message": "its cached pages leave first"})

    for path in ("/finish_session", "/close_session"):
        router.post(path, **takes(SessionOptions, 400, 413, 503))(finish_session)

    return router


def _as_given(values: list[_Value], is_batch: bool) -> list[_Value] | _Value:
    return values if is_batch else values[0]
