"""Multi-head latent attention of one layer as one call of the native CPU kernels.

Prompts are attended in the latent space as single tokens are: keys expanded for prompts would give a token other
bits in a block than alone, so that its outputs would depend on how its prompt is cut and on preemption. That costs:
by one thread with tile registers, from queries to values of 16 heads of DeepSeek-V3's widths, a prompt of 512
tokens takes 23 ms against 14 ms expanded, one of 2,048 in chunks of 512 takes 253 against 198 ms. With the widths
of `deepseek-v3-small` (8 heads) it is 2.9 against 2.6 ms, and 36 against 37 ms.
"""

# T tokens   D model width   L layers   A local query heads   C latent   r rotated width

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.kernels.attention_layer import AttentionInputs
from rayserve_moe.kernels.cpu_native.calls import PREFIX, trees_of
from rayserve_moe.kernels.latent_attention import LatentConfig

MATRICES = ("kv_a_LDC", "k_b_LHC", "v_b_LHC", "o_LHD")
VECTORS = ("q_a_norm_LR", "kv_a_norm_LC", "q_a_bias_LR", "kv_a_bias_LC")


def attend_latent_layer(
    normed_TD: jax.Array, kv_pages: jax.Array, inputs: AttentionInputs, *, config: LatentConfig
) -> tuple[jax.Array, jax.Array]:
    """`latent_attention.attend_latent_layer` of packed weights: float32 [T, D], and the pool, written in place.

    It rounds where that does, and the queries against latents besides: they are multiplied as bfloat16. Blocks are
    attended in the latent space like single tokens, so that a token's bits do not depend on how its prompt is cut.
    """
    weights, batch, rotation, layer, *_ = inputs
    batch, first_page, num_pages = batch.of_layer(layer, kv_pages, len(weights["o_LHD"]))
    of_tokens = (*rotation, batch.kv_slots_T, batch.positions_T)
    assert all(len(array) == len(normed_TD) for array in of_tokens), "each token has a position, a slot and its angles"
    nothing = jnp.zeros((0, 0), jnp.bfloat16)
    shapes = (jax.ShapeDtypeStruct(normed_TD.shape, jnp.float32), jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype))
    call = jax.ffi.ffi_call(f"{PREFIX}latent", shapes, input_output_aliases={19: 1})
    out_TD, kv_pages = call(
        normed_TD,
        weights.get("q_a_LDR", nothing),
        weights["q_b_LRH" if "q_a_LDR" in weights else "q_LDH"],
        *(weights[name] for name in MATRICES),
        *(weights.get(name, nothing) for name in VECTORS),
        *of_tokens,
        batch.page_table_BP,
        jnp.asarray(layer, jnp.int32),
        jnp.asarray(first_page, jnp.int32),
        jnp.asarray(num_pages, jnp.int32),
        kv_pages,
        *trees_of(batch),
        num_singles=np.int64(batch.num_singles),
        nope_dim=np.int64(config.nope_dim),
        norm_eps=np.float32(config.norm_eps),
        scale=np.float32(config.score_scale),
        is_interleaved=config.interleaved_rotation,
    )
    return out_TD, kv_pages
