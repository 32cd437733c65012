"""The decoder: from token ids to hidden states, with routing ids and expert counts as outputs."""

# T tokens   X tokens in prefill blocks   D model width   L layers   M MoE layers   E experts   K experts per token
# V vocabulary (local share)   S samples of a data rank   W samples of all data ranks

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rayserve_moe.experts.balanced_layer import step_capacity
from rayserve_moe.experts.routing import count_tokens
from rayserve_moe.experts.slot_mapping import PlacementArrays
from rayserve_moe.kernels.attention_layer import TokenBatch
from rayserve_moe.kernels.reference.layers import take_rows
from rayserve_moe.model.decoder_layers import first_carry, norm_rows, scaled, step_inputs, visit_period
from rayserve_moe.model.layer_runs import layer_runs
from rayserve_moe.model.model_config import ModelConfig, Parameters, Pools
from rayserve_moe.model.vocabulary import look_up, score_my_words
from rayserve_moe.parallel.vocabulary_part import VocabularyPart, vocabulary_part


class ForwardOutput(NamedTuple):
    """Hidden states before the final norm [T, D], the updated pools, routing [M, T, K] and counts [M, E].

    Where slots have limited capacity, also the sum of the layers' tallies (`LimitedAssignments`). `entering` are the
    hidden states [T, D] that enter the layers which were asked for.
    All of this data rank's tokens alone, and the same on every device of its tensor group (but for the pools).
    """

    hidden_TD: jax.Array
    pools: Pools
    topk_ids_MTK: jax.Array
    expert_counts_ME: jax.Array
    tally_4: jax.Array | None
    entering: tuple[jax.Array, ...] = ()


def forward(  # noqa: PLR0913 (what differs from call to call is by keyword)
    params: Parameters,
    pools: Pools,
    batch: TokenBatch,
    *,
    config: ModelConfig,
    maps: PlacementArrays | None = None,
    forced_MXK: jax.Array | None = None,
    capacity_factor: jax.Array | None = None,
    asked: tuple[int, ...] = (),
) -> ForwardOutput:
    """Run all layers on one device's share; call it inside the sharded step.

    `params` and `pools` are local shares, `batch` is this data rank's: every rank has one of the same shape,
    padding where it has nothing to do. `maps` say in which slots experts lie, for all MoE layers and the same on every
    device; None stands for expert i in slot i. Routing is captured before any mapping to slots, in router order.
    `forced_MXK` replaces what routers select for the tokens in prefill blocks, where it is not negative; a balanced
    selection ignores it. `capacity_factor` is a float32 where the capacity of slots is limited. `asked` are layers
    whose input is wanted; that of the layer behind the last one is what leaves it.
    """
    hidden_TD = embedded(params, batch.token_ids_T, config=config)
    forced = capacity = None
    if forced_MXK is not None and config.experts.selection != "balanced":
        forced = forced_MXK, jnp.any(forced_MXK >= 0)
    if config.experts.limits_capacity:
        assert capacity_factor is not None, "slots with limited capacity need a factor"
        capacity = step_capacity(batch.valid_T, capacity_factor, config=config.experts)
    inputs = step_inputs(batch, pools, config)._replace(maps=maps, forced=forced, capacity=capacity)
    captured_runs, entering, carry = [], {}, first_carry(hidden_TD, pools)
    for run in layer_runs(config.spec, asked):
        if run.first in asked:
            entering[run.first] = carry.hidden_TD + carry.added_TD
        visit = partial(visit_period, params, run=run, inputs=inputs, config=config)
        begin = carry._replace(num_done=jnp.int32(0))
        carry, captured = jax.lax.scan(lambda carry, _, visit=visit: visit(carry), begin, length=run.length)
        if captured:
            captured_runs.append(captured[0] if len(captured) == 1 else jax.tree.map(_in_turns, *captured))
    hidden_TD = carry.hidden_TD + carry.added_TD
    routing = jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *captured_runs)
    with jax.named_scope("routing_capture"):
        # One operation for all layers: in each it would be one of many small ones.
        count = partial(count_tokens, num_experts=config.experts.router.num_experts)
        counts_ME = jax.vmap(count, in_axes=(0, None))(routing.ids_TK, batch.valid_T)
    tally_4 = None if routing.tally_4 is None else jnp.sum(routing.tally_4, axis=0, dtype=jnp.int32)
    entering[config.spec.num_layers] = hidden_TD
    found = tuple(entering[layer] for layer in asked)
    return ForwardOutput(hidden_TD, carry.pools, routing.ids_TK, counts_ME, tally_4, found)


def _in_turns(*arrays: jax.Array) -> jax.Array:
    """Join arrays of the layers of a period, [periods, ...] each, in the order of the layers."""
    return jnp.stack(arrays, axis=1).reshape(-1, *arrays[0].shape[1:])


def embedded(params: Parameters, token_ids_T: jax.Array, *, config: ModelConfig) -> jax.Array:
    """The embeddings [T, D] of this data rank's tokens."""
    take = config.kernels.head.tied_rows if config.spec.tie_embeddings else take_rows
    with jax.named_scope("embedding"):
        rows_TD = look_up(params["embedding"]["table_VD"], token_ids_T, plan=config.plan, take=take)
        hidden_TD = rows_TD[:, : config.spec.hidden_size]
        return scaled(hidden_TD, config.spec.factors.embedding_multiplier)


def words_of(config: ModelConfig) -> VocabularyPart:
    """The words that a device scores."""
    multiple = config.kernels.parameters.multiples.get("vocabulary", 1)
    return vocabulary_part(config.plan, num_words=config.spec.vocab_size, multiple=multiple)


def logits_of(params: Parameters, hidden_SD: jax.Array, *, config: ModelConfig) -> jax.Array:
    """Final norm and head: float32 logits [W, V] of the `hidden_SD` of all data ranks, rank after rank, for the words
    of this device (`words_of`)."""
    return normed_logits(params, norm_rows(hidden_SD, params["embedding"]["final_norm_D"], config), config=config)


def normed_logits(
    params: Parameters, normed_SD: jax.Array, *, config: ModelConfig, are_everywhere: bool = False
) -> jax.Array:
    """`logits_of` hidden states that are normed already, and `are_everywhere` if all devices have the same."""
    embedding = params["embedding"]
    head = partial(config.kernels.head.logits, head_VD=embedding.get("head_VD", embedding["table_VD"]))
    with jax.named_scope("head"):
        logits_WV = score_my_words(normed_SD, head, part=words_of(config), plan=None if are_everywhere else config.plan)
        divisor = config.spec.factors.logits_divisor
        return logits_WV if divisor == 1.0 else logits_WV / divisor
