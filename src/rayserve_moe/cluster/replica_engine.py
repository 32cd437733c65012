"""Assembly of what one serving replica runs: the engine over its slice, and the tokenizer."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from ray.actor import ActorHandle

from rayserve_moe.balancing.planning import LocalPlanner
from rayserve_moe.checkpoints.files import read_config
from rayserve_moe.checkpoints.model_path import resolve_model_path
from rayserve_moe.cluster.eplb_planner import RemotePlanner
from rayserve_moe.cluster.group_executor import GroupExecutor
from rayserve_moe.config.load import default_cache_directory
from rayserve_moe.config.settings import ModelSettings, Settings
from rayserve_moe.engine.engine_loop import EngineLoop, LoopSettings
from rayserve_moe.engine.eplb_control import EplbControl, planning_config, start_eplb
from rayserve_moe.execution.card import model_card
from rayserve_moe.execution.host_runner import RunnerSettings
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.requests import ModelCard
from rayserve_moe.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class DescribedModel:
    """What is known of a model before its weights are read; the settings have its directory."""

    settings: ModelSettings
    tokenizer: Tokenizer
    card: ModelCard


def describe_model(settings: Settings) -> DescribedModel:
    """Read config and tokenizer of the checkpoint; a synthetic one is made if it is not there.

    Raises ValueError with what is missing or unsupported.
    """
    path = resolve_model_path(settings.model.path, cache_directory=default_cache_directory())
    model = dataclasses.replace(settings.model, path=str(path))
    tokenizer = Tokenizer(path)
    card = model_card(
        spec_from_config(read_config(path)),
        model=model,
        replay=settings.replay,
        experts=settings.experts,
        name=path.name,
        eos_token_ids=tokenizer.eos_token_ids,
    )
    return DescribedModel(model, tokenizer, card)


@dataclass(frozen=True)
class ReplicaEngine:
    """A running engine and the tokenizer of its model, and what balances its experts, where that is switched on."""

    loop: EngineLoop
    tokenizer: Tokenizer
    executor: GroupExecutor
    balancing: EplbControl | None = None

    def shutdown(self) -> None:
        """Abort what runs and stop everything. May be called twice."""
        if self.balancing is not None:
            self.balancing.stop()
        self.loop.shutdown()


def start_replica_engine(
    settings: Settings,
    *,
    find_balancer: Callable[[], ActorHandle] | None = None,
    given_up: threading.Event | None = None,
) -> ReplicaEngine:
    """Reserve a slice, load the model onto it and start the engine thread.

    `find_balancer` finds the actor that plans placements (see `RemotePlanner`); without one this process plans itself.
    Raises what stands in the way, and nothing stays reserved: SettingsError, CheckpointError, TimeoutError, a worker's
    error, or GivenUpError once another thread has set `given_up`.
    """
    described = describe_model(settings)
    executor = GroupExecutor(
        RunnerSettings(
            described.settings,
            settings.scheduler,
            settings.cache,
            settings.replay,
            settings.experts,
            settings.compile,
            settings.balancing,
            settings.updates,
            settings.logging,
        ),
        parallel=settings.parallel,
        cluster=settings.cluster,
        given_up=given_up,
    )
    with ExitStack() as undo:
        undo.callback(executor.shutdown)
        loop = EngineLoop(executor, described.card, settings=_loop_settings(settings))
        balancing = start_eplb(
            loop.eplb,
            LocalPlanner if find_balancer is None else lambda _: RemotePlanner(find_balancer),
            rules=planning_config(settings.balancing, settings.experts),
            layer_ids=described.card.routing.layer_ids,
        )
        undo.pop_all()
    return ReplicaEngine(loop, described.tokenizer, executor, balancing)


def _loop_settings(settings: Settings) -> LoopSettings:
    timing = settings.cluster
    return LoopSettings(
        settings.scheduler,
        settings.cache,
        num_data_ranks=settings.parallel.data_parallel_size,
        balancing=settings.balancing,
        num_hosts=settings.parallel.num_hosts,
        idle_release_s=timing.idle_release_s,
        step_timeout_s=timing.step_timeout_s,
    )
