"""`/tokenize` and `/detokenize`, in one answer the names of vLLM and of SGLang."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.middleware.json_body import read_body
from rayserve_moe.serving.openapi import answers, takes
from rayserve_moe.serving.responses.streaming import json_answer
from rayserve_moe.serving.routes.chat_prompt import rendered_ids
from rayserve_moe.serving.routes.request_parts import check_model, prompt_ids_of
from rayserve_moe.serving.schemas.text_tokens import DetokenizeBody, TokenizeBody

_REFUSALS = (400, 404, 413, 429, 503)


def text_tokens_router(state: ApiState) -> APIRouter:
    """Return the routes over one tokenizer."""
    router = APIRouter()

    @router.post("/tokenize", **takes(TokenizeBody, *_REFUSALS))
    async def tokenize(request: Request) -> Response:
        body = await read_body(request, TokenizeBody, admission=state.admission)
        check_model(state, body.model)
        if body.prompt is None:
            ids = await rendered_ids(state, body, request=request)
        else:
            adds_special = body.add_special_tokens is not False
            (ids,) = await prompt_ids_of(
                state, [body.prompt], param="prompt", request=request, add_special_tokens=adds_special
            )
        tokens = ids.tolist()
        names = state.tokenizer.backing.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        numbers = {"count": len(tokens), "max_model_len": state.card.max_model_len}
        return json_answer({**numbers, "tokens": tokens, "token_strs": names})

    @router.post("/detokenize", **takes(DetokenizeBody, *_REFUSALS))
    async def detokenize(request: Request) -> Response:
        body = await read_body(request, DetokenizeBody, admission=state.admission)
        check_model(state, body.model)
        skips = body.skip_special_tokens

        def texts() -> dict[str, str]:
            by_name = {"prompt": bool(skips), "text": skips is not False}
            decode = state.tokenizer.decode
            return {name: decode(body.tokens, skip_special_tokens=skipped) for name, skipped in by_name.items()}

        return json_answer(await asyncio.get_running_loop().run_in_executor(state.encoding, texts))

    @router.post("/finish_session", **answers(413))
    async def finish_session() -> Response:
        return json_answer({"success": True, "message": "sessions hold nothing here"})

    return router
