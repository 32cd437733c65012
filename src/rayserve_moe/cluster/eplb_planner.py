"""The actor that plans expert placements for all replicas, and the planner of a replica that calls it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from rayserve_moe.balancing.load_window import LoadReading
from rayserve_moe.balancing.planning import LocalPlanner, PlacementState, PlanFailure, PlanningConfig, Proposal

BALANCER_NAME = "expert-balancer"
NICENESS = 15
ANSWER_TIMEOUT_S = 60.0


class EplbPlanner:
    """Collects the reported loads of engines and plans for each engine separately.

    Engines choose a new name at each start; only the `max_engines` that reported last are kept. `rules` are the fields
    of `PlanningConfig`.
    """

    def __init__(self, *, max_engines: int = 256, **rules: Any) -> None:
        os.nice(NICENESS)
        self._config, self._max_engines = PlanningConfig(**rules), max_engines
        self._advisors: dict[str, LocalPlanner] = {}

    def observe(self, engine: str, reading: LoadReading) -> bool:
        """Record an engine's reading; return True if the engine should request a plan."""
        advisor = self._advisors.pop(engine, None) or LocalPlanner(self._config)
        self._advisors[engine] = advisor
        if len(self._advisors) > self._max_engines:
            del self._advisors[next(iter(self._advisors))]
        return advisor.observe(reading)

    def propose(self, engine: str, state: PlacementState) -> Proposal | None:
        """Plan for an engine. Return None if no plan is worth its moves or the engine is unknown."""
        advisor = self._advisors.get(engine)
        return None if advisor is None else advisor.propose(state)


EplbPlannerActor = ray.remote(EplbPlanner)


class RemotePlanner:
    """The balancer actor as the `Planner` of an engine. Calls block; all come from the same thread.

    `connect` finds the actor, or raises ValueError if it does not exist now. After a loss the next call looks it up
    again. An actor that does not answer in time is killed, so that its owner restarts it.
    """

    def __init__(self, connect: Callable[[], ActorHandle], *, answer_timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self._connect, self._answer_timeout_s = connect, answer_timeout_s
        self._name = uuid.uuid4().hex
        self._actor: ActorHandle | None = None

    def observe(self, reading: LoadReading) -> bool:
        return self._ask("observe", reading)

    def propose(self, state: PlacementState) -> Proposal | None:
        return self._ask("propose", state)

    def _ask(self, method: str, argument: LoadReading | PlacementState) -> Any:
        actor = self._actor = self._actor or self._find()
        try:
            return ray.get(getattr(actor, method).remote(self._name, argument), timeout=self._answer_timeout_s)
        except GetTimeoutError as error:
            self._actor = None
            ray.kill(actor)
            raise PlanFailure("late", f"no answer within {self._answer_timeout_s} s") from error
        except RayTaskError as error:
            raise PlanFailure("failed", f"planning failed: {error}") from error
        except RayError as error:
            self._actor = None
            raise PlanFailure("lost", f"the balancer is gone: {type(error).__name__}") from error

    def _find(self) -> ActorHandle:
        try:
            return self._connect()
        except (ValueError, RayError) as error:
            raise PlanFailure("lost", "no balancer is running") from error
