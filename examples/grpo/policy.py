"""The policy's forward pass in plain JAX: whole rows, differentiable, experts replayed or chosen.

It shares nothing with the server: neither kernels nor the layout of weights. What both compute is compared in every
run (`routing agreement`, `KL`).
"""

# B rows   T tokens of a row   N = B * T   D model width   V vocabulary   L layers   E experts   K experts per token
# F expert width
# P picks = N * K   C picks of a block   X blocks   Z = X * C places

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from examples.grpo.mixers import attend, mix_states, rms_norm
from examples.grpo.model import OUTSIDE_LAYERS, Architecture, Params

Mixer = Callable[[jax.Array, Params, Architecture], jax.Array]
BLOCK = 64
"""Picks of one expert that are multiplied together."""


def score(
    params: Params, ids_BT: jax.Array, rows_BTLK: jax.Array, *, replay_BT: jax.Array, architecture: Architecture
) -> tuple[jax.Array, jax.Array]:
    """Logits [B, T, V] of the token after each, and the experts [B, T, L, K] that the routers choose by themselves.

    Where `replay_BT` is set, the experts of a token are those of its row, weighted by its live scores. Padding stands
    right of all tokens, so that none sees it.
    """
    hidden_BTD, rows_LBTK = params["table_VD"][ids_BT], jnp.moveaxis(rows_BTLK, 2, 0)

    def layer_of(
        hidden_BTD: jax.Array, inputs: tuple[Params, jax.Array], mixer: Mixer = attend
    ) -> tuple[jax.Array, jax.Array]:
        layer, rows_BTK = inputs
        hidden_BTD = hidden_BTD + mixer(normed(hidden_BTD, layer["attn_norm_LD"], architecture), layer, architecture)
        flat_ND = normed(hidden_BTD, layer["mlp_norm_LD"], architecture).reshape(-1, hidden_BTD.shape[-1])
        scores_NE = flat_ND @ layer["router_LED"].T
        own_NK = jax.lax.top_k(scores_NE, architecture.top_k)[1]
        ids_NK = jnp.where(replay_BT.reshape(-1, 1), rows_BTK.reshape(own_NK.shape), own_NK)
        out_ND = mix_experts(flat_ND, ids_NK, gate_weights(scores_NE, ids_NK), layer=layer)
        if architecture.delta is not None:
            out_ND = out_ND + shared_expert(flat_ND, layer)
        return hidden_BTD + out_ND.reshape(hidden_BTD.shape), own_NK.reshape(rows_BTK.shape)

    if architecture.delta is None:
        layers = {name: values for name, values in params.items() if name not in OUTSIDE_LAYERS}
        hidden_BTD, own_LBTK = jax.lax.scan(layer_of, hidden_BTD, (layers, rows_LBTK))
    else:
        own = []
        for i in range(architecture.num_layers):
            mixer = attend if i in architecture.delta.full_layers else mix_states
            hidden_BTD, own_BTK = layer_of(hidden_BTD, (weights_of(i, params, architecture), rows_LBTK[i]), mixer)
            own.append(own_BTK)
        own_LBTK = jnp.stack(own)
    normed_BTD = normed(hidden_BTD, params["final_norm_D"], architecture)
    return normed_BTD @ params["head_VD"].T, jnp.moveaxis(own_LBTK, 0, 2)


def normed(hidden_BTD: jax.Array, scale_D: jax.Array, architecture: Architecture) -> jax.Array:
    """The norm ahead of a layer; the files of a hybrid model hold its scale less one."""
    return rms_norm(hidden_BTD, architecture.norm_offset + scale_D, architecture.norm_eps)


def weights_of(i: int, params: Params, architecture: Architecture) -> Params:
    """The weights of a layer, of the stacks that have it."""
    found = {}
    for name, values in params.items():
        layers = architecture.layers_of(name)
        if name not in OUTSIDE_LAYERS and i in layers:
            found[name] = values[layers.index(i)]
    return found


def shared_expert(hidden_ND: jax.Array, layer: Params) -> jax.Array:
    """The output of the expert of all tokens, times its own gate."""
    inner_NF = jax.nn.silu(hidden_ND @ layer["shared_gate_LFD"].T) * (hidden_ND @ layer["shared_up_LFD"].T)
    return inner_NF @ layer["shared_down_LDF"].T * jax.nn.sigmoid(hidden_ND @ layer["shared_share_L1D"].T)


def next_logprobs(logits_BTV: jax.Array, ids_BT: jax.Array) -> jax.Array:
    """Log-probs [B, T - 1] of the tokens at positions 1 .. T - 1, each given those before it."""
    logprobs_BTV = jax.nn.log_softmax(logits_BTV[:, :-1])
    return jnp.take_along_axis(logprobs_BTV, ids_BT[:, 1:, None], axis=-1)[..., 0]


def gate_weights(scores_NE: jax.Array, ids_NK: jax.Array) -> jax.Array:
    """Shares [N, K] of the chosen experts by their live scores: how the router keeps its gradient under replay."""
    return jax.nn.softmax(jnp.take_along_axis(scores_NE, ids_NK, axis=-1), axis=-1)


def mix_experts(hidden_ND: jax.Array, ids_NK: jax.Array, shares_NK: jax.Array, *, layer: Params) -> jax.Array:
    """Add up the chosen experts' outputs; no pick is ever dropped, however uneven the loads.

    Picks are sorted by expert, and each expert's start a new block: P // C + E blocks hold them all.
    """
    num_experts, num_picks = layer["router_LED"].shape[0], ids_NK.size
    num_blocks = num_picks // BLOCK + num_experts
    order_P = jnp.argsort(ids_NK.reshape(-1), stable=True)
    expert_P = ids_NK.reshape(-1)[order_P]
    counts_E = jnp.zeros(num_experts, jnp.int32).at[expert_P].add(1)
    last_block_E = jnp.cumsum(-(-counts_E // BLOCK))
    first_place_E = BLOCK * (last_block_E + counts_E // -BLOCK)
    rank_P = jnp.arange(num_picks) - (jnp.cumsum(counts_E) - counts_E)[expert_P]
    sorted_place_P = first_place_E[expert_P] + rank_P
    pick_Z = jnp.full(num_blocks * BLOCK, num_picks).at[sorted_place_P].set(order_P)
    place_P = jnp.zeros(num_picks, jnp.int32).at[order_P].set(sorted_place_P)
    # As a product: the gradient of a gather of weights is a scatter, which XLA's CPU backend adds up one by one.
    expert_XE = jnp.searchsorted(last_block_E, jnp.arange(num_blocks), side="right")[:, None] == jnp.arange(num_experts)
    gate_XFD, up_XFD, down_XDF = (
        jnp.einsum("XE,Eab->Xab", expert_XE.astype(hidden_ND.dtype), layer[name])
        for name in ("gate_LEFD", "up_LEFD", "down_LEDF")
    )
    picks_PD = jnp.repeat(hidden_ND, ids_NK.shape[1], axis=0)
    rows_XCD = moved(picks_PD, pick_Z, place_P).reshape(num_blocks, BLOCK, -1)
    inner_XCF = jax.nn.silu(jnp.einsum("XCD,XFD->XCF", rows_XCD, gate_XFD)) * jnp.einsum(
        "XCD,XFD->XCF", rows_XCD, up_XFD
    )
    out_ZD = jnp.einsum("XCF,XDF->XCD", inner_XCF, down_XDF).reshape(num_blocks * BLOCK, -1)
    return jnp.einsum("NKD,NK->ND", moved(out_ZD, place_P, pick_Z).reshape(*ids_NK.shape, -1), shares_NK)


@jax.custom_vjp
def moved(values_AD: jax.Array, source_B: jax.Array, back_A: jax.Array) -> jax.Array:
    """Rows [B, D] of `values` by their places, zeros for a place beyond; `back` has the place of each row in them.

    So the gradient is moved back by a gather, where that of a gather in general is a scatter.
    """
    return values_AD.at[source_B].get(mode="fill", fill_value=0)


def _moved(values_AD: jax.Array, source_B: jax.Array, back_A: jax.Array) -> tuple[jax.Array, jax.Array]:
    return moved(values_AD, source_B, back_A), back_A


def _moved_back(back_A: jax.Array, gradient_BD: jax.Array) -> tuple[jax.Array, None, None]:
    return gradient_BD.at[back_A].get(mode="fill", fill_value=0), None, None


moved.defvjp(_moved, _moved_back)
