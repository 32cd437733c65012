"""The engine of a server replica: a slice of hosts behind an engine loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from ray.actor import ActorHandle

from rayserve_moe.balancing.placement import ExpertPlacement
from rayserve_moe.balancing.planning import LocalPlanner
from rayserve_moe.checkpoints.files import open_checkpoint
from rayserve_moe.cluster.eplb_planner import RemotePlanner
from rayserve_moe.cluster.group_executor import GroupExecutor
from rayserve_moe.cluster.host_group import GroupWeights
from rayserve_moe.cluster.weight_keepers import KeptShare
from rayserve_moe.config.settings import Settings
from rayserve_moe.engine.eplb.steps import placement_elsewhere
from rayserve_moe.engine.guides import constraint_compiler
from rayserve_moe.engine.loop import EngineLoop
from rayserve_moe.execution.card import check_tensors, describe_model
from rayserve_moe.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class FirstWeights:
    """Weights that a replica starts with in place of the configured ones."""

    path: str = ""
    """Checkpoint; empty: the configured checkpoint."""
    version: str | None = None
    """Weight version to report; None: the configured version."""
    shares: tuple[KeptShare, ...] = ()
    """Shares that another replica's keepers offer; they take precedence over `path`."""
    placement: ExpertPlacement | None = None
    """Expert placement of `shares`."""
    adapter: str | None = None
    """Name of the adapter that is merged into `shares`; empty: they are the configured checkpoint; None: others."""

    @property
    def of_group(self) -> GroupWeights:
        """Return the weights in the form that hosts load."""
        if not self.shares:
            return GroupWeights(self.path)
        return GroupWeights(None, offered=self.shares, placement=self.placement)


@dataclass(frozen=True)
class ReplicaEngine:
    """A running engine, its executor, and the tokenizer of its model."""

    loop: EngineLoop
    tokenizer: Tokenizer
    executor: GroupExecutor

    def offered_weights(self) -> FirstWeights | None:
        """Return the weights another replica can start with; None unless the serving weights were sent and are kept."""
        shares, loop = self.executor.sources.offered, self.loop
        if not shares:
            return None
        return FirstWeights("", loop.card.weight_version, shares, loop.eplb.first, loop.control.adapter)

    def shutdown(self) -> None:
        """Abort running requests and stop everything. May be called twice."""
        self.loop.shutdown()


CONFIGURED = FirstWeights()


def start_replica_engine(
    settings: Settings,
    *,
    find_balancer: Callable[[], ActorHandle] | None = None,
    given_up: threading.Event | None = None,
    weights: FirstWeights = CONFIGURED,
) -> ReplicaEngine:
    """Reserve a slice, load the model onto it and start the engine thread.

    `weights` replace the configured ones. `find_balancer` finds the actor that plans placements (see `RemotePlanner`);
    without it this process plans itself. Raises SettingsError, CheckpointError, TimeoutError, a worker's error, or
    GivenUpError once another thread has set `given_up`. After an error nothing stays reserved.
    """
    described = describe_model(settings)
    check_tensors(open_checkpoint(described.runner.model.path))
    executor = GroupExecutor(described.runner, parallel=settings.parallel, cluster=settings.cluster, given_up=given_up)
    executor.begin_with(weights.of_group)
    card = replace(described.card, path=weights.path or described.card.path)
    card = card if weights.version is None else replace(card, weight_version=weights.version)
    with ExitStack() as undo:
        undo.callback(executor.shutdown)
        loop = EngineLoop(
            executor,
            card,
            settings=settings,
            constraints=constraint_compiler(described.tokenizer, described.card, settings=settings.structured),
            planner_for=LocalPlanner if find_balancer is None else lambda _: RemotePlanner(find_balancer),
            rebuilder=executor if settings.cluster.max_rebuilds_in_10_minutes else None,
        )
        undo.pop_all()
    executor.place_experts = partial(placement_elsewhere, loop.eplb)
    loop.control.base_path = described.card.path
    if weights.shares or weights.path not in ("", described.card.path):
        loop.control.adapter = weights.adapter
    return ReplicaEngine(loop, described.tokenizer, executor)
