"""Token mixers of the policy's layers: attention, and the gated delta rule of hybrid models."""

# B rows   T tokens of a row   D model width   G KV heads   R query heads per KV head   h head width
# H value heads   d key width   v value width   W channels of the convolution   J taps   V H * v

from __future__ import annotations

import jax
import jax.numpy as jnp

from examples.grpo.model import Architecture, Params

UNSEEN = -1e30
UNIT_EPS = 1e-6
"""Added to the sum of squares of a query or key of the delta rule."""


def rms_norm(values: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Divide by the root of the mean square over the last dimension, and scale."""
    return values * jax.lax.rsqrt(jnp.mean(values * values, axis=-1, keepdims=True) + eps) * scale


def attend(hidden_BTD: jax.Array, layer: Params, architecture: Architecture) -> jax.Array:
    """Causal attention with normed, rotated queries and keys, R query heads to a KV head; returns [B, T, D].

    In a hybrid model a query head has a gate of its output beside it.
    """
    rows, width, _ = hidden_BTD.shape
    groups, head_dim = architecture.num_kv_heads, architecture.head_dim

    def heads(name: str, size: int = head_dim) -> jax.Array:
        return (hidden_BTD @ layer[name].T).reshape(rows, width, -1, size)

    def placed(values: jax.Array, scale: jax.Array) -> jax.Array:
        values = rms_norm(values, architecture.norm_offset + scale, architecture.norm_eps)
        return rotated(values, architecture.rope_theta, architecture.rotary_dim)

    queries, gates = heads("q_LHD", head_dim * (1 if architecture.delta is None else 2)), None
    if architecture.delta is not None:
        queries, gates = jnp.split(queries, 2, axis=-1)
    queries, keys = placed(queries, layer["q_norm_Lh"]), placed(heads("k_LGD"), layer["k_norm_Lh"])
    grouped = queries.reshape(rows, width, groups, -1, head_dim)
    scores_BGRTS = jnp.einsum("BTGRh,BSGh->BGRTS", grouped, keys) * head_dim**-0.5
    seen_TS = jnp.tril(jnp.ones((width, width), bool))
    shares_BGRTS = jax.nn.softmax(jnp.where(seen_TS, scores_BGRTS, UNSEEN), axis=-1)
    attended = jnp.einsum("BGRTS,BSGh->BTGRh", shares_BGRTS, heads("v_LGD"))
    attended = attended.reshape(rows, width, -1)
    if gates is not None:
        attended = attended * jax.nn.sigmoid(gates.reshape(attended.shape))
    return attended @ layer["o_LDH"].T


def rotated(heads_BTNh: jax.Array, theta: float, rotary_dim: int) -> jax.Array:
    """Rotary positions on the first elements of a head, their halves as pairs (Su et al., arXiv:2104.09864, in Hugging
    Face's order)."""
    frequencies = theta ** (-jnp.arange(0, rotary_dim, 2) / rotary_dim)
    angles = jnp.arange(heads_BTNh.shape[1])[:, None, None] * frequencies
    first, second, others = jnp.split(heads_BTNh, (rotary_dim // 2, rotary_dim), axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, others], axis=-1)


def mix_states(hidden_BTD: jax.Array, layer: Params, architecture: Architecture) -> jax.Array:
    """A gated delta layer (Yang et al., arXiv:2412.06464), token by token; returns [B, T, D]."""
    delta = architecture.delta
    assert delta is not None, "a model without recurrent layers"
    (rows, width, _), per_key = hidden_BTD.shape, delta.num_value_heads // delta.num_key_heads
    mixed_BTW = jax.nn.silu(convolved(hidden_BTD @ layer["qkv_LWD"].T, layer["taps_LW1J"][:, 0]))
    q_width = delta.num_key_heads * delta.key_dim
    queries, keys, values = jnp.split(mixed_BTW, (q_width, 2 * q_width), axis=-1)

    def unit(heads_BTW: jax.Array) -> jax.Array:
        heads = heads_BTW.reshape(rows, width, delta.num_key_heads, delta.key_dim)
        heads = heads * jax.lax.rsqrt(jnp.sum(heads * heads, axis=-1, keepdims=True) + UNIT_EPS)
        return jnp.repeat(heads, per_key, axis=2)

    decay_BTH = -jnp.exp(layer["decay_LH"]) * jax.nn.softplus(hidden_BTD @ layer["a_LHD"].T + layer["decay_bias_LH"])
    beta_BTH = jax.nn.sigmoid(hidden_BTD @ layer["b_LHD"].T)
    values = values.reshape(rows, width, delta.num_value_heads, delta.value_dim)
    inputs = (unit(queries) * delta.key_dim**-0.5, unit(keys), values, jnp.exp(decay_BTH), beta_BTH)
    out = recurrence(*(jnp.moveaxis(each, 1, 0) for each in inputs))
    gates = jax.nn.silu(hidden_BTD @ layer["z_LVD"].T).reshape(values.shape)
    out = rms_norm(jnp.moveaxis(out, 0, 1), layer["delta_norm_Lv"], architecture.norm_eps) * gates
    return out.reshape(rows, width, -1) @ layer["delta_out_LDV"].T


def convolved(values_BTW: jax.Array, taps_WJ: jax.Array) -> jax.Array:
    """The causal convolution of each channel; the newest token has the last tap."""
    num_taps, width = taps_WJ.shape[1], values_BTW.shape[1]
    padded = jnp.pad(values_BTW, ((0, 0), (num_taps - 1, 0), (0, 0)))
    return sum(padded[:, tap : tap + width] * taps_WJ[:, tap] for tap in range(num_taps))


def recurrence(
    queries: jax.Array, keys: jax.Array, values: jax.Array, kept_TBH: jax.Array, beta_TBH: jax.Array
) -> jax.Array:
    """The delta rule over tokens [T, B, H, ...]; a state keeps the share `kept` of itself. Returns [T, B, H, v]."""

    def step(state_BHdv: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        query_BHd, key_BHd, value_BHv, kept_BH, beta_BH = token
        state_BHdv = state_BHdv * kept_BH[..., None, None]
        fresh_BHv = beta_BH[..., None] * (value_BHv - jnp.einsum("BHdv,BHd->BHv", state_BHdv, key_BHd))
        state_BHdv = state_BHdv + key_BHd[..., None] * fresh_BHv[..., None, :]
        return state_BHdv, jnp.einsum("BHdv,BHd->BHv", state_BHdv, query_BHd)

    empty = jnp.zeros((*keys.shape[1:], values.shape[-1]))
    return jax.lax.scan(step, empty, (queries, keys, values, kept_TBH, beta_TBH))[1]
