"""HTTP application over an engine that it does not own."""

from __future__ import annotations

from fastapi import Depends, FastAPI

from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.errors import install_error_handlers
from rayserve_moe.serving.journalling import journal_requests
from rayserve_moe.serving.metrics import package_version
from rayserve_moe.serving.middleware.edge_guard import guard_edge
from rayserve_moe.serving.middleware.ignored_fields import list_ignored_fields
from rayserve_moe.serving.middleware.traffic import count_traffic, record_requests
from rayserve_moe.serving.openapi import publish
from rayserve_moe.serving.routes.control import control_router, probe_router
from rayserve_moe.serving.routes.embeddings import embeddings_router
from rayserve_moe.serving.routes.messages import messages_router
from rayserve_moe.serving.routes.native import native_router
from rayserve_moe.serving.routes.openai import openai_router
from rayserve_moe.serving.routes.reports import fields_router, model_router, statistics_router
from rayserve_moe.serving.routes.responses import responses_router
from rayserve_moe.serving.routes.resume import resume_router
from rayserve_moe.serving.routes.score import score_router
from rayserve_moe.serving.routes.text_tokens import text_tokens_router
from rayserve_moe.serving.routes.tokens import token_router
from rayserve_moe.serving.routes.trainer_control import tensor_router, trainer_control_router
from rayserve_moe.serving.routes.unsupported import unsupported_router
from rayserve_moe.serving.schemas import control
from rayserve_moe.serving.schemas.embeddings import EmbeddingBody
from rayserve_moe.serving.schemas.messages import CountTokensBody, MessagesBody
from rayserve_moe.serving.schemas.native import GenerateBody
from rayserve_moe.serving.schemas.openai import ChatBody, CompletionBody
from rayserve_moe.serving.schemas.responses import ResponsesBody
from rayserve_moe.serving.schemas.resume import ResumeBody
from rayserve_moe.serving.schemas.score import ScoreBody
from rayserve_moe.serving.schemas.text_tokens import DetokenizeBody, TokenizeBody
from rayserve_moe.serving.schemas.tokens import TokenBody

GENERATION = (
    CompletionBody,
    ChatBody,
    GenerateBody,
    TokenBody,
    MessagesBody,
    ResponsesBody,
    ScoreBody,
    EmbeddingBody,
    ResumeBody,
)
TEXT = (TokenizeBody, DetokenizeBody, CountTokensBody)
CONTROL = (control.AbortBody, control.AbortIdsBody, control.PauseBody, control.PauseOptions, control.ResetOptions)
WEIGHTS = (control.UpdateWeightsBody, control.WeightDirBody, control.WeightNameBody)
BODIES = (*GENERATION, *TEXT, *CONTROL, *WEIGHTS)


def create_api(state: ApiState) -> FastAPI:
    """Return the application. It describes itself at `/openapi.json`; no page loads external resources."""
    app = FastAPI(
        title="rayserve_moe",
        version=package_version(),
        openapi_url="/openapi.json",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    install_error_handlers(app)
    app.add_middleware(list_ignored_fields)
    app.add_middleware(journal_requests, journal=state.journal)
    app.add_middleware(guard_edge, server=state.server)
    app.add_middleware(count_traffic, traffic=state.traffic)
    if state.server.log_requests or state.exporter is not None:
        app.add_middleware(
            record_requests,
            writes_lines=state.server.log_requests,
            exporter=state.exporter,
            model=state.card.name,
        )
    # Routes are tried in order: the most frequent ones come first.
    generating = (native_router, openai_router, token_router, messages_router, responses_router)
    for router in (*generating, score_router, embeddings_router, resume_router):
        app.include_router(router(state), dependencies=[Depends(state.refuse_requests)])
    others = (model_router, statistics_router, probe_router, text_tokens_router)
    for router in (control_router, trainer_control_router, tensor_router, *others):
        app.include_router(router(state))
    app.include_router(fields_router())
    app.include_router(unsupported_router())
    publish(app, BODIES)
    return app
