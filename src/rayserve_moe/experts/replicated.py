"""Experts where the tokens already are: every rank sees all tokens, multiplies its own slots, and the ranks add up.

Tokens are gathered over the data axis. The sums of the ranks are partial ones, so their last bits depend on where
experts lie. On a single device nothing is gathered and nothing is added up.
"""

# T tokens   D model width   K experts per token   W tokens of all data ranks   G chunks   Y = 2 * K + 1

from __future__ import annotations

import jax
import jax.numpy as jnp

from rayserve_moe.experts.config import ExpertConfig
from rayserve_moe.experts.slot_mapping import PlacedExperts, choose_slots
from rayserve_moe.experts.tokens import SEND_BYTES, RoutedTokens, cut_into_chunks, take_part
from rayserve_moe.kernels.reference.expert_products import LayerExperts, ProductConfig
from rayserve_moe.parallel.sharding import DATA, TENSOR

RESULT_BYTES = 4 * SEND_BYTES
"""Results per assignment that a device holds at once where tokens are gathered."""


def apply_local(tokens: RoutedTokens, experts: PlacedExperts, *, config: ExpertConfig) -> jax.Array:
    """The MoE sum of each token [T, D] where this device holds all slots. ValueError where there are more devices."""
    if config.plan.num_expert_ranks > 1:
        raise ValueError(
            f"expert backend local is for one device, and experts lie over {config.plan.num_expert_ranks}: choose auto"
        )
    return _sums_of_my_slots(tokens, experts, config).astype(tokens.hidden_TD.dtype)


def apply_replicated(tokens: RoutedTokens, experts: PlacedExperts, *, config: ExpertConfig) -> jax.Array:
    """The MoE sum of each token [T, D], by a gather over data, then sums over all ranks.

    Over several slices each device of a tensor group gathers its part of the tokens, so that a token goes to another
    slice once and not once per device, nor does its sum.
    """
    plan, (num_tokens, width) = config.plan, tokens.hidden_TD.shape
    if plan.data_size == 1:
        out_TD = _sums_of_my_slots(tokens, experts, config)
        return _combine(out_TD, tokens, config)
    shared = plan.tensor_size if plan.num_slices > 1 else 1
    axes = DATA if shared == 1 else (DATA, TENSOR)
    part = take_part(tokens, plan.tensor_rank(), num_parts=shared) if shared > 1 else tokens

    def run(chunk: RoutedTokens) -> jax.Array:
        with jax.named_scope("dispatch"):
            gathered = _gather(chunk, axes)
        out_WD = _sums_of_my_slots(gathered, experts, config)
        with jax.named_scope("combine"):
            return jax.lax.psum_scatter(out_WD, axes, scatter_dimension=0, tiled=True)

    row_bytes = width * tokens.hidden_TD.dtype.itemsize
    most = max(1, RESULT_BYTES // (plan.data_size * shared * config.router.top_k * row_bytes))
    out_GTD = jax.lax.map(run, cut_into_chunks(part, min(len(part.valid_T), most)))
    out_TD = out_GTD.reshape(-1, width)[: len(part.valid_T)]
    if shared == 1:
        return _combine(out_TD, tokens, config)
    with jax.named_scope("combine"):
        out_TD = jax.lax.all_gather(out_TD.astype(tokens.hidden_TD.dtype), TENSOR, axis=0, tiled=True)
    return out_TD[:num_tokens]


def _gather(tokens: RoutedTokens, axes: str | tuple[str, ...]) -> RoutedTokens:
    """The tokens of all ranks of `axes`: their hidden states, and with one more collective all else, as integers."""
    hidden_TD, ids_TK, gates_TK, valid_T = tokens
    bits_TK = jax.lax.bitcast_convert_type(gates_TK, jnp.int32)
    choice_TY = jnp.concatenate([ids_TK, bits_TK, valid_T[:, None].astype(jnp.int32)], axis=1)
    hidden_WD, choice_WY = (jax.lax.all_gather(array, axes, axis=0, tiled=True) for array in (hidden_TD, choice_TY))
    ids_WK, bits_WK, valid_W1 = jnp.split(choice_WY, [ids_TK.shape[1], 2 * ids_TK.shape[1]], axis=1)
    return RoutedTokens(hidden_WD, ids_WK, jax.lax.bitcast_convert_type(bits_WK, jnp.float32), valid_W1[:, 0] > 0)


def _combine(out_TD: jax.Array, tokens: RoutedTokens, config: ExpertConfig) -> jax.Array:
    """Add up the sums of the devices of a tensor group, in the tokens' dtype."""
    with jax.named_scope("combine"):
        return config.plan.sum_over_tensor(out_TD).astype(tokens.hidden_TD.dtype)


def _sums_of_my_slots(tokens: RoutedTokens, experts: PlacedExperts, config: ExpertConfig) -> jax.Array:
    """What this rank's slots add to each token: float32 [T, D]. The choice of slots is the same on every rank."""
    hidden_TD, ids_TK, gates_TK, valid_T = tokens
    num_local = config.num_local_slots
    with jax.named_scope("dispatch"):
        home_T1 = _home_ranks(len(valid_T), config)
        slots_TK = choose_slots(ids_TK, valid_T, experts.maps, layer=experts.layer, rank=home_T1, config=config)
        local_TK = slots_TK - config.plan.expert_rank() * num_local
        is_here_TK = (local_TK >= 0) & (local_TK < num_local) & valid_T[:, None]
        local_TK = jnp.where(is_here_TK, local_TK, num_local)
    product = ProductConfig(num_local, ids_TK.size / config.router.num_experts, config.activation)
    with jax.named_scope("experts"):
        of_layer = LayerExperts(experts.weights, experts.layer * num_local, product)
        return config.kernels.expert_sums(hidden_TD, local_TK, gates_TK, of_layer)


def _home_ranks(num_tokens: int, config: ExpertConfig) -> jax.Array:
    """First rank of the data rank that each gathered token comes from: [T, 1]."""
    per_data_rank = num_tokens // config.plan.mesh.shape[DATA]
    return (jnp.arange(num_tokens, dtype=jnp.int32) // per_data_rank * config.plan.tensor_size)[:, None]
