"""The native CPU kernels as functions of arrays: bfloat16 rows, packed bfloat16 weights (see `layout`).

`execution.native_library` registers what they call. A row's result depends on that row alone, to the last bit.
"""

# T tokens   D model width   K depth, and experts per token   N columns   F expert width   X expert slots of all layers
# L layers   H query heads * h   G KV heads * h   h head width   B blocks   P page-table width

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

PREFIX = "rayserve_moe_"
NAMES = ("Attention", "Experts", "Product", "Norm", "Scores", "Rotation")
TARGETS = {f"{PREFIX}{name.lower()}": f"RayserveMoe{name}" for name in NAMES}
"""Name of each kernel as programs call it, and its symbol in the library."""


class AttentionInputs(NamedTuple):
    """What attention takes besides weights: see `model.token_batch`. cos and sin are float32 [T, h / 2]."""

    cos_Th: jax.Array
    sin_Th: jax.Array
    kv_slots_T: jax.Array
    positions_T: jax.Array
    page_table_BP: jax.Array
    num_singles: int


def rms_norm(rows_TD: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
    """`model.layers.rms_norm` of bfloat16 rows."""
    assert rows_TD.shape[1:] == scale_D.shape, f"{scale_D.shape} scales for {rows_TD.shape}"
    shape = jax.ShapeDtypeStruct(rows_TD.shape, rows_TD.dtype)
    return jax.ffi.ffi_call(f"{PREFIX}norm", shape)(rows_TD, scale_D, eps=np.float32(eps))


def router_scores(hidden_TD: jax.Array, router_DE: jax.Array) -> jax.Array:
    """Softmax of rows times the float32 router, all in float32: [T, E]."""
    assert hidden_TD.shape[1] == router_DE.shape[0], f"{hidden_TD.shape} times {router_DE.shape}"
    shape = jax.ShapeDtypeStruct((hidden_TD.shape[0], router_DE.shape[1]), jnp.float32)
    return jax.ffi.ffi_call(f"{PREFIX}scores", shape)(hidden_TD, router_DE)


def rotation_of(positions_T: jax.Array, *, width: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of `model.layers.rotation_of`, float32 [T, h / 2] each."""
    frequencies = (theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)).astype(np.float32)
    shape = jax.ShapeDtypeStruct((len(positions_T), width // 2), jnp.float32)
    cos_Th, sin_Th = jax.ffi.ffi_call(f"{PREFIX}rotation", (shape, shape))(positions_T, frequencies)
    return cos_Th, sin_Th


def product(left_TK: jax.Array, right_KN: jax.Array) -> jax.Array:
    """Rows times packed weights, float32 [T, N]."""
    assert left_TK.shape[1] == right_KN.shape[0], f"{left_TK.shape} times {right_KN.shape}"
    shape = jax.ShapeDtypeStruct((left_TK.shape[0], right_KN.shape[1]), jnp.float32)
    return jax.ffi.ffi_call(f"{PREFIX}product", shape)(left_TK, right_KN)


def expert_sums(
    hidden_TD: jax.Array,
    slots_TK: jax.Array,
    gates_TK: jax.Array,
    weights: tuple[jax.Array, jax.Array, jax.Array],
    *,
    first_slot: jax.Array | int,
    num_slots: int,
) -> jax.Array:
    """Sums over picks, in their order, of gates times the SiLU-gated product of their slot: float32 [T, D].

    `weights` are gate and up [X, D, F] and down [X, F, D]. A pick of slot `num_slots` or beyond adds nothing. Inner
    rows and the result of each pick are rounded to bfloat16.
    """
    (num_tokens, width), (num_all_slots, _, inner) = hidden_TD.shape, weights[0].shape
    shapes = [(num_all_slots, width, inner)] * 2 + [(num_all_slots, inner, width)]
    assert [array.shape for array in weights] == shapes, f"weights are no experts of tokens {hidden_TD.shape}"
    assert slots_TK.shape == gates_TK.shape and len(slots_TK) == num_tokens, f"picks {slots_TK.shape}"
    call = jax.ffi.ffi_call(f"{PREFIX}experts", jax.ShapeDtypeStruct(hidden_TD.shape, jnp.float32))
    first = jnp.asarray(first_slot, jnp.int32)
    return call(hidden_TD, slots_TK, gates_TK, *weights, first, num_slots=np.int64(num_slots))


def attend_layer(
    normed_TD: jax.Array,
    weights: Mapping[str, jax.Array],
    kv_pages: jax.Array,
    inputs: AttentionInputs,
    *,
    layer: jax.Array,
    eps: float,
) -> tuple[jax.Array, jax.Array]:
    """Attention of one layer, from normed tokens to the output product: float32 [T, D], and the pool, written in place.

    `weights` are those of all layers under the names of `model.parameters`, projections packed; norms of heads and
    biases may be absent. `kv_pages` is [L * pages, page, 2 * KV heads, h]. Rounds where `model.attention` does.
    """
    of_tokens = (*inputs[:2], inputs.kv_slots_T, inputs.positions_T)
    assert all(len(array) == len(normed_TD) for array in of_tokens), "each token has a position, a slot and its angles"
    assert inputs.cos_Th.shape == inputs.sin_Th.shape == (len(normed_TD), kv_pages.shape[3] // 2), "whole heads rotate"
    assert weights["q_LDH"].shape[1] == weights["o_LHD"].shape[2] == normed_TD.shape[1], "weights of another width"
    nothing = jnp.zeros((0, 0), jnp.bfloat16)
    optional = ("q_norm_Lh", "k_norm_Lh", "q_bias_LH", "k_bias_LG", "v_bias_LG")
    call = jax.ffi.ffi_call(
        f"{PREFIX}attention",
        (
            jax.ShapeDtypeStruct(normed_TD.shape, jnp.float32),
            jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype),
        ),
        input_output_aliases={16: 1},
    )
    out_TD, kv_pages = call(
        normed_TD,
        *(weights[name] for name in ("q_LDH", "k_LDG", "v_LDG", "o_LHD")),
        *(weights.get(name, nothing) for name in optional),
        inputs.cos_Th,
        inputs.sin_Th,
        inputs.kv_slots_T,
        inputs.positions_T,
        inputs.page_table_BP,
        jnp.asarray(layer, jnp.int32),
        kv_pages,
        num_singles=np.int64(inputs.num_singles),
        eps=np.float32(eps),
    )
    return out_TD, kv_pages
