"""Builds the step cycle of an engine from its settings."""

from __future__ import annotations

from rayserve_moe.config.derive import prefill_chunk_tokens, verify_rows
from rayserve_moe.config.settings import Settings, SpeculationSettings
from rayserve_moe.engine.eplb_steps import EplbSteps
from rayserve_moe.engine.executor import Executor
from rayserve_moe.engine.expert_reach import ExpertReach
from rayserve_moe.engine.model_drafts import proposer_for
from rayserve_moe.engine.recovery import Recovery
from rayserve_moe.engine.routing_capture import RoutingCapture
from rayserve_moe.engine.speculation import Speculation
from rayserve_moe.engine.step_cycle import StepCycle
from rayserve_moe.engine.step_losses import StepLosses
from rayserve_moe.requests import ModelCard
from rayserve_moe.scheduling.scheduler import Scheduler, StepLimits
from rayserve_moe.scheduling.step_plan import StartReport


def step_cycle_for(
    executor: Executor,
    card: ModelCard,
    *,
    settings: Settings,
    started: StartReport,
    eplb: EplbSteps,
    recovery: Recovery | None,
) -> StepCycle:
    """The cycle of an engine whose executor has `started`, with all that its settings switch on."""
    scheduler, cache, num_ranks = settings.scheduler, settings.cache, settings.parallel.data_parallel_size
    limits = StepLimits(
        num_rows=scheduler.max_running_requests,
        step_tokens=scheduler.max_step_tokens,
        chunk_tokens=prefill_chunk_tokens(scheduler),
        page_size=cache.page_size,
        num_pages=started.num_pages,
        page_groups=started.page_groups,
        max_tokens=card.max_model_len,
        num_data_ranks=num_ranks,
        caches_prefixes=cache.enable_prefix_caching,
        verify_rows=verify_rows(scheduler, settings.speculation),
    )
    capture = None
    if card.returns_routing:
        capture = RoutingCapture(
            card.routing,
            num_pages=started.num_pages,
            page_size=cache.page_size,
            num_data_ranks=num_ranks,
            weight_version=card.weight_version,
        )
    target = Scheduler(limits, weight_version=card.weight_version)
    cycle = StepCycle(
        target,
        executor,
        capture=capture,
        overlaps=scheduler.overlap_steps,
        eplb=eplb,
        speculation=_speculation_for(settings.speculation, target, card=card),
    )
    if recovery is not None:
        cycle.losses = StepLosses(recovery, target, capture=capture, eplb=eplb)
    return cycle


def _speculation_for(settings: SpeculationSettings, target: Scheduler, *, card: ModelCard) -> Speculation | None:
    """What decides on drafts, where there are any."""
    if not settings.most_drafts:
        return None
    return Speculation(
        target.table,
        proposer_for(settings),
        most_drafts=settings.most_drafts,
        reach=ExpertReach(card.routing.num_experts, card.routing.top_k),
        are_trees=settings.has_trees,
    )
