"""From what a step leaves on the devices to its result, in the order of its plan."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

from rayserve_moe.execution.pack import PackedStep
from rayserve_moe.execution.step_types import StepOutput
from rayserve_moe.requests import TopLogprobs
from rayserve_moe.scheduling.step_plan import StepPlan, StepResult, TokenScores


@dataclass(frozen=True)
class WantedOutputs:
    """Which outputs of a step are copied to the host, besides what it sampled."""

    routing: bool
    top: bool
    scores: bool
    score_top: bool
    expert_counts: bool


def wanted_outputs(plan: StepPlan) -> WantedOutputs:
    """What the plan of a step wants of its outputs."""
    scores = len(plan.block_work.score_tokens) > 0
    return WantedOutputs(
        plan.wants_routing, plan.wants_top, scores, scores and plan.wants_score_top, plan.wants_expert_counts
    )


def start_copies(output: StepOutput, wanted: WantedOutputs) -> None:
    """Have what is wanted copied to the host as soon as it is there."""
    for array, is_wanted in (
        (output.sampled_N3S, True),
        (output.topk_ids_MTK, wanted.routing),
        (output.top_N2SJ, wanted.top),
        (output.scores and output.scores.found_N2X, wanted.scores),
        (output.scores and output.scores.top_N2XJ, wanted.score_top),
        (output.expert_counts_ME, wanted.expert_counts),
        (output.tally_N4, True),
    ):
        if array is not None and is_wanted:
            array.copy_to_host_async()


def step_result(step_id: int, output: StepOutput, *, packed: PackedStep, wanted: WantedOutputs) -> StepResult:
    """Wait for the copies, and put what they hold into the plan's order."""
    sampled = np.asarray(output.sampled_N3S).transpose(1, 0, 2).reshape(3, -1)
    ids, logprob_bits, ranks = sampled[:, packed.sample_places]
    routing = None
    if wanted.routing and output.topk_ids_MTK is not None:
        rows_NMK = np.asarray(output.topk_ids_MTK)[:, packed.token_places].transpose(1, 0, 2)
        routing = np.ascontiguousarray(rows_NMK)
    return StepResult(
        step_id,
        ids,
        logprob_bits.view(np.float32),
        ranks,
        routing,
        top=_top(output.top_N2SJ, packed.sample_places) if wanted.top else None,
        scores=_scores(output, packed, wanted) if wanted.scores else None,
        expert_counts=None if output.expert_counts_ME is None else np.asarray(output.expert_counts_ME),
        tally=None if output.tally_N4 is None else np.asarray(output.tally_N4).sum(axis=0, dtype=np.int64),
    )


def _scores(output: StepOutput, packed: PackedStep, wanted: WantedOutputs) -> TokenScores:
    assert output.scores is not None and packed.blocks is not None, "only steps with prefill blocks score"
    places = packed.blocks.score_places
    found = np.asarray(output.scores.found_N2X).transpose(1, 0, 2).reshape(2, -1)
    bits, ranks = found[:, places]
    top = _top(output.scores.top_N2XJ, places) if wanted.score_top else None
    return TokenScores(bits.view(np.float32), ranks, top)


def _top(top_N2PJ: jax.Array, places: np.ndarray) -> TopLogprobs:
    """Likeliest tokens at `places` among those of all data ranks."""
    of_ranks = np.asarray(top_N2PJ)
    ids, bits = of_ranks.transpose(1, 0, 2, 3).reshape(2, -1, of_ranks.shape[-1])[:, places]
    return TopLogprobs(ids, np.ascontiguousarray(bits).view(np.float32))
