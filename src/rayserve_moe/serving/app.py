"""Ray Serve application: a replica per slice holds the engine and answers HTTP."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray._common.constants import HEAD_NODE_RESOURCE_NAME
from ray.serve import Application
from ray.serve.config import DeploymentActorConfig

from rayserve_moe.balancing.planning import planning_config
from rayserve_moe.checkpoints.bucket import Heads, SentShares, WantedTensor
from rayserve_moe.cluster.eplb_planner import BALANCER_NAME, EplbPlannerActor
from rayserve_moe.cluster.raylet_watch import end_with_raylet
from rayserve_moe.cluster.replica_engine import ReplicaEngine, start_replica_engine
from rayserve_moe.cluster.startup_memory import freeze_what_stays
from rayserve_moe.config.derive import (
    check_roles,
    keeps_journal,
    max_num_replicas,
    max_open_requests,
    prefill_chunk_tokens,
)
from rayserve_moe.config.load import settings_from
from rayserve_moe.config.settings import Settings, SettingsError
from rayserve_moe.engine.control import EngineControl, WeightOrder, WeightOutcome
from rayserve_moe.engine.updates.tensors import BucketOrder
from rayserve_moe.fleet.autoscaling import DEMAND, autoscaling_of, demand_of
from rayserve_moe.fleet.broadcast import Answer, FleetCalls, listed_replicas
from rayserve_moe.fleet.journal_client import JournalClient
from rayserve_moe.fleet.member import FleetMember, Leaving
from rayserve_moe.fleet.page_feed import IS_PREFILL, METADATA, PageFeed
from rayserve_moe.fleet.remote_state import RemoteState
from rayserve_moe.fleet.serve_router import LOAD_ROUTER, unknown_ray, with_prefix_router
from rayserve_moe.fleet.shared_key import shared_key
from rayserve_moe.fleet.wanted_state import STATE_NAME, WantedStateActor
from rayserve_moe.observability.logs import use_logging
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.control.fleet import Fleet, values_of
from rayserve_moe.serving.control.membership import Membership, OffersOfOthers
from rayserve_moe.serving.control.prefill_peers import PrefillPeers
from rayserve_moe.serving.control.replica_calls import answer, answer_by, shares_of
from rayserve_moe.serving.http import create_api
from rayserve_moe.serving.journalling import hand_over
from rayserve_moe.serving.middleware.traffic import Traffic
from rayserve_moe.serving.prompt_reader import PromptReaders
from rayserve_moe.serving.start.scaling import REPLICA_CPUS

log = logging.getLogger(__name__)

SERVE_LOGGER = "ray.serve"
"""Its handlers, the replica's log file and possibly standard error, also receive the package's lines."""
SHUT_DOWN = FinishReason("error", message="the server is shutting down")
HEALTH_CHECK_PERIOD_S = 1.0
"""Serve replaces a lost replica after a single failed check, and a failing replica after three checks and a drain."""
ANSWERS_TIMEOUT_S = 5.0
"""Time for clients to receive the error that ends their request."""
_POLL_S = 0.02


@serve.deployment(name="moe-server")
@serve.ingress()
class MoeServer:
    """Engine and HTTP front end of a slice in one process, so that a token crosses a single process boundary."""

    def __init__(self, settings: Settings) -> None:
        use_logging(settings.logging, handlers=logging.getLogger(SERVE_LOGGER).handlers)
        end_with_raylet()
        self._this = ray.get_runtime_context().current_actor
        membership = self._membership = membership_of(settings, give_up=self._leave)
        offers = OffersOfOthers(fleet_calls())
        self._engine = start_replica_engine(
            settings,
            find_balancer=partial(serve.get_deployment_actor, BALANCER_NAME),
            weights=membership.member.first_weights(offers),
        )
        membership.offered_weights = self._engine.offered_weights
        control = self._engine.loop.control
        membership.member.join(control)
        take_role(control, membership.member, settings=settings)
        if control.adapters is not None:
            offers.take_adapters(control.adapters)
        self._server, self._weight_roots = settings.server, settings.updates.weight_roots
        self._journal = journal_of(settings)
        if self._journal is not None:
            leaving = partial(hand_over, self._journal)
            membership.member.on_listed = Leaving(membership.member.name, leaving, settings.server).look
        threading.Thread(target=membership.member.keep_up, args=(control,), name="fleet", daemon=True).start()
        self._feed = page_feed(self._engine) if routes_by_prefix(settings) else None
        self._traffic = Traffic()
        end = partial(end_after_failure, self._engine, self._traffic, end_process=partial(ray.kill, self._this))
        threading.Thread(target=end, name="end", daemon=True).start()

    def __serve_build_asgi_app__(self) -> FastAPI:
        engine, traffic = self._engine, self._traffic
        state = self._state = ApiState(
            engine.loop,
            engine.tokenizer,
            self._server,
            traffic=traffic,
            membership=self._membership,
            journal=self._journal,
            weight_roots=self._weight_roots,
        )
        log.info("formats of tool calls and reasoning in answers of chats: %s, %s", *state.chat_output.format)
        api = create_api(state)
        freeze_what_stays()
        return api

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return the address of this replica's page feed, which Serve passes to routers."""
        if self._feed is None:
            return {}
        return {METADATA: {**self._feed.address[METADATA], IS_PREFILL: self._membership.member.is_prefill}}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the demand for Serve's autoscaler, which asks only if `max_replicas` is set."""
        return {DEMAND: demand_of(self._engine.loop)}

    async def fleet_call(self, call: str, arguments: tuple[Any, ...]) -> Answer:
        """Answer a fleet call for this replica only."""
        return await answer(self._state, call, arguments=arguments)

    async def sent_weights(self, call: str, arguments: tuple[Any, ...]) -> Answer:
        """Answer a trainer in the same cluster (`rollouts.ray_weights`) for all replicas."""
        return await answer_trainer(self._state, call, arguments=arguments)

    async def drain(self) -> int:
        """Reject new requests from now on; return the number of requests in progress."""
        self._traffic.drain()
        return self._traffic.num_open

    async def give_up(self) -> None:
        """End running requests with an error, and stop the engine."""
        await asyncio.to_thread(self._engine.loop.shutdown, SHUT_DOWN)

    def _leave(self) -> None:
        """End this replica because it cannot load the weights of the fleet; Serve starts another."""
        self._engine.loop.shutdown(SHUT_DOWN)
        ray.kill(self._this)

    def check_health(self) -> None:
        """Raise if the engine is dead or stuck; Serve then replaces the replica."""
        self._engine.loop.check_health()

    def __del__(self) -> None:
        if membership := self.__dict__.get("_membership"):
            membership.member.stop()
        if journal := self.__dict__.get("_journal"):
            journal.link.stop()
        if engine := self.__dict__.get("_engine"):
            engine.shutdown()


def build(args: dict[str, Any]) -> Application:
    """Build the application from the flat settings in `args` of a Serve config.

    Raises: SettingsError for a wrong key or value, with the nearest known key.
    """
    settings = settings_from(args)
    check_roles(settings)
    deployment = MoeServer.options(
        ray_actor_options={"num_cpus": REPLICA_CPUS},
        max_ongoing_requests=max_open_requests(settings.scheduler, num_data_ranks=settings.parallel.data_parallel_size),
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        graceful_shutdown_timeout_s=settings.server.drain_timeout_s,
        deployment_actors=_actors(settings),
    )
    if (scaling := autoscaling_of(settings.replicas)) is None:
        deployment = deployment.options(num_replicas=settings.replicas.num_replicas)
    else:
        deployment = deployment.options(autoscaling_config=scaling)
    if not routes_by_prefix(settings):
        return deployment.bind(settings)
    server = deployment.options(request_router_config={"request_router_class": LOAD_ROUTER}).bind(settings)
    return with_prefix_router(server, PromptReaders(settings))


def routes_by_prefix(settings: Settings) -> bool:
    """Return True if routers select replicas by cached prefixes; log a warning if this Ray does not support it."""
    wanted = {"on": True, "off": False}.get(settings.server.prefix_routing, max_num_replicas(settings.replicas) > 1)
    if not wanted:
        return False
    if (fault := unknown_ray()) is not None:
        log.warning("requests are not routed by prefix: %s", fault)
    return fault is None


def journal_of(settings: Settings) -> JournalClient | None:
    """Connect to the journal if requests outlive this replica; log a warning if no journal is configured.

    Raises: SettingsError if the journal is required but not configured.
    """
    server = settings.server
    if not keeps_journal(settings):
        return None
    host, _, port = server.journal_address.rpartition(":")
    if host and port.isdigit() and server.journal_key:
        return JournalClient((host, int(port)), key=server.journal_key.encode(), ttl_s=server.resume_ttl_s)
    message = "journal: needs journal_address (HOST:PORT) and journal_key, which `rayserve-moe serve` sets by itself"
    if server.journal == "on":
        raise SettingsError(message)
    log.warning("requests do not outlive their replica: %s", message)
    return None


def page_feed(engine: ReplicaEngine) -> PageFeed:
    """Return the feed that reports this engine's cached pages to routers."""
    key = shared_key(serve.get_replica_context().app_name)
    return PageFeed(engine.loop.control.pages, engine.loop.capacity, host=ray.util.get_node_ip_address(), key=key)


def membership_of(settings: Settings, *, give_up: Callable[[], object]) -> Membership:
    """Return this replica's membership in the fleet of its deployment."""
    context = serve.get_replica_context()
    state = RemoteState(partial(serve.get_deployment_actor, STATE_NAME))
    listed = partial(listed_replicas, context.app_name, context.deployment)
    num_prefill = settings.replicas.num_prefill if routes_by_prefix(settings) else 0
    member = FleetMember(context.replica_tag, state, listed, give_up, num_prefill=num_prefill)
    return Membership(member, fleet_calls(), state, settings.updates.staging_timeout_s)


def take_role(control: EngineControl, member: FleetMember, *, settings: Settings) -> None:
    """Have other replicas compute the long prompts of one that answers requests, if some do."""
    if not member.num_prefill:
        return
    log.info("this replica %s", "computes prompts for others" if member.is_prefill else "answers requests")
    if not member.is_prefill and control.pushes is not None:
        min_tokens = prefill_chunk_tokens(settings.scheduler)
        control.pushes.receive_from(PrefillPeers(member, fleet_calls()), min_tokens=min_tokens)


def fleet_calls() -> FleetCalls:
    """Return calls to all replicas of this deployment; they must run on a single event loop."""
    context = serve.get_replica_context()
    return FleetCalls(context.app_name, context.deployment, method="fleet_call")


def _actors(settings: Settings) -> list[dict[str, Any] | DeploymentActorConfig]:
    """Return the actors that Serve's controller starts and restarts: the fleet state and, with EPLB, the planner.

    The fleet state runs on the head node, so that losing another node never loses it together with its replicas.
    """
    on_head = {"num_cpus": 0, "resources": {HEAD_NODE_RESOURCE_NAME: 0.001}}
    state = DeploymentActorConfig(name=STATE_NAME, actor_class=WantedStateActor, actor_options=on_head)
    if not settings.balancing.enabled:
        return [state]
    planning = planning_config(settings.balancing, settings.experts)
    return [
        state,
        DeploymentActorConfig(
            name=BALANCER_NAME,
            actor_class=EplbPlannerActor,
            init_kwargs=asdict(planning),  # Serve accepts only plain values if a file configures it
            actor_options={"num_cpus": 0},
        ),
    ]


def end_after_failure(engine: ReplicaEngine, traffic: Traffic, *, end_process: Callable[[], None]) -> None:
    """Wait for the engine to end; after a failure release its hosts, wait for open answers, and end the process.

    Serve replaces a lost replica at once. The engine publishes every request's error before its thread ends.
    """
    if not engine.loop.has_failed.result():
        return
    engine.shutdown()
    deadline = time.monotonic() + ANSWERS_TIMEOUT_S
    while traffic.num_open and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    log.error("the engine has failed: this replica ends with %d unanswered requests", traffic.num_open)
    end_process()


async def answer_trainer(state: ApiState, call: str, *, arguments: tuple[Any, ...]) -> Answer:
    """Return the answer to a call of a trainer in the same Ray cluster, which concerns all replicas.

    Every host fetches its own object: this replica forwards references and holds no values. Callers of actors can run
    code in the cluster anyway, so unpickling a call adds no risk.
    """
    return await answer_by(_TRAINER_CALLS, state, call=call, arguments=arguments)


async def _held_weights(state: ApiState) -> dict[str, Any]:
    """Return the dtypes of held weights and the serving version."""
    report = state.loop.start_report
    return {
        "dtype": report.dtype,
        "float32_tensors": report.float32_tensors,
        "weight_version": state.card.weight_version,
    }


async def _wanted_tensors(
    state: ApiState, update_id: str, number: int, heads: Heads, base_version: str | None
) -> dict[str, list[list[WantedTensor]]]:
    """Return, by replica, the tensors of a bucket that each of its hosts needs.

    A single replica may have an empty name.
    """
    assert state.membership is not None, "a replica of Serve has a fleet"
    limit_s = state.membership.staging_timeout_s
    answers = await Fleet(state).call("wanted", update_id, number, heads, base_version, timeout_s=limit_s)
    return values_of(answers)


async def _stage_bucket(
    state: ApiState, update_id: str, number: int, sent: dict[str, SentShares], order: WeightOrder | None
) -> WeightOutcome:
    """Stage a bucket's shares on all replicas, and switch to the weights with an `order`.

    The order accompanies the last bucket.
    """
    bucket_order = BucketOrder(update_id, order or WeightOrder(""), number, is_last=order is not None)
    return await Fleet(state).stage_bucket(shares_of(state, sent), sent=sent, order=bucket_order)


async def _drop_update(state: ApiState, update_id: str) -> None:
    await Fleet(state).every("drop_update", update_id)


_TRAINER_CALLS = {"drop": _drop_update, "held": _held_weights, "stage": _stage_bucket, "wanted": _wanted_tensors}
