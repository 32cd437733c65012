"""The Ray Serve application: one replica per slice holds the engine and answers HTTP."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve import Application

from rayserve_moe.cluster.replica_engine import start_replica_engine
from rayserve_moe.config.load import settings_from
from rayserve_moe.config.settings import Settings
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.http import create_api

REPLICA_CPUS = 0.5
SPARE_REQUESTS = 256
"""Requests that Serve lets through beyond what the engine takes, so that refusing them is ours."""


@serve.deployment(name="moe-server")
@serve.ingress()
class MoeServer:
    """Engine and HTTP edge of one slice, in one process, so that a token crosses one process border on its way out."""

    def __init__(self, settings: Settings) -> None:
        self._engine = start_replica_engine(settings)
        self._server = settings.server

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_api(ApiState(self._engine.loop, self._engine.tokenizer, self._server))

    def check_health(self) -> None:
        """Raise when the engine is dead or stuck; Serve then replaces the replica."""
        self._engine.loop.check_health()

    def __del__(self) -> None:
        if engine := self.__dict__.get("_engine"):
            engine.loop.shutdown()


def build(args: dict[str, Any]) -> Application:
    """Build the application from the flat settings under `args` of a Serve config.

    A wrong key or value is a SettingsError at deployment, naming the key (and the nearest known one).
    """
    settings = settings_from(args)
    scheduler = settings.scheduler
    deployment = MoeServer.options(
        ray_actor_options={"num_cpus": REPLICA_CPUS},
        max_ongoing_requests=scheduler.max_running_requests + scheduler.max_waiting_requests + SPARE_REQUESTS,
        graceful_shutdown_timeout_s=settings.server.drain_timeout_s,
    )
    return deployment.bind(settings)
