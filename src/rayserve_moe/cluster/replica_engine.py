"""The engine of one server replica: a slice of hosts behind an engine loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

from ray.actor import ActorHandle

from rayserve_moe.balancing.planning import LocalPlanner
from rayserve_moe.checkpoints.files import open_checkpoint
from rayserve_moe.cluster.eplb_planner import RemotePlanner
from rayserve_moe.cluster.group_executor import GroupExecutor
from rayserve_moe.cluster.host_group import GroupWeights
from rayserve_moe.config.settings import Settings
from rayserve_moe.engine.engine_loop import EngineLoop
from rayserve_moe.engine.guides import constraint_compiler
from rayserve_moe.execution.card import check_tensors, describe_model
from rayserve_moe.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class ReplicaEngine:
    """A running engine, its executor, and the tokenizer of its model."""

    loop: EngineLoop
    tokenizer: Tokenizer
    executor: GroupExecutor

    def shutdown(self) -> None:
        """Abort what runs and stop everything. May be called twice."""
        self.loop.shutdown()


def start_replica_engine(
    settings: Settings,
    *,
    find_balancer: Callable[[], ActorHandle] | None = None,
    given_up: threading.Event | None = None,
    serve_weights: GroupWeights | None = None,
    weight_version: str | None = None,
) -> ReplicaEngine:
    """Reserve a slice, load the model onto it and start the engine thread.

    `serve_weights` and `weight_version` name other weights of the model than the configured ones. `find_balancer`
    finds the actor that plans placements (see `RemotePlanner`); without one this process plans itself.
    Raises SettingsError, CheckpointError, TimeoutError, a worker's error, or GivenUpError once another thread has set
    `given_up`; then nothing stays reserved.
    """
    described = describe_model(settings)
    check_tensors(open_checkpoint(described.runner.model.path))
    executor = GroupExecutor(described.runner, parallel=settings.parallel, cluster=settings.cluster, given_up=given_up)
    card = described.card
    if serve_weights is not None:
        executor.begin_with(serve_weights)
        card = replace(card, path=serve_weights.source or card.path)
    card = card if weight_version is None else replace(card, weight_version=weight_version)
    with ExitStack() as undo:
        undo.callback(executor.shutdown)
        loop = EngineLoop(
            executor,
            card,
            settings=settings,
            constraints=constraint_compiler(described.tokenizer, described.card, settings=settings.structured),
            planner_for=LocalPlanner if find_balancer is None else lambda _: RemotePlanner(find_balancer),
            rebuilder=executor if settings.cluster.most_rebuilds_in_10_minutes else None,
        )
        undo.pop_all()
    return ReplicaEngine(loop, described.tokenizer, executor)
