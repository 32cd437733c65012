"""From what a step leaves on the devices to its result, in the order of its plan."""

from __future__ import annotations

import jax
import numpy as np

from rayserve_moe.balancing.migration import FailedFetch
from rayserve_moe.execution.step.pack import PackedStep
from rayserve_moe.execution.step.pytrees import StepOutput
from rayserve_moe.requests.records import TopLogprobs
from rayserve_moe.requests.token_evidence import SampleSupport
from rayserve_moe.scheduling.step_plan import StepPlan, StepResult, TokenScores


def wanted_outputs(plan: StepPlan) -> frozenset[str]:
    """Names of the fields of StepOutput that the plan of a step wants on the host."""
    scores = len(plan.block_work.score_tokens) > 0
    wanted = {
        "sampled_N3S": True,
        "topk_ids_MTK": plan.wants_routing,
        "top_N2SJ": plan.wants_top,
        "scores_N2X": scores,
        "score_top_N2XJ": scores and plan.wants_score_top,
        "expert_counts_ME": plan.wants_expert_counts,
        "tally_N4": True,
    }
    return frozenset(name for name, is_wanted in wanted.items() if is_wanted)


def only_wanted(output: StepOutput, wanted: frozenset[str]) -> StepOutput:
    """The output without the arrays that are not wanted."""
    return StepOutput(**{name: getattr(output, name) for name in wanted})


def start_copies(output: StepOutput, *, is_needed: bool) -> StepOutput:
    """Have all arrays copied to the host as soon as they are there, if they are not there anyway; returns them."""
    for array in jax.tree.leaves(output) if is_needed else ():
        array.copy_to_host_async()
    return output


def step_result(
    output: StepOutput, *, packed: PackedStep, pack_s: float, device_s: float, failed_fetch: FailedFetch | None
) -> StepResult:
    """Wait for the copies, and put what they hold into the plan's order."""
    sampled = np.asarray(output.sampled_N3S).transpose(1, 0, 2).reshape(3, -1)
    ids, logprob_bits, ranks = sampled[:, packed.sample_places]
    routing = None
    if output.topk_ids_MTK is not None:
        rows_NMK = np.asarray(output.topk_ids_MTK)[:, packed.token_places].transpose(1, 0, 2)
        routing = np.ascontiguousarray(rows_NMK)
    hidden, listed = _inspected(output, num_tokens=packed.num_inspected)
    return StepResult(
        packed.step_id,
        ids,
        logprob_bits.view(np.float32),
        ranks,
        routing,
        pack_s,
        device_s,
        top=_top(output.top_N2SJ, packed.sample_places),
        scores=_scores(output, packed),
        expert_counts=None if output.expert_counts_ME is None else np.asarray(output.expert_counts_ME),
        tally=None if output.tally_N4 is None else np.asarray(output.tally_N4).sum(axis=0, dtype=np.int64),
        failed_fetch=failed_fetch,
        evidence=None if output.evidence_AF is None else np.asarray(output.evidence_AF)[packed.sample_places],
        support=_support(output, packed.sample_places),
        hidden=hidden,
        listed=listed,
    )


def _scores(output: StepOutput, packed: PackedStep) -> TokenScores | None:
    if output.scores_N2X is None:
        return None
    assert packed.blocks is not None, "only steps with prefill blocks score"
    places = packed.blocks.score_places
    found = np.asarray(output.scores_N2X).transpose(1, 0, 2).reshape(2, -1)
    bits, ranks = found[:, places]
    return TokenScores(bits.view(np.float32), ranks, _top(output.score_top_N2XJ, places))


def _support(output: StepOutput, places: np.ndarray) -> SampleSupport | None:
    if output.support is None:
        return None
    bits, logprobs = (np.asarray(each)[places] for each in output.support)
    is_kept = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")
    counts, ids = is_kept.sum(axis=1, dtype=np.int32), np.nonzero(is_kept)[1].astype(np.int32)
    return SampleSupport(counts, ids, logprobs)


def _inspected(output: StepOutput, *, num_tokens: int) -> tuple[np.ndarray, np.ndarray] | tuple[None, None]:
    if output.inspected is None:
        return None, None
    hidden, listed = (
        np.concatenate([np.asarray(each) for each in found]) for found in zip(*output.inspected, strict=True)
    )
    return hidden[:num_tokens].astype(np.float32), listed[:num_tokens]


def _top(top_N2PJ: jax.Array | None, places: np.ndarray) -> TopLogprobs | None:
    """Likeliest tokens at `places` among those of all data ranks."""
    if top_N2PJ is None:
        return None
    of_ranks = np.asarray(top_N2PJ)
    ids, bits = of_ranks.transpose(1, 0, 2, 3).reshape(2, -1, of_ranks.shape[-1])[:, places]
    return TopLogprobs(ids, np.ascontiguousarray(bits).view(np.float32))
