"""Sampling in a step and its updates of rows; immediate, or deferred until masks arrive from the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.decoding.adjustment import Penalties, adjust, record_samples
from rayserve_moe.decoding.evidence import EvidenceLogits, sampling_mask, with_evidence
from rayserve_moe.decoding.log_probs import TopTokens
from rayserve_moe.decoding.logit_processors import LogitProcessor, allowed_logits, processed_size
from rayserve_moe.decoding.sampling import Sampled, SamplingBatch, accepted, drafts_of, sample
from rayserve_moe.execution.step.inputs import sampling_of
from rayserve_moe.execution.step.pack import PackedStep
from rayserve_moe.execution.step.pytrees import DeviceState, StepConfig, StepOutput
from rayserve_moe.execution.step.results import only_wanted
from rayserve_moe.model.transformer import words_of
from rayserve_moe.parallel.sharding import gather_rows
from rayserve_moe.requests.columns import wants_mask
from rayserve_moe.requests.fields import MAX_LISTED_IDS, MAX_TOP_LOGPROBS
from rayserve_moe.requests.processor_arguments import NOT_PROCESSED, NUM_RECENT
from rayserve_moe.scheduling.record_copies import with_fields
from rayserve_moe.scheduling.step_plan import SampleMasks, StepPlan

NO_MASKS = SampleMasks(np.zeros(0, np.intp), np.zeros((0, 0), np.int32))
"""No restrictions and no requested evidence."""
CompiledSampler = Callable[..., tuple[DeviceState, StepOutput]]
"""Compiled `sample_held`: takes DeviceState, a step's `logits_AV` and `held`."""


class SampleInput(NamedTuple):
    """Inputs of a data rank's samples."""

    rows_S: jax.Array
    """Rows of the rank; a row that does not exist marks padding."""
    sampling: SamplingBatch
    penalties: Penalties
    ids_S: jax.Array
    """Tokens that the samples are taken after, int32."""


class HeldInputs(NamedTuple):
    """Inputs of deferred samples, int32."""

    samples_N3S: Any
    """Row, position of the new token, and previous token of each sample."""
    mask_AW: Any
    """Bits of allowed ids."""
    requested_AF: Any = None
    """Requested evidence; None if no sample has any."""
    processed_AX: Any = None
    """Inputs of logit processors; None without processors."""


class OwnSamples(NamedTuple):
    """Samples of a data rank."""

    ids_S: jax.Array
    """int32."""
    rows_S: jax.Array
    """Row of each sample that is its row's last accepted sample; other entries are out of range."""


def sample_rows(
    logits_AV: jax.Array,
    state: DeviceState,
    *,
    samples: SampleInput,
    config: StepConfig,
    allow: Callable[[jax.Array], jax.Array] | None = None,
    returns_kept: bool = False,
) -> tuple[Sampled, OwnSamples, jax.Array, DeviceState]:
    """Sample for all data ranks from the logits that `allow` returns, and update rows with their accepted samples.

    With deferred sampling, a step without samples skips drawing. `returns_kept` is of `sample`.

    Returns: samples, samples of this rank, adjusted logits, state.
    """
    plan, part, num_rows = config.model.plan, words_of(config.model), len(state.last_tokens_R)
    nowhere = len(state.seen_RV)
    rows_S = jnp.where(samples.rows_S < num_rows, plan.data_rank() * num_rows + samples.rows_S, nowhere)
    given = (rows_S, samples.sampling, samples.penalties)
    ids = (samples.ids_S,) if config.max_drafts else ()
    rows_A, sampling, penalties, *ids = gather_rows((*given, *ids), plan)
    drafts = drafts_of(rows_A, sampling.position_S, *ids, max_drafts=config.max_drafts) if ids else None
    drafted_SK = drafts and drafts.drafted_SK
    adjusted_AV = adjust(logits_AV, state, rows_S=rows_A, penalties=penalties, part=part, drafted_SK=drafted_SK)

    def draw() -> Sampled:
        allowed_AV = adjusted_AV if allow is None else allow(adjusted_AV)
        table = config.model.kernels.sampling
        return sample(
            allowed_AV,
            sampling,
            part=part,
            max_top=MAX_TOP_LOGPROBS,
            noise=table.noise,
            masses=table.masses,
            choose=table.choose,
            truncate=table.last_kept,
            returns_kept=returns_kept,
        )

    sampled = draw_where(jnp.any(rows_A < nowhere), draw) if config.holds_samples and allow is None else draw()
    own_ids_S, own_rows_S = sampled.ids_S.reshape(plan.data_size, -1)[plan.data_rank()], samples.rows_S
    counted_A = rows_A
    if drafts is not None:
        counts_A, is_last_A = accepted(sampled.ids_S, drafts)
        counted_A = jnp.where(counts_A, rows_A, nowhere)
        own_rows_S = jnp.where(is_last_A.reshape(plan.data_size, -1)[plan.data_rank()], own_rows_S, num_rows)
    last_tokens_R = state.last_tokens_R.at[own_rows_S].set(own_ids_S, mode="drop")
    seen_RV = record_samples(state.seen_RV, sampled.ids_S, rows_S=counted_A, penalties=penalties, part=part)
    state = replace(state, last_tokens_R=last_tokens_R, seen_RV=seen_RV)
    return sampled, OwnSamples(own_ids_S, own_rows_S), adjusted_AV, state


def draw_where(has_samples: jax.Array, draw: Callable[[], Sampled]) -> Sampled:
    """Return the result of `draw`, or zeros; `has_samples` is the same on all devices, as `draw` has collectives."""
    nothing = jax.eval_shape(draw)
    return jax.lax.cond(has_samples, draw, lambda: jax.tree.map(lambda of: jnp.zeros(of.shape, of.dtype), nothing))


def sample_held(
    state: DeviceState, logits_AV: jax.Array, *, held: HeldInputs, config: StepConfig
) -> tuple[DeviceState, StepOutput]:
    """Draw the deferred samples of a step, on a device, with their requested columns (`with_evidence`)."""
    plan, part = config.model.plan, words_of(config.model)
    rows_S, positions_S, ids_S = held.samples_N3S[plan.data_rank()]
    samples = SampleInput(rows_S, *sampling_of(state, rows_S, positions_S=positions_S), ids_S)
    allow = partial(
        allowed_logits, mask_SW=held.mask_AW, given_SX=held.processed_AX, processors=config.processors, part=part
    )
    sampled, _, adjusted_AV, state = sample_rows(
        logits_AV, state, samples=samples, config=config, allow=allow, returns_kept=held.requested_AF is not None
    )
    columns: dict[str, Any] = {}
    if sampled.kept is not None:
        logits, rows = EvidenceLogits(logits_AV, allow(adjusted_AV)), gather_rows(samples.sampling, plan)
        table = config.model.kernels.sampling
        masses = table.masses
        columns["mask"] = sampling_mask(
            sampled.kept,
            sampled.ids_S,
            wants_S=wants_mask(held.requested_AF),
            temperature_S=rows.temperature_S,
            part=part,
            masses=masses,
            kept_words=table.kept_words,
        )
        sampled, found = with_evidence(
            sampled._replace(kept=None), logits, requested_SF=held.requested_AF, rows=rows, part=part, masses=masses
        )
        columns |= found
    columns["top"] = top_bits(sampled.top, plan.data_size)
    return state, StepOutput(sampled_bits(sampled, plan.data_size), columns)


def sampled_bits(sampled: Sampled, num_ranks: int) -> jax.Array:
    """Return ids, bits of log-probs, and ranks (0 for logits that were not finite), int32 [N, 3, S]."""
    bits_A = jax.lax.bitcast_convert_type(sampled.logprobs_S, jnp.int32)
    joined_PA = jnp.stack([sampled.ids_S, bits_A, jnp.where(sampled.finite_S, sampled.ranks_S, 0)])
    return jnp.moveaxis(joined_PA.reshape(3, num_ranks, -1), 1, 0)


def top_bits(top: TopTokens, num_ranks: int) -> jax.Array:
    """Return ids and bits of log-probs, int32 [N, 2, S, J]."""
    joined_PAJ = jnp.stack([top.ids_SJ, jax.lax.bitcast_convert_type(top.logprobs_SJ, jnp.int32)])
    return jnp.moveaxis(joined_PAJ.reshape(2, num_ranks, -1, joined_PAJ.shape[-1]), 1, 0)


def held_plans(plan: StepPlan) -> list[StepPlan]:
    """Return a step with deferred samples and the plan that draws them, then both again with evidence."""
    nothing = replace(
        NO_MASKS, evidence_samples=np.zeros(1, np.intp), requested=np.full((1, 1 + MAX_LISTED_IDS), -1, np.int32)
    )
    held = replace(plan, holds_samples=True)
    drawn = (StepPlan(step_id=plan.step_id, masks=masks) for masks in (NO_MASKS, nothing))
    return [each for draws in drawn for each in (held, draws)]


@dataclass
class HeldSamples:
    """Deferred samples of a step, whose masks come with the next plan."""

    packed: PackedStep
    wants_top: bool = False
    wants_evidence: bool = False
    wants_mask: bool = False
    num_processed: int = 0
    logits: jax.Array | None = None
    """Logits of the step, until they are used."""
    drawn: Callable[[], StepOutput] | None = None
    """Waits for the samples."""

    def inputs(self, masks: SampleMasks | None, *, num_words: int) -> HeldInputs:
        """Return the inputs of the samples of all data ranks; `num_words` is the number of int32 numbers of a mask."""
        held, places = self.packed.held, self.packed.sample_places
        assert held is not None, "the step has sampled"
        assert masks is not None, "masks follow a step with deferred samples"
        count, requested = held.shape[0] * held.shape[2], None
        mask = np.full((count, num_words), -1, np.int32)
        if len(masks.samples):
            mask[places[masks.samples]] = masks.bits
        self.wants_evidence = len(masks.evidence_samples) > 0
        if self.wants_evidence:
            requested = np.full((count, 1 + MAX_LISTED_IDS), -1, np.int32)
            requested[places[masks.evidence_samples]] = masks.requested
            self.wants_mask = bool(wants_mask(masks.requested).any())
        processed = None
        if self.num_processed:
            processed = np.zeros((len(mask), self.num_processed), np.int32)
            processed[:, -1 - NUM_RECENT] = NOT_PROCESSED
            if len(masks.processing):
                processed[places[masks.processing]] = masks.processed
        return HeldInputs(held, mask, requested, processed)

    def draw(
        self, samplers: Mapping[tuple[int, bool], CompiledSampler], state: DeviceState, *, inputs: HeldInputs
    ) -> tuple[DeviceState, StepOutput]:
        """Run the sampling program after the step; the output has the requested columns."""
        logits, self.logits = self.logits, None
        sampler = samplers[self.packed.shape.num_singles, self.wants_evidence]
        state, output = sampler(state, logits, held=inputs)
        unwanted = {"top": not self.wants_top, "mask": not self.wants_mask}
        wanted = {name for name in output.columns if not unwanted.get(name)}
        return state, only_wanted(output, frozenset({"sampled_N3S", *wanted}))

    def complete(self, output: StepOutput) -> StepOutput:
        """Wait for the samples and return the step's output with them."""
        assert self.drawn is not None, "a plan with masks follows a step with deferred samples"
        drawn = self.drawn()
        return with_fields(output, sampled_N3S=drawn.sampled_N3S, columns=drawn.columns)


def held_of(packed: PackedStep, plan: StepPlan, *, processors: Sequence[LogitProcessor]) -> HeldSamples:
    """Return the deferred samples of a step, with inputs for the server's `processors`."""
    return HeldSamples(packed, "top_ids" in plan.columns, num_processed=processed_size(processors) if processors else 0)
