"""Ray Serve's ingress request router. The interface is private to Ray, and only this module depends on it.

HAProxy sends a router the body of every POST and parses the answer with a pattern. A missing or malformed answer is a
503 for the client, so after any error in a body the request is routed by load alone.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import ray
from ray import serve
from ray.serve import Application
from ray.serve._private import constants, haproxy
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rayserve_moe.cluster.channel import prove_connecting
from rayserve_moe.cluster.startup_memory import freeze_what_stays
from rayserve_moe.fleet.choosing import UNPARSED, Choosing, Prompt
from rayserve_moe.fleet.load_average import Report
from rayserve_moe.fleet.page_feed import IS_PREFILL, METADATA, read_message
from rayserve_moe.fleet.prefix_index import PrefixIndex
from rayserve_moe.fleet.shared_key import shared_key

log = logging.getLogger(__name__)
KNOWN_RAY = "2.60."
ROUTE = "/internal/route"
HEALTH_CHECK_PERIOD_S = 1.0
INLINE_BYTES = 65536
"""Maximum size of bodies that are read on the event loop."""
_ANSWER_FORM = """'"replica_id"%s*:%s*"([^"]+)"'"""
_FOLLOW_S = 0.5


class BodyReader(Protocol):
    """Finds the prompt in the body of a request. May raise any exception."""

    def read(self, body: bytes, *, page_size: int) -> Prompt: ...


class LoadRouter(RequestRouter):
    """Selects a replica of a handle by the caller's function, or else the shorter queue of two random ones."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return groups of replicas, the preferred group first."""
        choose = None if pending_request is None else pending_request.kwargs.get("choose")
        if choose is not None:
            return [[choose(candidate_replicas)]]
        return [random.sample(candidate_replicas, min(2, len(candidate_replicas)))]


LOAD_ROUTER = f"{__name__}.{LoadRouter.__name__}"
"""For `request_router_config` of the deployment whose requests are routed."""


@serve.deployment(name="moe-router", max_ongoing_requests=10_000, health_check_period_s=HEALTH_CHECK_PERIOD_S)
@serve.ingress()
class PrefixRouter:
    """Answers HAProxy's requests with the replica to use."""

    def __init__(self, server: DeploymentHandle, make_reader: Callable[[bytes], BodyReader]) -> None:
        application = serve.get_replica_context().app_name
        key = shared_key(application)
        self._server, self._reader = server, make_reader(key)
        self._view = FleetView(key, draw=random.Random())
        self._following: asyncio.Task[None] | None = None
        freeze_what_stays()

    def __serve_build_asgi_app__(self) -> Starlette:
        return Starlette(routes=[Route(ROUTE, self._route, methods=["POST"])])

    async def check_health(self) -> None:
        """Start following the replicas before the first request."""
        if self._following is None or self._following.done():
            self._following = asyncio.get_running_loop().create_task(self._follow())

    async def _follow(self) -> None:
        """Update the set of replicas without a request."""
        while True:
            await self._chosen(self._followed)
            await asyncio.sleep(_FOLLOW_S)

    async def _route(self, request: Request) -> Response:
        prompt = await self._prompt_of(await request.body())
        replica = await self._chosen(lambda replicas: self._one_of(replicas, prompt))
        return Response(json.dumps({"replica_id": replica.replica_id.to_full_id_str()}), media_type="application/json")

    async def _prompt_of(self, body: bytes) -> Prompt:
        try:
            if len(body) <= INLINE_BYTES:
                return self._reader.read(body, page_size=self._view.page_size)
            return await asyncio.to_thread(self._reader.read, body, page_size=self._view.page_size)
        except Exception as error:  # the replica reports the error to the client
            log.debug("a request is routed by load alone, its body is not parsed: %s", type(error).__name__)
            return UNPARSED

    async def _chosen(self, choose: Callable[[Sequence[RunningReplica]], RunningReplica]) -> RunningReplica:
        async with self._server.choose_replica(choose=choose, _reserve=False) as selection:
            return selection._replica

    def _one_of(self, replicas: Sequence[RunningReplica], prompt: Prompt) -> RunningReplica:
        by_name = {replica.replica_id.unique_id: replica for replica in replicas}
        try:
            return by_name[self._view.choose(prompt, {name: one.replica_metadata for name, one in by_name.items()})]
        except Exception:
            log.exception("replica selection failed: a random replica is used")
            return random.choice(list(replicas))

    def _followed(self, replicas: Sequence[RunningReplica]) -> RunningReplica:
        self._view.follow({one.replica_id.unique_id: one.replica_metadata for one in replicas})
        return replicas[0]


def with_prefix_router(server: Application, make_reader: Callable[[bytes], BodyReader]) -> Application:
    """Route requests to a single-deployment application through routers that know its replicas' caches.

    Only for a Ray for which `unknown_ray` returns None.
    """
    return server._with_ingress_request_router(PrefixRouter.bind(server, make_reader))


def unknown_ray() -> str | None:
    """Return the difference between this Ray Serve and the version that this module supports, or None."""
    if not constants.RAY_SERVE_ENABLE_HA_PROXY:
        return "RAY_SERVE_ENABLE_HA_PROXY is off"
    if not ray.__version__.startswith(KNOWN_RAY):
        return f"ray {ray.__version__} is not {KNOWN_RAY}*"
    if not hasattr(Application, "_with_ingress_request_router"):
        return "Application takes no ingress request router"
    template = Path(inspect.getfile(haproxy)).with_name("ingress_request_router.lua.tmpl")
    if not template.is_file() or _ANSWER_FORM not in template.read_text(encoding="utf-8"):
        return "HAProxy reads answers of routers by another pattern"
    return None


RETRY_S = 0.5
"""Seconds from the end of a connection to the next attempt."""


class FleetView:
    """Cached prefixes and load of the replicas passed to `choose`. All methods run on the same event loop."""

    def __init__(self, key: bytes, *, draw: random.Random) -> None:
        self._key = key
        self.index = PrefixIndex()
        self.choosing = Choosing(self.index, draw=draw, clock=time.monotonic)
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._prefill: set[str] = set()
        """Replicas that answer requests only if no other replica is there."""
        self.page_size = 0

    def follow(self, replicas: Mapping[str, Mapping[str, Any]]) -> None:
        """Connect to the feeds of replicas, given by id with their metadata, and forget all other replicas."""
        if replicas.keys() == self._readers.keys():
            return
        for gone in self._readers.keys() - replicas.keys():
            self._readers.pop(gone).cancel()
            self._prefill.discard(gone)
            self.choosing.forget(gone)
        self.index.follow(replicas.keys())
        for name in replicas.keys() - self._readers.keys():
            address = replicas[name].get(METADATA) or {}
            self.page_size = address.get("page_size", self.page_size)
            self.choosing.places.limit(name, address.get("max_requests"))
            if address.get(IS_PREFILL):
                self._prefill.add(name)
            self._readers[name] = asyncio.get_running_loop().create_task(self._read(name, address))

    def choose(self, prompt: Prompt, replicas: Mapping[str, Mapping[str, Any]]) -> str:
        """Return the id of a replica for a prompt. `replicas` maps ids to metadata and is not empty."""
        self.follow(replicas)
        return self.choosing.choose(prompt, [name for name in replicas if name not in self._prefill] or list(replicas))

    def close(self) -> None:
        """End all connections."""
        self.follow({})

    async def _read(self, replica_id: str, address: Mapping[str, Any]) -> None:
        """Connect, and reconnect whenever the connection ends. A replica without an address counts as empty."""
        while address:
            with suppress(OSError, EOFError, TimeoutError, ValueError, TypeError):
                await self._read_once(replica_id, address["host"], address["port"])
            self.index.lose(replica_id)
            self.choosing.places.lose(replica_id)
            await asyncio.sleep(RETRY_S)

    async def _read_once(self, replica_id: str, host: str, port: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        try:
            await prove_connecting(reader, writer, key=self._key)
            while True:
                message = await read_message(reader)
                if isinstance(message, Report):
                    self.choosing.report(replica_id, message)
                elif not self.index.apply(replica_id, message):
                    return  # the next connection begins with a snapshot
                await asyncio.sleep(0)  # let requests be routed between two parts of a snapshot
        finally:
            writer.transport.abort()
