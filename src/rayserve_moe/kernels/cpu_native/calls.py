"""The native CPU kernels as functions of arrays: bfloat16 rows, packed bfloat16 weights (see `layout`).

`execution.native_kernels` registers what they call. A row's result depends on that row alone, to the last bit.
"""

# T tokens   D model width   K depth, and experts per token   N columns   F expert width   X expert slots of all layers
# L layers   H query heads * h   G KV heads * h   h head width   B blocks   P page-table width

from __future__ import annotations

from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.kernels.attention_config import AttentionConfig
from rayserve_moe.kernels.attention_layer import AttentionInputs
from rayserve_moe.kernels.cpu_native.layout import PANEL
from rayserve_moe.kernels.expert_products import ExpertWeights, LayerExperts, ProductConfig
from rayserve_moe.kernels.layers import Rotation

PREFIX = "rayserve_moe_"
NAMES = ("Attention", "Experts", "Product", "Norm", "Scores", "Rotation")
TARGETS = {f"{PREFIX}{name.lower()}": f"RayserveMoe{name}" for name in NAMES}
"""Name of each kernel as programs call it, and its symbol in the library."""
PROJECTIONS = ("q_LDH", "k_LDG", "v_LDG", "o_LHD")
EXPERTS = ("gate_MPDF", "up_MPDF", "down_MPFD", "gate_NDI", "up_NDI", "down_NID")
LAYOUT_OF = MappingProxyType({**dict.fromkeys((*PROJECTIONS, *EXPERTS), "packed"), "head": "packed_columns"})
"""How the parameters lie that the kernels read as the right side of a product (`layout.LAYOUTS`)."""
MULTIPLES = MappingProxyType(dict.fromkeys(("expert_inner", "dense_inner", "vocabulary"), PANEL))
"""Axes that are padded to whole panels. What zeros add to gate, up and down is nothing; what they score is cut off."""


def rms_norm(rows_TD: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
    """`layers.rms_norm` of bfloat16 rows."""
    assert rows_TD.shape[1:] == scale_D.shape, f"{scale_D.shape} scales for {rows_TD.shape}"
    shape = jax.ShapeDtypeStruct(rows_TD.shape, rows_TD.dtype)
    return jax.ffi.ffi_call(f"{PREFIX}norm", shape)(rows_TD, scale_D, eps=np.float32(eps))


def router_scores(
    hidden_TD: jax.Array, router_DE: jax.Array, *, bias_E: jax.Array | None = None, score: str = "softmax"
) -> jax.Array:
    """Softmax of rows times the float32 router, all in float32: [T, E]."""
    assert bias_E is None and score == "softmax", "the native kernel knows no other scores"
    assert hidden_TD.shape[1] == router_DE.shape[0], f"{hidden_TD.shape} times {router_DE.shape}"
    shape = jax.ShapeDtypeStruct((hidden_TD.shape[0], router_DE.shape[1]), jnp.float32)
    return jax.ffi.ffi_call(f"{PREFIX}scores", shape)(hidden_TD, router_DE)


def rotation_of(positions_T: jax.Array, frequencies: np.ndarray, *, factor: float = 1.0) -> Rotation:
    """Cosine and sine of `layers.rotation_of`, float32 [T, h / 2] each."""
    assert factor == 1.0, "the native kernel knows no factor of cosine and sine"
    shape = jax.ShapeDtypeStruct((len(positions_T), len(frequencies)), jnp.float32)
    cos_Th, sin_Th = jax.ffi.ffi_call(f"{PREFIX}rotation", (shape, shape))(positions_T, frequencies)
    return Rotation(cos_Th, sin_Th)


def product(left_TK: jax.Array, right_KN: jax.Array) -> jax.Array:
    """Rows times packed weights, float32 [T, N]."""
    assert left_TK.shape[1] == right_KN.shape[0], f"{left_TK.shape} times {right_KN.shape}"
    shape = jax.ShapeDtypeStruct((left_TK.shape[0], right_KN.shape[1]), jnp.float32)
    return jax.ffi.ffi_call(f"{PREFIX}product", shape)(left_TK, right_KN)


def head_logits(hidden_TD: jax.Array, head_VD: jax.Array) -> jax.Array:
    """Float32 logits [T, V] by a table that `layout.pack_columns` has laid out as the right side of a product."""
    return product(hidden_TD, head_VD.reshape(head_VD.shape[::-1]))


def expert_sums(hidden_TD: jax.Array, slots_TK: jax.Array, gates_TK: jax.Array, experts: LayerExperts) -> jax.Array:
    """`expert_products.sum_results`, each token's results added in the order of its slots: float32 [T, D].

    Weights are packed, without biases. Inner rows and the result of each assignment are rounded to bfloat16.
    """
    weights, config = experts.weights, experts.config
    assert config.activation == "silu", "the native kernel knows no other activation"
    (num_tokens, width), (num_all_slots, _, inner) = hidden_TD.shape, weights.gate_XDF.shape
    shapes = [(num_all_slots, width, inner)] * 2 + [(num_all_slots, inner, width)]
    assert [array.shape for array in weights if array is not None] == shapes, (
        f"weights are no experts of tokens {hidden_TD.shape}"
    )
    assert slots_TK.shape == gates_TK.shape and len(slots_TK) == num_tokens, f"slots {slots_TK.shape}"
    call = jax.ffi.ffi_call(f"{PREFIX}experts", jax.ShapeDtypeStruct(hidden_TD.shape, jnp.float32))
    first = jnp.asarray(experts.first_slot, jnp.int32)
    return call(hidden_TD, slots_TK, gates_TK, *weights[:3], first, num_slots=np.int64(config.num_slots))


def expert_results(hidden_TD: jax.Array, slots_TK: jax.Array, experts: LayerExperts) -> jax.Array:
    """`expert_products.multiply_in_blocks` of packed weights: [T, K, D]."""
    num_tokens, top_k = slots_TK.shape
    rows_PD = jnp.repeat(hidden_TD.reshape(num_tokens, -1), top_k, axis=0)
    slots_P1 = slots_TK.reshape(-1, 1)
    ones_P1 = jnp.ones(slots_P1.shape, jnp.float32)
    results_PD = expert_sums(rows_PD, slots_P1, ones_P1, experts)
    return results_PD.astype(hidden_TD.dtype).reshape(num_tokens, top_k, *hidden_TD.shape[1:])


def gated_mlp(hidden_TD: jax.Array, weights: tuple[jax.Array, jax.Array, jax.Array], *, layer: jax.Array) -> jax.Array:
    """`layers.gated_mlp` of packed weights: every token takes the one expert of its layer."""
    slots_T1 = jnp.zeros((len(hidden_TD), 1), jnp.int32)
    ones_T1 = jnp.ones(slots_T1.shape, jnp.float32)
    config = ProductConfig(num_slots=1, mean_rows=len(hidden_TD))
    return expert_sums(hidden_TD, slots_T1, ones_T1, LayerExperts(ExpertWeights(*weights), layer, config))


def attend_layer(
    normed_TD: jax.Array, kv_pages: jax.Array, inputs: AttentionInputs, *, config: AttentionConfig
) -> tuple[jax.Array, jax.Array]:
    """`attention_layer.attend_layer` with packed projections: float32 [T, D], and the pool, written in place.

    It rounds where that does.
    """
    weights, batch, rotation, layer = inputs
    assert config.is_plain, f"the native kernel does not know {config}"
    of_tokens = (*rotation, batch.kv_slots_T, batch.positions_T)
    assert all(len(array) == len(normed_TD) for array in of_tokens), "each token has a position, a slot and its angles"
    assert rotation.cos.shape == rotation.sin.shape == (len(normed_TD), kv_pages.shape[3] // 2), "whole heads rotate"
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
        *(weights[name] for name in PROJECTIONS),
        *(weights.get(name, nothing) for name in optional),
        *of_tokens,
        batch.page_table_BP,
        jnp.asarray(layer, jnp.int32),
        kv_pages,
        num_singles=np.int64(batch.num_singles),
        eps=np.float32(config.eps),
    )
    return out_TD, kv_pages
