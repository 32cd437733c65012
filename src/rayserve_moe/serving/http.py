"""The HTTP application over an engine that runs in this process or drives others; it owns no engine."""

from __future__ import annotations

from fastapi import FastAPI

from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.control_routes import control_router
from rayserve_moe.serving.errors import install_error_handlers
from rayserve_moe.serving.limits import EdgeGuard
from rayserve_moe.serving.native_routes import native_router
from rayserve_moe.serving.openai_routes import openai_router


def create_api(state: ApiState) -> FastAPI:
    """Return the application. Bodies are read by our own strict parser, so it publishes no OpenAPI schema."""
    app = FastAPI(title="rayserve_moe", openapi_url=None, redirect_slashes=False)
    install_error_handlers(app)
    app.add_middleware(EdgeGuard, server=state.server)
    for router in (control_router(state), openai_router(state), native_router(state)):
        app.include_router(router)
    return app
