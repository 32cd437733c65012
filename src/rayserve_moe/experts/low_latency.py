"""Expert parallelism in one kernel, low-latency dispatch: for few tokens, on one slice of TPUs."""

# T tokens   D model width   F expert width   K experts per token

from __future__ import annotations

import jax
import jax.numpy as jnp

from rayserve_moe.experts.addition_order import adds_by_device
from rayserve_moe.experts.config import ExpertConfig
from rayserve_moe.experts.slot_mapping import PlacedExperts, choose_slots, is_near
from rayserve_moe.experts.tokens import RoutedTokens, take_part
from rayserve_moe.kernels.narrow_weights import in_blocks
from rayserve_moe.kernels.tpu.dispatch_sizes import WEIGHT_DTYPES, DispatchSizes
from rayserve_moe.parallel.mesh import cores_of
from rayserve_moe.parallel.sharding import DATA, TENSOR

FEW_TOKENS = 8
"""Maximum number of tokens that every device of a tensor group keeps whole, with the others' tokens as padding.

To cut so few costs more than to compute padding.
"""


def apply_low_latency(tokens: RoutedTokens, experts: PlacedExperts, *, config: ExpertConfig) -> jax.Array:
    """Return the MoE sum of each token [T, D], for calls that `unsupported_reason` accepts."""
    plan, num_tokens = config.plan, len(tokens.valid_T)
    keeps_all = plan.tensor_size == 1 or num_tokens <= FEW_TOKENS
    part = (_mine_alone if keeps_all else take_part)(tokens, plan.tensor_rank(), num_parts=plan.tensor_size)
    with jax.named_scope("dispatch"):
        rank, layer, near = plan.expert_rank(), experts.layer, is_near(num_tokens, config=config)
        slots_TK = choose_slots(
            part.ids_TK, part.valid_T, experts.maps, layer=layer, rank=rank, config=config, near=near
        )
    sizes = _sizes_of(tokens, experts, config)
    of_layer = experts.of_layer(config.product(sizes.num_ranks * sizes.num_rows / config.num_slots))
    with jax.named_scope("experts"):
        out_TD = config.kernels.experts.low_latency.run(part.hidden_TD, slots_TK, part.gates_TK, of_layer, sizes=sizes)
    if plan.tensor_size == 1:
        return out_TD
    with jax.named_scope("combine"):
        if keeps_all:  # exact: of each token all ranks but one add zeros
            return jax.lax.psum(out_TD, TENSOR)
        return jax.lax.all_gather(out_TD, TENSOR, axis=0, tiled=True)[:num_tokens]


def _mine_alone(tokens: RoutedTokens, part: jax.Array, *, num_parts: int) -> RoutedTokens:
    """Return all tokens, with padding in place of tokens outside a part (`take_part`)."""
    if num_parts == 1:
        return tokens
    part_T = jnp.arange(len(tokens.valid_T)) // -(-len(tokens.valid_T) // num_parts)
    return tokens._replace(valid_T=tokens.valid_T & (part_T == part))


def unsupported_reason(tokens: RoutedTokens, experts: PlacedExperts, *, config: ExpertConfig) -> str:
    """Return why `apply_low_latency` does not take a call; empty if it does."""
    hidden_TD, weights = tokens.hidden_TD, experts.weights
    if experts.adapters is not None:
        return "tokens have adapters of experts"
    if hidden_TD.dtype != jnp.bfloat16 or weights.up_XDF.dtype not in WEIGHT_DTYPES:
        return f"{hidden_TD.dtype} tokens and {weights.up_XDF.dtype} weights are not bfloat16, or 8 bits for weights"
    if weights.gate_XDF is None:
        return "experts have no gate"
    if weights.gate_bias_XF is not None:
        return "experts have biases"
    if config.plan.num_slices > 1:
        return f"devices lie on {config.plan.num_slices} slices"
    return config.kernels.experts.low_latency.unsupported_reason(_sizes_of(tokens, experts, config))


def _sizes_of(tokens: RoutedTokens, experts: PlacedExperts, config: ExpertConfig) -> DispatchSizes:
    (num_tokens, width), weights, shape = tokens.hidden_TD.shape, experts.weights, config.plan.mesh.shape
    return DispatchSizes(
        num_tokens if num_tokens <= FEW_TOKENS else -(-num_tokens // config.plan.tensor_size),
        config.router.top_k,
        width,
        weights.up_XDF.shape[2],
        config.num_local_slots,
        ((DATA, shape[DATA]), (TENSOR, shape[TENSOR])),
        config.activation,
        str(weights.up_XDF.dtype),
        cores_of(config.plan.mesh),
        adds_by_device=adds_by_device(tokens, experts, config),
        in_blocks=in_blocks(weights.up_scale_XZF),
        narrows_rows=config.narrows_rows,
    )
