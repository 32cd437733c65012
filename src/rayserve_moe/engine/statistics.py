"""What an engine tells of itself in numbers."""

from __future__ import annotations

import numpy as np

from rayserve_moe.engine.output_dispatch import OutputDispatch
from rayserve_moe.engine.step_cycle import StepCycle
from rayserve_moe.scheduling.step_plan import StartReport


def loop_statistics(cycle: StepCycle, outputs: OutputDispatch, *, start_report: StartReport) -> dict[str, float]:
    """Pages, requests and the step clock, as of now, from any thread; pages that are only cached count as free."""
    scheduler = cycle.scheduler
    ranks, running = scheduler.ranks, scheduler.running
    return {
        "pages_total": float(sum(rank.allocator.num_usable for rank in ranks)),
        "pages_free": float(sum(rank.num_available for rank in ranks)),
        "pages_cached": float(sum(rank.tree.num_cached_pages for rank in ranks)),
        "requests_live": float(len(outputs)),
        "requests_running": float(len(running)),
        "requests_waiting": float(max(0, outputs.num_unfinished - len(running))),
        "tokens_in_use": float(sum(sequence.num_computed for sequence in running)),
        "paused": float(cycle.is_paused),
        "preemptions": float(scheduler.num_preemptions),
        **cycle.statistics(),
        **selection_statistics(cycle.tally, num_ranks=start_report.num_expert_ranks),
        **start_report.statistics(),
    }


def selection_statistics(tally: np.ndarray | None, *, num_ranks: int) -> dict[str, float]:
    """What limits of slots did to the picks of all steps (`StepResult.tally`); nothing where there are no limits.

    `rank_imbalance` is the hottest rank of each layer and step over the mean one, weighed by their picks.
    """
    if tally is None:
        return {}
    wanted, kept, filled, hottest = map(float, tally)
    return {
        "picks_kept_share": kept / wanted if wanted else 1.0,
        "picks_rerouted": filled - kept,
        "picks_unfilled": wanted - filled,
        "rank_imbalance": hottest * num_ranks / filled if filled else 1.0,
    }
