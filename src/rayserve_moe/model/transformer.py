"""Decoder: from token ids to hidden states, with routing ids and expert counts as outputs."""

# T tokens   X tokens in prefill blocks   D model width   L layers   M MoE layers   E experts   K experts per token
# V vocabulary (local share)   S samples of a data rank   W samples of all data ranks

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.experts.balanced_layer import StepCapacity, step_capacity
from rayserve_moe.experts.native_choice import NativeChoice
from rayserve_moe.experts.routing import count_tokens
from rayserve_moe.experts.slot_mapping import PlacementArrays
from rayserve_moe.kernels.attention_layer import TokenBatch
from rayserve_moe.kernels.reference.layers import take_rows
from rayserve_moe.model.decoder_layers import first_carry, norm_rows, scaled, sketch_of, step_inputs, visit_period
from rayserve_moe.model.layer_runs import layer_runs
from rayserve_moe.model.model_config import (
    NO_CAPTURES,
    Captures,
    ForcedChoices,
    ForcedRouting,
    ModelConfig,
    Parameters,
    Pools,
    StepAdapters,
)
from rayserve_moe.model.vocabulary import local_logits, look_up
from rayserve_moe.parallel.vocabulary_part import VocabularyPart, vocabulary_part


class AuditOutput(NamedTuple):
    """Evidence about forced tokens: the routers' own choices, and sketches of the residual stream."""

    native: NativeChoice
    """Choices of all MoE layers: ids [M, T, K], margins and ranks [M, T]."""
    sketches_LTP: jax.Array
    """float32, of the input of each layer, then of the output of the last one."""


class ForwardOutput(NamedTuple):
    """Outputs for this data rank's tokens; all except the pools are equal on every device of its tensor group."""

    hidden_TD: jax.Array
    """Hidden states before the final norm."""
    pools: Pools
    """Updated pools."""
    topk_ids_MTK: jax.Array
    """Routing in logical expert ids."""
    expert_counts_ME: jax.Array
    """Tokens per expert."""
    tally_4: jax.Array | None
    """Sum of the layers' tallies (`LimitedAssignments`) if slots have limited capacity, else None."""
    entering: tuple[jax.Array, ...] = ()
    """Inputs [T, D] of the layers in `asked`."""
    chosen_ITK: jax.Array | None = None
    """Positions that each token sees, int32, by layer with an index (`sparse_latent.CHOSEN`), if requested."""
    gates_MTK: jax.Array | None = None
    """Weights of the chosen experts, float32 (`LayerRouting`), if requested."""
    audit: AuditOutput | None = None
    """Evidence of an audit, if requested."""


def forward(  # noqa: PLR0913 (the options of a call)
    params: Parameters,
    pools: Pools,
    batch: TokenBatch,
    *,
    config: ModelConfig,
    maps: PlacementArrays | None = None,
    forced: ForcedRouting | None = None,
    forced_choices: ForcedChoices | None = None,
    capacity_factor: jax.Array | None = None,
    asked: tuple[int, ...] = (),
    captures: Captures = NO_CAPTURES,
    sketch_DP: jax.Array | None = None,
    adapters: StepAdapters | None = None,
) -> ForwardOutput:
    """Run all layers on a device's share; must be called inside the sharded step.

    `params` and `pools` are local shares. `batch` is this data rank's; batches of all ranks have the same shape, and
    idle ranks have padding. `maps` are the expert slots of all MoE layers, equal on every device; None is expert i in
    slot i. Routing is captured in router order, before the mapping to slots. `forced` replaces the routers'
    selection in prefill blocks; balanced selection ignores it. `forced_choices` likewise replace the choices of
    indexes. `capacity_factor` is a float32 scalar if slots have limited capacity. `asked` are layers whose inputs are
    returned; `num_layers` stands for the output of the last layer. `captures` requests `chosen_ITK` and `gates_MTK`;
    projections `sketch_DP` (float32) request `audit`. `adapters` hold the adapter of each token; None: no
    token has one.
    """
    hidden_TD = embedded(params, batch.token_ids_T, config=config)
    inputs = step_inputs(batch, pools, config)._replace(
        maps=maps,
        forced=forced,
        is_forced=_is_forced(forced, config),
        capacity=_capacity(batch, capacity_factor, config=config),
        choices=forced_choices,
        sketch_DP=sketch_DP,
        adapters=adapters,
    )
    captured_runs, chosen_runs, entering = [], [], {}
    sketch_runs = [] if sketch_DP is None else [sketch_of(hidden_TD, sketch_DP)[None]]
    carry = first_carry(hidden_TD, pools, batch, config=config)
    for run in layer_runs(config.spec, asked):
        if run.first in asked:
            entering[run.first] = carry.hidden_TD + carry.added_TD
        visit = partial(visit_period, params, run=run, inputs=inputs, config=config, captures=captures)
        begin = carry._replace(num_done=jnp.int32(0))
        carry, found = jax.lax.scan(lambda carry, _, visit=visit: visit(carry), begin, length=run.length)
        captured_runs += [_in_layer_order(found.routings)] if found.routings else []
        chosen_runs += [_in_layer_order(found.captured)] if found.captured else []
        sketch_runs += [_in_layer_order(found.sketches)] if found.sketches else []
    hidden_TD = carry.hidden_TD + carry.added_TD
    routing = jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *captured_runs)
    counts_ME = _expert_counts(routing.ids_TK, batch.valid_T, config=config)
    tally_4 = None if routing.tally_4 is None else jnp.sum(routing.tally_4, axis=0, dtype=jnp.int32)
    entering[config.spec.num_layers] = hidden_TD
    chosen_ITK = jnp.concatenate(chosen_runs) if chosen_runs else None
    inputs_of = tuple(entering[layer] for layer in asked)
    audit = AuditOutput(routing.native, jnp.concatenate(sketch_runs)) if sketch_runs else None
    return ForwardOutput(
        hidden_TD, carry.pools, routing.ids_TK, counts_ME, tally_4, inputs_of, chosen_ITK, routing.gates_TK, audit
    )


def _capacity(batch: TokenBatch, factor: jax.Array | None, *, config: ModelConfig) -> StepCapacity | None:
    """Return the capacity of slots; None without a limit."""
    if not config.experts.limits_capacity:
        return None
    assert factor is not None, "slots with limited capacity need a factor"
    return step_capacity(batch.valid_T, factor, config=config.experts)


def _is_forced(forced: ForcedRouting | None, config: ModelConfig) -> jax.Array | None:
    """Return a bool scalar, True if any token is forced; None if routing cannot be forced."""
    if forced is None or config.experts.selection == "balanced":
        return None
    return jnp.any(forced.ids_MXK >= 0)


@jax.named_scope("routing_capture")
def _expert_counts(ids_MTK: jax.Array, valid_T: jax.Array, *, config: ModelConfig) -> jax.Array:
    """Return the valid tokens of each expert [M, E]; a single operation for all layers replaces many small ones."""
    count = partial(count_tokens, num_experts=config.experts.router.num_experts)
    return jax.vmap(count, in_axes=(0, None))(ids_MTK, valid_T)


def _in_layer_order(of_period: tuple[Any, ...]) -> Any:
    """Return the stacked outputs of the layers of a period, [periods, ...] each, as outputs of all layers of a run."""
    return of_period[0] if len(of_period) == 1 else jax.tree.map(_in_turns, *of_period)


def _in_turns(*arrays: jax.Array) -> jax.Array:
    """Interleave arrays [periods, ...] of a period's layers in layer order."""
    return jnp.stack(arrays, axis=1).reshape(-1, *arrays[0].shape[1:])


def embedded(params: Parameters, token_ids_T: jax.Array, *, config: ModelConfig) -> jax.Array:
    """Return the embeddings [T, D] of this data rank's tokens."""
    take = config.kernels.head.tied_rows if config.spec.tie_embeddings else take_rows
    with jax.named_scope("embedding"):
        rows_TD = look_up(params["embedding"]["table_VD"], token_ids_T, plan=config.plan, take=take)
        hidden_TD, factors = rows_TD[:, : config.spec.hidden_size], config.spec.factors
        factor = factors.embedding_multiplier
        factor = float(np.asarray(factor, hidden_TD.dtype)) if factors.rounded_embedding_multiplier else factor
        return scaled(hidden_TD, factor)


def words_of(config: ModelConfig) -> VocabularyPart:
    """Return the vocab shard of a device."""
    multiple = config.kernels.parameters.multiples.get("vocabulary", 1)
    return vocabulary_part(config.plan, num_words=config.spec.vocab_size, multiple=multiple)


def logits_of(params: Parameters, hidden_SD: jax.Array, *, config: ModelConfig) -> jax.Array:
    """Apply the final norm and the head to `hidden_SD` of all data ranks.

    Returns: float32 logits [W, V] in the order of ranks, for the vocab shard of this device (`words_of`).
    """
    return normed_logits(params, norm_rows(hidden_SD, params["embedding"]["final_norm_D"], config), config=config)


def normed_logits(
    params: Parameters, normed_SD: jax.Array, *, config: ModelConfig, are_everywhere: bool = False
) -> jax.Array:
    """Return `logits_of` for normed hidden states; `are_everywhere` if all devices have the same."""
    embedding, factors = params["embedding"], config.spec.factors
    score = partial(config.kernels.head.logits, head_VD=embedding.get("head_VD", embedding["table_VD"]))

    def head(hidden_SD: jax.Array) -> jax.Array:
        logits_SV, cap = score(hidden_SD), factors.logits_cap
        logits_SV = logits_SV if factors.logits_divisor == 1.0 else logits_SV / factors.logits_divisor
        return cap * jnp.tanh(logits_SV / cap) if cap else logits_SV

    with jax.named_scope("head"):
        return local_logits(normed_SD, head, part=words_of(config), plan=None if are_everywhere else config.plan)
