"""HTTP application over an engine that it does not own."""

from __future__ import annotations

from fastapi import Depends, FastAPI

from rayserve_moe.serving.api.routes.audit import audit_router
from rayserve_moe.serving.api.routes.messages import messages_router
from rayserve_moe.serving.api.routes.native import native_router
from rayserve_moe.serving.api.routes.openai import openai_router
from rayserve_moe.serving.api.routes.pages import answer_unknown_route, pages_router
from rayserve_moe.serving.api.routes.reports import fields_router, model_router, probe_router, statistics_router
from rayserve_moe.serving.api.routes.responses import responses_router
from rayserve_moe.serving.api.routes.resume import resume_router
from rayserve_moe.serving.api.routes.scoring import scoring_router
from rayserve_moe.serving.api.routes.text_tokens import text_tokens_router
from rayserve_moe.serving.api.routes.tinker import tinker_router
from rayserve_moe.serving.api.routes.tokens import token_router
from rayserve_moe.serving.api.routes.unsupported import unsupported_router
from rayserve_moe.serving.api.schemas import control
from rayserve_moe.serving.api.schemas.audit import AuditBody
from rayserve_moe.serving.api.schemas.messages import CountTokensBody, MessagesBody
from rayserve_moe.serving.api.schemas.native import GenerateBody
from rayserve_moe.serving.api.schemas.openai import ChatBody, CompletionBody
from rayserve_moe.serving.api.schemas.responses import ResponsesBody
from rayserve_moe.serving.api.schemas.resume import ResumeBody
from rayserve_moe.serving.api.schemas.scoring import EmbeddingBody, ScoreBody
from rayserve_moe.serving.api.schemas.text_tokens import DetokenizeBody, SessionOptions, TokenizeBody
from rayserve_moe.serving.api.schemas.tinker import (
    TinkerFutureBody,
    TinkerSampleBody,
    TinkerSamplingSessionBody,
    TinkerSessionBody,
)
from rayserve_moe.serving.api.schemas.tokens import TokenBody
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.control.commands import command_router, tensor_router
from rayserve_moe.serving.errors import install_error_handlers
from rayserve_moe.serving.field_docs import FIELD_DOCS
from rayserve_moe.serving.journalling import journal_requests
from rayserve_moe.serving.metrics import package_version
from rayserve_moe.serving.middleware.edge_guard import guard_edge
from rayserve_moe.serving.middleware.ignored_fields import list_ignored_fields
from rayserve_moe.serving.middleware.traffic import count_traffic, record_requests
from rayserve_moe.serving.openapi import publish
from rayserve_moe.serving.purposes import GROUPS

GENERATION = (
    CompletionBody,
    ChatBody,
    GenerateBody,
    TokenBody,
    MessagesBody,
    ResponsesBody,
    ScoreBody,
    EmbeddingBody,
    AuditBody,
    ResumeBody,
)
TEXT = (TokenizeBody, DetokenizeBody, CountTokensBody, SessionOptions)
CONTROL = (control.AbortBody, control.AbortIdsBody, control.PauseBody, control.PauseOptions, control.ResetOptions)
WEIGHTS = (control.UpdateWeightsBody, control.WeightDirBody, control.WeightNameBody, control.PlacementBody)
TINKER = (TinkerSampleBody, TinkerFutureBody, TinkerSamplingSessionBody, TinkerSessionBody)
ADAPTERS = (control.LoadAdapterBody, control.UnloadAdapterBody)
BODIES = (*GENERATION, *TINKER, *TEXT, *CONTROL, *WEIGHTS, *ADAPTERS)


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
    app.add_exception_handler(404, answer_unknown_route)
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
    for router in (*generating, scoring_router, audit_router, resume_router):
        app.include_router(router(state), dependencies=[Depends(state.refuse_requests)])
    others = (model_router, statistics_router, probe_router, text_tokens_router, tinker_router)
    for router in (command_router, tensor_router, *others):
        app.include_router(router(state))
    app.include_router(fields_router())
    app.include_router(pages_router())
    app.include_router(unsupported_router())
    publish(app, BODIES, groups=GROUPS, docs=FIELD_DOCS)
    return app
