"""The step as a pure function over the whole mesh: unpack, forward, head, sampling, log-probs of prompt tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rayserve_moe.decoding.log_probs import likeliest, log_prob_of, log_probs_of, ranks_of
from rayserve_moe.decoding.sampling import Sampled
from rayserve_moe.execution.drafts.steps import draft_axes, extended
from rayserve_moe.execution.step.inputs import DeviceInput, InputLayout, change_pages, unpack
from rayserve_moe.execution.step.page_copies import apply_copies
from rayserve_moe.execution.step.pytrees import (
    BlockInputs,
    DeviceState,
    DraftState,
    ModelWeights,
    StepConfig,
    StepOutput,
)
from rayserve_moe.execution.step.row_updates import apply_adjustment, apply_update
from rayserve_moe.execution.step.samples import (
    HeldInputs,
    SampleInput,
    sample_held,
    sample_rows,
    sampled_bits,
    top_bits,
)
from rayserve_moe.experts.slot_mapping import PlacementArrays
from rayserve_moe.kernels.attention_layer import TokenBatch
from rayserve_moe.kernels.kv_pool import LayerPages
from rayserve_moe.model.draft_layer import DraftConfig
from rayserve_moe.model.draft_spec import draft_parameters
from rayserve_moe.model.kv_cache import cache_row
from rayserve_moe.model.param_spec import ParamSpec
from rayserve_moe.model.parameters import parameter_specs
from rayserve_moe.model.transformer import ForwardOutput, ModelConfig, Parameters, forward, logits_of, words_of
from rayserve_moe.requests.fields import MAX_TOP_LOGPROBS

COUNT_AXES = ROW_AXES = ("data_ranks", None)
WORD_AXES: tuple[str | None, ...] = (None, "vocabulary")
BIAS_AXES: tuple[str | None, ...] = (None, None)


def run_step(
    weights: ModelWeights,
    state: DeviceState,
    *,
    vectors_NW: jax.Array,
    blocks: BlockInputs | None,
    layout: InputLayout,
    config: StepConfig,
) -> tuple[DeviceState, StepOutput]:
    """Compute one step on every device of the mesh; returns a StepOutput, the same on all of them.

    `blocks` comes with shapes that have prefill blocks, and with no others.
    """
    plan = config.model.plan

    def on_device(
        weights: ModelWeights, state: DeviceState, vectors_NW: jax.Array, blocks: BlockInputs | None
    ) -> tuple[DeviceState, StepOutput, tuple[jax.Array | None, jax.Array | None]]:
        vector_W = vectors_NW[plan.data_rank()]
        state = replace(state, page_table_RP=change_pages(state, vector_W, layout=layout))
        step = unpack(vector_W, state, layout=layout, page_size=config.page_size, layer_pages=config.layer_pages)
        out, logits_AV = step_logits(
            weights,
            state.kv_pages,
            batch=step.batch,
            sample_places_S=step.sample_places_S,
            forced_MXK=blocks and blocks.forced_NMXK[0],
            config=config.model,
            asked=config.asked_layers,
        )
        counts_ME = state.expert_counts_ME + out.expert_counts_ME
        state = replace(state, kv_pages=out.kv_pages, expert_counts_ME=counts_ME)
        sampled, own, logits_AV, state = sample_rows(logits_AV, state, samples=_samples_of(step), config=config)
        if config.draft is not None:
            state = replace(state, draft=extended(weights, state, step=step, out=out, own=own, config=config.draft))
        scores = (None, None) if blocks is None else _scores(weights, out, step, blocks, config.model)
        output = _output(sampled, out, scores, config=config)
        hidden_TD = out.hidden_TD if config.shows_hidden else None
        return state, output, (logits_AV if config.holds_samples else None, hidden_TD)

    model, whole, state_parts = config.model, PartitionSpec(), state_partitions(config.model, config.draft)
    state, output, (logits_AV, hidden_TD) = jax.shard_map(
        on_device,
        mesh=plan.mesh,
        in_specs=(weight_partitions(model, config.draft), state_parts, whole, block_partitions(model, blocks)),
        out_specs=(state_parts, whole, (plan.partition(WORD_AXES), plan.partition(ROW_AXES))),
        check_vma=False,
    )(weights, state, vectors_NW, blocks)
    return state, replace(output, logits_AV=logits_AV, hidden_TD=hidden_TD)


def _output(
    sampled: Sampled, out: ForwardOutput, scores: tuple[jax.Array | None, jax.Array | None], *, config: StepConfig
) -> StepOutput:
    """What of a step is the same on every device."""
    plan = config.model.plan
    tally_N4 = None if out.tally_4 is None else plan.gather_data_ranks(out.tally_4[None], dim=0)
    bits = sampled_bits(sampled, plan.data_size), _captured_routing(out, config)
    return StepOutput(*bits, top_bits(sampled.top, plan.data_size), *scores, tally_N4=tally_N4)


def _samples_of(step: DeviceInput) -> SampleInput:
    batch, places_S, ancestors_S = step.batch, step.sample_places_S, None
    if batch.ancestors_U is not None:
        ancestors_S = jnp.where(places_S < batch.num_singles, batch.ancestors_U.at[places_S].get(mode="clip"), 1)
    return SampleInput(step.sample_rows_S, step.sampling, step.penalties, batch.token_ids_T[places_S], ancestors_S)


def sample_step(
    state: DeviceState, logits_AV: jax.Array, *, held: HeldInputs, config: StepConfig
) -> tuple[DeviceState, StepOutput]:
    """Sample what a step has held (`sample_held`) on every device of the mesh; the output has samples alone."""
    plan, whole, parts = config.model.plan, PartitionSpec(), state_partitions(config.model, config.draft)

    def on_device(state: DeviceState, logits_AV: jax.Array, held: HeldInputs) -> tuple[DeviceState, StepOutput]:
        return sample_held(state, logits_AV, held=held, config=config)

    return jax.shard_map(
        on_device,
        mesh=plan.mesh,
        in_specs=(parts, plan.partition(WORD_AXES), whole),
        out_specs=(parts, whole),
        check_vma=False,
    )(state, logits_AV, held)


def _captured_routing(out: ForwardOutput, config: StepConfig) -> jax.Array | None:
    """Routing of the tokens of all data ranks in the store's dtype, [M, T, K]; None where it is not captured."""
    if not config.capture_routing:
        return None
    with jax.named_scope("routing_capture"):
        ids_MTK = out.topk_ids_MTK.astype(config.model.spec.routing_layout.dtype)
        return config.model.plan.gather_data_ranks(ids_MTK, dim=1)


def step_logits(  # noqa: PLR0913 (what differs from call to call is by keyword)
    weights: ModelWeights,
    kv_pages: jax.Array,
    *,
    batch: TokenBatch,
    sample_places_S: jax.Array,
    config: ModelConfig,
    forced_MXK: jax.Array | None = None,
    asked: tuple[int, ...] = (),
) -> tuple[ForwardOutput, jax.Array]:
    """On one device: forward, then float32 logits [A, V] of the tokens at `sample_places_S` of every data rank."""
    out = forward(
        weights.params,
        kv_pages,
        batch,
        config=config,
        maps=weights.maps,
        forced_MXK=forced_MXK,
        capacity_factor=weights.capacity_factor,
        asked=asked,
    )
    return out, logits_of(weights.params, out.hidden_TD[sample_places_S], config=config)


def _scores(
    weights: ModelWeights, out: ForwardOutput, step: DeviceInput, blocks: BlockInputs, config: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """Scores of the tokens in prefill blocks of all data ranks, and the likeliest tokens there."""
    hidden_XD = out.hidden_TD[step.batch.num_singles :]
    wants_top_NB = config.plan.gather_data_ranks(step.block_wants_top_B[None], dim=0)
    wants_top_NX = jnp.repeat(wants_top_NB, len(hidden_XD) // wants_top_NB.shape[1], axis=1)
    return score_prompts(
        weights.params, hidden_XD, targets_NX=blocks.targets_NX, wants_top_NX=wants_top_NX, config=config
    )


def update_rows(state: DeviceState, vector: jax.Array, *, config: StepConfig) -> DeviceState:
    """Take over changes of rows (`apply_update`) on every device of the mesh."""
    plan = config.model.plan
    return _on_all_devices(lambda *given: apply_update(*given, data_rank=plan.data_rank()), state, vector, config)


def adjust_rows(state: DeviceState, vector: jax.Array, *, config: StepConfig) -> DeviceState:
    """Take over what adjusts a row (`apply_adjustment`) on every device of the mesh."""
    part = words_of(config.model)
    return _on_all_devices(lambda *given: apply_adjustment(*given, part=part), state, vector, config)


def copy_pages(state: DeviceState, vector: jax.Array, *, config: StepConfig) -> DeviceState:
    """Copy the last pages of prompts (`apply_copies`) on every device of the mesh."""
    plan, num_layers = config.model.plan, config.model.spec.num_layers

    def on_device(state: DeviceState, vector: jax.Array) -> DeviceState:
        size = len(state.kv_pages) // num_layers
        layers = config.layer_pages or tuple(LayerPages(0, layer * size, size) for layer in range(num_layers))
        kernel = config.model.kernels.pool.copy_pages
        return apply_copies(state, vector, data_rank=plan.data_rank(), layer_pages=layers, copy=kernel)

    return _on_all_devices(on_device, state, vector, config)


def _on_all_devices(
    apply: Callable[..., DeviceState], state: DeviceState, vector: jax.Array, config: StepConfig
) -> DeviceState:
    parts = state_partitions(config.model, config.draft)
    inputs = (parts, PartitionSpec())
    on_device = jax.named_scope("row_update")(apply)
    return jax.shard_map(on_device, mesh=config.model.plan.mesh, in_specs=inputs, out_specs=parts, check_vma=False)(
        state, vector
    )


def state_partitions(config: ModelConfig, draft: DraftConfig | None = None) -> DeviceState:
    """The tree of a DeviceState with partitions for arrays."""
    row = cache_row(config.spec, tensor_size=config.plan.tensor_size, is_flat=config.kernels.attention.has_flat_rows)
    axes_of_arrays = (
        WORD_AXES,
        BIAS_AXES,
        BIAS_AXES,
        row.pool_axes,
        COUNT_AXES,
        ROW_AXES,
        ROW_AXES,
        ROW_AXES,
        ROW_AXES[:1],
    )
    own = None
    if draft is not None:
        own = DraftState(*(cast(jax.Array, config.plan.partition(axes)) for axes in draft_axes(draft)))
    return DeviceState(*(cast(jax.Array, config.plan.partition(axes)) for axes in axes_of_arrays), draft=own)


def block_partitions(config: ModelConfig, blocks: BlockInputs | None) -> BlockInputs | None:
    """The tree of `blocks` with partitions for arrays: forced routing goes where its tokens are."""
    if blocks is None:
        return None
    return BlockInputs(cast(jax.Array, config.plan.partition(("data_ranks",))), cast(jax.Array, PartitionSpec()))


def weight_partitions(config: ModelConfig, draft: DraftConfig | None = None) -> ModelWeights:
    """The tree of ModelWeights with partitions for arrays; the maps are the same on every device."""

    def partitions(tree: dict[str, dict[str, ParamSpec]]) -> Parameters:
        return cast(
            Parameters,
            {
                group: {name: config.plan.partition(p.axes) for name, p in specs.items()}
                for group, specs in tree.items()
            },
        )

    tree = parameter_specs(config.spec, dtype="float32", expert_dtype=config.experts.weight_dtype)
    own = None
    if draft is not None:
        own = partitions(draft_parameters(draft.draft, dtype="float32", expert_dtype=draft.layer.experts.weight_dtype))
        if draft.draft.maps_words:
            own["draft"]["target_ids_V"] = cast(jax.Array, PartitionSpec())
    whole = PartitionSpec()
    return ModelWeights(partitions(tree), cast(PlacementArrays, whole), cast(jax.Array, whole), own)


GROUP_TOKENS = 128
"""Number of tokens whose logits exist at the same time."""


@jax.named_scope("prompt_scores")
def score_prompts(
    params: Parameters, hidden_XD: jax.Array, *, targets_NX: jax.Array, wants_top_NX: jax.Array, config: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """Return the prompt scores of all data ranks in the form of `StepOutput`; a target of -1 is not scored.

    Returns: scores int32 [N, 2, X], and the likeliest tokens int32 [N, 2, X, J] of the targets with `wants_top_NX`.

    Scores are log_softmax(logits) of the model itself: temperature 1, no penalty, no bias. The head does not run if no
    data rank has a target. All devices have to agree on that, so each decides by the targets of all ranks.
    """
    (num_ranks, num_tokens), part = targets_NX.shape, words_of(config)
    num_top = min(MAX_TOP_LOGPROBS, config.spec.vocab_size)

    def nothing() -> tuple[jax.Array, jax.Array]:
        shape = (num_ranks, 2, num_tokens)
        return jnp.zeros(shape, jnp.int32), jnp.zeros((*shape, num_top), jnp.int32)

    def score() -> tuple[jax.Array, jax.Array]:
        size = min(GROUP_TOKENS, num_tokens)
        targets_GW, wants_top_GW = _in_groups(targets_NX, size, -1), _in_groups(wants_top_NX, size, False)
        hidden_GYD = _padded(hidden_XD, -num_tokens % size, 0).reshape(-1, size, hidden_XD.shape[1])
        found_GPW, top_GPWJ = jax.lax.map(visit, (hidden_GYD, targets_GW, wants_top_GW))
        found_GPNY, top_GPNYJ = (
            found.reshape(*found.shape[:2], num_ranks, size, *found.shape[3:]) for found in (found_GPW, top_GPWJ)
        )
        found_NPX = found_GPNY.transpose(2, 1, 0, 3).reshape(num_ranks, 2, -1)
        top_NPXJ = top_GPNYJ.transpose(2, 1, 0, 3, 4).reshape(num_ranks, 2, -1, num_top)
        return found_NPX[:, :, :num_tokens], top_NPXJ[:, :, :num_tokens]

    def visit(group: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        hidden_YD, targets_W, wants_top_W = group
        size = len(targets_W)
        empty = (jnp.zeros((2, size), jnp.int32), jnp.zeros((2, size, num_top), jnp.int32))
        return jax.lax.cond(
            jnp.any(targets_W >= 0), lambda: score_group(hidden_YD, targets_W, wants_top_W), lambda: empty
        )

    @jax.named_scope("log_probs")
    def score_group(hidden_YD: jax.Array, targets_W: jax.Array, wants_top_W: jax.Array) -> tuple[jax.Array, jax.Array]:
        ids_W = jnp.maximum(targets_W, 0)
        logits_WV = logits_of(params, hidden_YD, config=config)
        logprobs_WV = log_probs_of(
            logits_WV, jnp.ones(len(ids_W)), part=part, masses=config.kernels.sampling.masses
        ).logprobs_SV
        num_wanted = num_top * jnp.any(wants_top_W & (targets_W >= 0)).astype(jnp.int32)
        top = likeliest(logprobs_WV, num_wanted=num_wanted, most_top=num_top, part=part)
        own_W = log_prob_of(logprobs_WV, ids_W, part=part)
        bits_W, bits_WJ = (jax.lax.bitcast_convert_type(each, jnp.int32) for each in (own_W, top.logprobs_SJ))
        ranks_W = ranks_of(logprobs_WV, ids_W, own_W, part=part)
        return jnp.stack([bits_W, ranks_W]), jnp.stack([top.ids_SJ, bits_WJ])

    return jax.lax.cond(jnp.any(targets_NX >= 0), score, nothing)


def _in_groups(values_NX: jax.Array, size: int, padding: float) -> jax.Array:
    """Return the values in groups of `size` tokens of every data rank, [G, W]."""
    padded_XN = _padded(values_NX.T, -values_NX.shape[1] % size, padding)
    return padded_XN.reshape(-1, size, len(values_NX)).swapaxes(1, 2).reshape(-1, size * len(values_NX))


def _padded(array_X: jax.Array, padding: int, value: float) -> jax.Array:
    return jnp.pad(array_X, [(0, padding), *[(0, 0)] * (array_X.ndim - 1)], constant_values=value)
