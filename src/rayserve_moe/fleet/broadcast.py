"""Calls to all replicas of an application, with their answers and the listed replicas that did not answer.

Only this module depends on how Serve 2.60 keeps the answers of a broadcast apart: its public method drops all answers
if a single replica is late.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve._private.common import ReplicaState
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from rayserve_moe.fleet.member import GONE, StateUnavailableError

KNOWN_WITHIN_S = 5.0
"""Maximum time until Serve stops listing a lost replica and its handles know a replica that has just joined."""
_RETRY_S = 0.25


@dataclass(frozen=True)
class Refusal:
    """The reason why a replica has rejected a call."""

    status: int
    """HTTP status."""
    message: str
    code: str | None = None
    """Error code of the API."""


@dataclass(frozen=True)
class Answer:
    """A replica's answer: a value, or the refusal."""

    replica: str
    value: Any = None
    refusal: Refusal | None = None


@dataclass(frozen=True)
class Answers:
    """The answers of a fleet."""

    by_replica: dict[str, Answer] = field(default_factory=dict)
    """By replica name, sorted."""
    missing: tuple[str, ...] = ()
    """Names of replicas that did not answer."""
    num_wanted: int | None = None
    """Number of replicas that Serve keeps up: above the number of answers while it replaces one; None if unknown."""

    @property
    def values_by_replica(self) -> dict[str, Any]:
        """Return the value of every replica that did not refuse."""
        return {name: answer.value for name, answer in self.by_replica.items() if answer.refusal is None}

    @property
    def values(self) -> list[Any]:
        """Return the values of all replicas that did not refuse."""
        return list(self.values_by_replica.values())

    @property
    def refused(self) -> Answer | None:
        """Return the first refusal, or None."""
        return next((answer for answer in self.by_replica.values() if answer.refusal is not None), None)


def collect(answers: Iterable[Any], expected: Collection[str]) -> Answers:
    """Return the answers by replica and the `expected` replicas without an answer; ignore all that is no `Answer`."""
    found = {answer.replica: answer for answer in answers if isinstance(answer, Answer)}
    return Answers(dict(sorted(found.items())), tuple(sorted(set(expected) - set(found))))


def expected_of(listed: dict[str, str], members: Collection[str]) -> set[str]:
    """Return the replicas that a call concerns: running ones, and starting ones that have joined; none that stop."""
    return {name for name, state in listed.items() if state not in GONE and (state != "STARTING" or name in members)}


def listed_replicas(application: str, deployment: str) -> dict[str, str]:
    """Return the replicas of a deployment that Serve's controller lists, with their states. Blocks.

    Raises: StateUnavailableError while no controller runs.
    """
    return _states_of(_details_of(application, deployment))


def _states_of(details: dict[str, Any]) -> dict[str, str]:
    return {one["replica_id"]: ReplicaState(one["state"]).value for one in details.get("replicas", [])}


def _details_of(application: str, deployment: str) -> dict[str, Any]:
    """Return what Serve's controller tells about a deployment; empty if it has none of this name. Blocks.

    Raises: StateUnavailableError while no controller runs.
    """
    try:
        client = _get_global_client()
        assert client is not None, "Serve runs"
        details = client.get_serve_details()
    except (RayError, RayServeException) as error:
        raise StateUnavailableError(f"Serve's controller does not answer: {type(error).__name__}") from error
    return details["applications"].get(application, {}).get("deployments", {}).get(deployment, {})


class FleetCalls:
    """Calls `method(call, arguments)` of every replica of a deployment, from a single event loop."""

    def __init__(self, application: str, deployment: str, *, method: str) -> None:
        self._application, self._deployment, self._method = application, deployment, method
        self._handle: DeploymentHandle | None = None

    def put(self, content: bytearray) -> list[Any]:
        """Store bytes for all replicas; return an argument that refers to them."""
        return [ray.put(np.frombuffer(content, np.uint8))]

    def get(self, sent: list[Any]) -> bytearray:
        """Return the bytes that an argument refers to."""
        content: Any = ray.get(sent[0])
        return bytearray(content)

    async def ask(
        self, call: str, *arguments: Any, timeout_s: float, members: Callable[[], Collection[str]]
    ) -> Answers:
        """Return the answers to an idempotent call.

        It is repeated for up to `KNOWN_WITHIN_S` while a listed replica is missing, unless the call has timed out.
        """
        deadline = time.monotonic() + KNOWN_WITHIN_S
        while True:
            began = time.monotonic()
            sent = await self._sent(call, arguments, timeout_s=timeout_s)
            details = await asyncio.to_thread(_details_of, self._application, self._deployment)
            answers = collect(sent, expected_of(_states_of(details), members()))
            now = time.monotonic()
            if not answers.missing or now > deadline or now - began >= timeout_s:
                return replace(answers, num_wanted=details.get("target_num_replicas"))
            await asyncio.sleep(_RETRY_S)

    async def ask_one(self, replica: str, call: str, *arguments: Any, timeout_s: float) -> Answer | None:
        """Return the answer of a replica, or None if it is lost or does not answer in time. It is asked once.

        Needs the request router of `serve_router.LOAD_ROUTER`.
        """
        handle = self._connected().options(method_name=self._method)

        def choose(listed: list[Any]) -> Any:
            return next((one for one in listed if one.replica_id.unique_id == replica), listed[0])

        async def asked() -> Answer | None:
            async with handle.choose_replica(choose=choose) as selection:
                if selection._replica.replica_id.unique_id != replica:
                    return None
                return await handle.dispatch(selection, call, arguments)

        try:
            return await asyncio.wait_for(asked(), timeout_s)
        except (RayError, RayServeException, TimeoutError):
            return None

    async def num_wanted(self) -> int | None:
        """Return the number of replicas that Serve keeps up; None if its controller does not answer."""
        try:
            details = await asyncio.to_thread(_details_of, self._application, self._deployment)
        except StateUnavailableError:
            return None
        return details.get("target_num_replicas")

    async def _sent(self, call: str, arguments: tuple[Any, ...], *, timeout_s: float) -> list[Any]:
        """Send a call once; return answers and errors, without the late replicas."""
        handle = self._connected()
        try:
            calls = await asyncio.wait_for(
                handle.broadcast(self._method, call, arguments)._fetch_replica_results_async(), timeout_s
            )
        except (RayServeException, TimeoutError):
            return []
        tasks = [asyncio.ensure_future(_answer_of(one.get_async())) for one in calls]
        try:
            done, _ = await asyncio.wait(tasks, timeout=timeout_s)
        finally:
            for task in tasks:
                task.cancel()
        return [task.result() for task in done]

    def _connected(self) -> DeploymentHandle:
        if self._handle is None:
            # Serve caches handles, and a handle belongs to the event loop of its first call.
            handle = copy.copy(serve.get_deployment_handle(self._deployment, self._application))
            self._handle = handle.options(_by_reference=True)  # weights are passed as references
        return self._handle


async def _answer_of(answer: Awaitable[Any]) -> Any:
    try:
        return await answer
    except (RayError, RayServeException, asyncio.CancelledError) as error:
        return error
