"""Step as a pure function over the whole mesh: unpacking, forward pass, head and sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rayserve_moe.decoding.sampling import Sampled
from rayserve_moe.execution.drafts.steps import draft_partitions, extended
from rayserve_moe.execution.step.inputs import DeviceInput, InputLayout, change_pages, unpack
from rayserve_moe.execution.step.page_copies import apply_copies, equal_pages
from rayserve_moe.execution.step.pytrees import (
    BlockInputs,
    DeviceState,
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
from rayserve_moe.kernels.kv_pool import StatePages
from rayserve_moe.model.adapters import adapter_partitions
from rayserve_moe.model.draft_layer import DraftConfig
from rayserve_moe.model.draft_spec import draft_parameters
from rayserve_moe.model.model_config import (
    NO_CAPTURES,
    AdapterStacks,
    Captures,
    ForcedChoices,
    ForcedRouting,
    ModelConfig,
    Parameters,
    Pools,
    StepAdapters,
)
from rayserve_moe.model.param_spec import ParamSpec
from rayserve_moe.model.parameters import parameter_specs
from rayserve_moe.model.states import entry_states, pool_partitions, token_states
from rayserve_moe.model.transformer import ForwardOutput, forward, logits_of, words_of
from rayserve_moe.replay.sketches import sketch_matrix

COUNT_AXES = ROW_AXES = ("data_ranks", None)
WORD_AXES: tuple[str | None, ...] = (None, "vocabulary")
BIAS_AXES: tuple[str | None, ...] = (None, None)


def run_step(  # noqa: PLR0913 (arguments of the program)
    weights: ModelWeights,
    state: DeviceState,
    *,
    vectors_NW: jax.Array,
    blocks: BlockInputs | None,
    layout: InputLayout,
    config: StepConfig,
    adapters: AdapterStacks | None = None,
) -> tuple[DeviceState, StepOutput]:
    """Compute a step on every device of the mesh; return a StepOutput that is the same on all of them.

    `blocks` is given for shapes with prefill blocks, `adapters` for shapes with adapters.
    """
    plan, state_layers = config.model.plan, () if blocks is None else config.state_layers

    def on_device(
        weights: ModelWeights,
        state: DeviceState,
        vectors_NW: jax.Array,
        blocks: BlockInputs | None,
        adapters: AdapterStacks | None,
    ) -> tuple[DeviceState, StepOutput, tuple[jax.Array | None, jax.Array | None]]:
        vector_W = vectors_NW[plan.data_rank()]
        state = replace(state, page_table_RP=change_pages(state, vector_W, layout=layout))
        step = unpack(vector_W, state, layout=layout, page_size=config.page_size, layer_pages=config.layer_pages)
        out, logits_AV = step_logits(
            weights,
            state.pools,
            batch=step.batch,
            sample_places_S=step.sample_places_S,
            forced=None if blocks is None else _forced_of_rank(blocks),
            forced_choices=None if blocks is None else jax.tree.map(lambda of_rank: of_rank[0], blocks.choices),
            config=config.model,
            asked=(*config.aux_layers, *state_layers),
            captures=config.captures,
            audits=config.audits and blocks is not None,
            adapters=_step_adapters(adapters, step),
        )
        out, layer_states_LTD = _parted(out, num_states=len(state_layers), config=config)
        counts_ME = state.expert_counts_ME + out.expert_counts_ME
        state = replace(state, pools=out.pools, expert_counts_ME=counts_ME)
        sampled, own, logits_AV, state = sample_rows(logits_AV, state, samples=_samples_of(step), config=config)
        if config.draft is not None:
            rests = layout.shape.drafts_rest
            state = extended(weights, state, step=step, out=out, own=own, config=config.draft, rests=rests)
        output = replace(_output(sampled, out, config=config), layer_states_LTD=layer_states_LTD)
        hidden_TD = out.hidden_TD if config.shows_hidden or blocks is not None else None
        return state, output, (logits_AV if config.holds_samples else None, hidden_TD)

    model, whole, state_parts = config.model, PartitionSpec(), state_partitions(config.model, config.draft)
    parts_of_weights = weight_partitions(model, config.draft)
    state, output, (logits_AV, hidden_TD) = jax.shard_map(
        on_device,
        mesh=plan.mesh,
        in_specs=(parts_of_weights, state_parts, whole, *_given(model, blocks, adapters=adapters)),
        out_specs=(state_parts, whole, (plan.partition(WORD_AXES), plan.partition(ROW_AXES))),
        check_vma=False,
    )(weights, state, vectors_NW, blocks, adapters)
    return state, replace(output, logits_AV=logits_AV, hidden_TD=hidden_TD)


def _parted(out: ForwardOutput, *, num_states: int, config: StepConfig) -> tuple[ForwardOutput, jax.Array | None]:
    """Part the inputs of layers that are returned, of all data ranks [L, T, D], from those that the draft reads."""
    if not num_states:
        return out, None
    first = len(out.entering) - num_states
    states_LTD = config.model.plan.gather_data_ranks(jnp.stack(out.entering[first:]), dim=1)
    return out._replace(entering=out.entering[:first]), states_LTD


def _given(
    model: ModelConfig, blocks: BlockInputs | None, *, adapters: AdapterStacks | None
) -> tuple[BlockInputs | None, AdapterStacks | None]:
    """Return the partitions of optional inputs."""
    return block_partitions(model, blocks), None if adapters is None else adapter_partitions(model)


def _step_adapters(stacks: AdapterStacks | None, step: DeviceInput) -> StepAdapters | None:
    return None if stacks is None or step.adapters is None else StepAdapters(stacks, step.adapters)


def _output(sampled: Sampled, out: ForwardOutput, *, config: StepConfig) -> StepOutput:
    """Return the outputs of a step that are the same on every device."""
    plan = config.model.plan
    tally_N4 = None if out.tally_4 is None else plan.gather_data_ranks(out.tally_4[None], dim=0)
    return StepOutput(
        sampled_bits(sampled, plan.data_size),
        {"top": top_bits(sampled.top, plan.data_size)},
        _captured_routing(out, config),
        None if out.chosen_ITK is None else plan.gather_data_ranks(out.chosen_ITK, dim=1),
        None if out.gates_MTK is None else plan.gather_data_ranks(out.gates_MTK, dim=1),
        tally_N4=tally_N4,
        audit=jax.tree.map(partial(plan.gather_data_ranks, dim=1), out.audit),
    )


def _forced_of_rank(blocks: BlockInputs) -> ForcedRouting:
    """Return the forced routing of a data rank, from its shard of the inputs."""
    ids_MXK, gates_NMXK = blocks.forced_NMXK[0], blocks.gates_NMXK
    return ForcedRouting(ids_MXK, None if gates_NMXK is None else gates_NMXK[0])


def _samples_of(step: DeviceInput) -> SampleInput:
    ids_S = step.batch.token_ids_T[step.sample_places_S]
    return SampleInput(step.sample_rows_S, step.sampling, step.penalties, ids_S)


def sample_step(
    state: DeviceState, logits_AV: jax.Array, *, held: HeldInputs, config: StepConfig
) -> tuple[DeviceState, StepOutput]:
    """Draw a step's deferred samples (`sample_held`) on every device of the mesh; the output has samples only."""
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
    """Return the routing of the tokens of all data ranks in the store's dtype, [M, T, K]; None if not captured."""
    if not config.capture_routing:
        return None
    with jax.named_scope("routing_capture"):
        ids_MTK = out.topk_ids_MTK.astype(config.model.spec.routing_layout.dtype)
        return config.model.plan.gather_data_ranks(ids_MTK, dim=1)


def step_logits(  # noqa: PLR0913 (keyword arguments that vary by call)
    weights: ModelWeights,
    pools: Pools,
    *,
    batch: TokenBatch,
    sample_places_S: jax.Array,
    config: ModelConfig,
    forced: ForcedRouting | None = None,
    forced_choices: ForcedChoices | None = None,
    asked: tuple[int, ...] = (),
    captures: Captures = NO_CAPTURES,
    audits: bool = False,
    adapters: StepAdapters | None = None,
) -> tuple[ForwardOutput, jax.Array]:
    """Run the forward pass on a device, then return float32 logits [A, V] of `sample_places_S` of all data ranks."""
    out = forward(
        weights.params,
        pools,
        batch,
        config=config,
        maps=weights.maps,
        forced=forced,
        forced_choices=forced_choices,
        capacity_factor=weights.capacity_factor,
        asked=asked,
        captures=captures,
        sketch_DP=jnp.asarray(sketch_matrix(config.spec.hidden_size)) if audits else None,
        adapters=adapters,
    )
    return out, logits_of(weights.params, out.hidden_TD[sample_places_S], config=config)


def update_rows(state: DeviceState, vector: jax.Array, *, config: StepConfig) -> DeviceState:
    """Apply changes of rows (`apply_update`) on every device of the mesh."""
    plan = config.model.plan
    return _on_all_devices(lambda *given: apply_update(*given, data_rank=plan.data_rank()), state, vector, config)


def adjust_rows(state: DeviceState, vector: jax.Array, *, config: StepConfig) -> DeviceState:
    """Apply a row's logit adjustments (`apply_adjustment`) on every device of the mesh."""
    part = words_of(config.model)
    return _on_all_devices(lambda *given: apply_adjustment(*given, part=part), state, vector, config)


def copy_pages(state: DeviceState, vector: jax.Array, *, config: StepConfig) -> DeviceState:
    """Copy the last pages of prompts (`apply_copies`) on every device of the mesh."""
    plan = config.model.plan

    def on_device(state: DeviceState, vector: jax.Array) -> DeviceState:
        layers = config.layer_pages or [
            StatePages(kept.kind.name, equal_pages(state.pools[kept.kind.name], kept.num_layers))
            for kept in token_states(config.model)
        ]
        rings = {kept.kind.name: (kept.num_layers, len(kept.kind.ring)) for kept in entry_states(config.model)}
        kernel = config.model.kernels.pool.copy_pages
        return apply_copies(state, vector, data_rank=plan.data_rank(), layer_pages=layers, copy=kernel, num_rings=rings)

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
    """Return the tree of a DeviceState with partitions in place of arrays."""

    def partition(axes: tuple[str | None, ...]) -> jax.Array:
        return cast(jax.Array, config.plan.partition(axes))

    return DeviceState(
        seen_RV=partition(WORD_AXES),
        bias_ids_RB=partition(BIAS_AXES),
        bias_values_RB=partition(BIAS_AXES),
        pools=pool_partitions(config),
        expert_counts_ME=partition(COUNT_AXES),
        page_table_RP=partition(ROW_AXES),
        sampling_floats_RF=partition(ROW_AXES),
        sampling_integers_RI=partition(ROW_AXES),
        last_tokens_R=partition(ROW_AXES[:1]),
        draft=None if draft is None else draft_partitions(draft),
    )


def block_partitions(config: ModelConfig, blocks: BlockInputs | None) -> BlockInputs | None:
    """Return the tree of `blocks` with partitions in place of arrays: forced routing is sharded as its tokens."""
    if blocks is None:
        return None
    of_ranks = cast(jax.Array, config.plan.partition(("data_ranks",)))
    choices = None if blocks.choices is None else ForcedChoices(of_ranks, of_ranks)
    return BlockInputs(of_ranks, None if blocks.gates_NMXK is None else of_ranks, choices)


def weight_partitions(config: ModelConfig, draft: DraftConfig | None = None) -> ModelWeights:
    """Return the tree of ModelWeights with partitions in place of arrays; the maps are replicated."""

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
