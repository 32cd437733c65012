"""The policy's forward pass in plain JAX: whole rows, differentiable, experts replayed or chosen.

It shares nothing with the server: neither kernels nor the layout of weights. What both compute is compared in every
run (`routing agreement`, `KL`).
"""

# B rows   T tokens of a row   N = B * T   D model width   V vocabulary   L layers   E experts   K experts per token
# H query heads x head width   G KV heads   R query heads per KV head   h head width   F expert width
# P picks = N * K   C picks of a block   X blocks   Z = X * C places

from __future__ import annotations

import jax
import jax.numpy as jnp

from examples.grpo.model import Architecture, Params

UNSEEN = -1e30
BLOCK = 64
"""Picks of one expert that are multiplied together."""
OUTSIDE_LAYERS = ("table_VD", "final_norm_D", "head_VD")


def score(
    params: Params, ids_BT: jax.Array, rows_BTLK: jax.Array, *, replay_BT: jax.Array, architecture: Architecture
) -> tuple[jax.Array, jax.Array]:
    """Logits [B, T, V] of the token after each, and the experts [B, T, L, K] that the routers choose by themselves.

    Where `replay_BT` is set, the experts of a token are those of its row, weighted by its live scores. Padding stands
    right of all tokens, so that none sees it.
    """
    hidden_BTD = params["table_VD"][ids_BT]
    layers = {name: values for name, values in params.items() if name not in OUTSIDE_LAYERS}

    def layer_of(hidden_BTD: jax.Array, inputs: tuple[Params, jax.Array]) -> tuple[jax.Array, jax.Array]:
        layer, rows_BTK = inputs
        normed_BTD = rms_norm(hidden_BTD, layer["attn_norm_LD"], architecture.norm_eps)
        hidden_BTD = hidden_BTD + attend(normed_BTD, layer, architecture)
        normed_BTD = rms_norm(hidden_BTD, layer["mlp_norm_LD"], architecture.norm_eps)
        flat_ND = normed_BTD.reshape(-1, normed_BTD.shape[-1])
        scores_NE = flat_ND @ layer["router_LED"].T
        own_NK = jax.lax.top_k(scores_NE, architecture.top_k)[1]
        ids_NK = jnp.where(replay_BT.reshape(-1, 1), rows_BTK.reshape(own_NK.shape), own_NK)
        out_ND = mix_experts(flat_ND, ids_NK, gate_weights(scores_NE, ids_NK), layer=layer)
        return hidden_BTD + out_ND.reshape(hidden_BTD.shape), own_NK.reshape(rows_BTK.shape)

    hidden_BTD, own_LBTK = jax.lax.scan(layer_of, hidden_BTD, (layers, jnp.moveaxis(rows_BTLK, 2, 0)))
    normed_BTD = rms_norm(hidden_BTD, params["final_norm_D"], architecture.norm_eps)
    return normed_BTD @ params["head_VD"].T, jnp.moveaxis(own_LBTK, 0, 2)


def next_logprobs(logits_BTV: jax.Array, ids_BT: jax.Array) -> jax.Array:
    """Log-probs [B, T - 1] of the tokens at positions 1 .. T - 1, each given those before it."""
    logprobs_BTV = jax.nn.log_softmax(logits_BTV[:, :-1])
    return jnp.take_along_axis(logprobs_BTV, ids_BT[:, 1:, None], axis=-1)[..., 0]


def rms_norm(values: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Divide by the root of the mean square over the last dimension, and scale."""
    return values * jax.lax.rsqrt(jnp.mean(values * values, axis=-1, keepdims=True) + eps) * scale


def attend(hidden_BTD: jax.Array, layer: Params, architecture: Architecture) -> jax.Array:
    """Causal attention with normed, rotated queries and keys, R query heads to a KV head; returns [B, T, D]."""
    rows, width, _ = hidden_BTD.shape
    groups, head_dim = architecture.num_kv_heads, architecture.head_dim

    def heads(name: str) -> jax.Array:
        return (hidden_BTD @ layer[name].T).reshape(rows, width, -1, head_dim)

    queries = rotated(rms_norm(heads("q_LHD"), layer["q_norm_Lh"], architecture.norm_eps), architecture.rope_theta)
    keys = rotated(rms_norm(heads("k_LGD"), layer["k_norm_Lh"], architecture.norm_eps), architecture.rope_theta)
    grouped = queries.reshape(rows, width, groups, -1, head_dim)
    scores_BGRTS = jnp.einsum("BTGRh,BSGh->BGRTS", grouped, keys) * head_dim**-0.5
    seen_TS = jnp.tril(jnp.ones((width, width), bool))
    shares_BGRTS = jax.nn.softmax(jnp.where(seen_TS, scores_BGRTS, UNSEEN), axis=-1)
    attended = jnp.einsum("BGRTS,BSGh->BTGRh", shares_BGRTS, heads("v_LGD"))
    return attended.reshape(rows, width, -1) @ layer["o_LDH"].T


def rotated(heads_BTNh: jax.Array, theta: float) -> jax.Array:
    """Rotary positions, the halves of a head as pairs (Su et al., arXiv:2104.09864, in Hugging Face's order)."""
    width, head_dim = heads_BTNh.shape[1], heads_BTNh.shape[-1]
    frequencies = theta ** (-jnp.arange(0, head_dim, 2) / head_dim)
    angles = jnp.arange(width)[:, None, None] * frequencies
    first, second = jnp.split(heads_BTNh, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


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
