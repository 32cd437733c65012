"""The parts that kinds of attention over paged rows share: preparing a step, attending a layer."""

# T tokens   D model width

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from rayserve_moe.kernels.attention_layer import AttentionInputs, DescribedSingles, TokenBatch
from rayserve_moe.kernels.reference.layers import Rotation
from rayserve_moe.model.layers.rotary import rope_frequencies
from rayserve_moe.model.model_config import ModelConfig
from rayserve_moe.model.spec import RopeSpec


class AttentionStep(NamedTuple):
    """Arrays that all attention layers of a step share, besides its tokens."""

    rotation: Rotation
    singles: DescribedSingles | None


def prepare_attention(
    batch: TokenBatch, pool: jax.Array, *, rope: RopeSpec, width: int, windows: tuple[int, ...], config: ModelConfig
) -> AttentionStep:
    """Rotate `width` elements of a head by the tokens' positions, and describe single tokens for their kernel."""
    with jax.named_scope("rotation"):
        factor = rope.yarn.attention_factor if rope.yarn else 1.0
        rotation = config.kernels.rotation(batch.positions_T, rope_frequencies(rope, width), factor=factor)
    return AttentionStep(rotation, _describe_singles(batch, pool, windows, config))


def _describe_singles(
    batch: TokenBatch, pool: jax.Array, windows: tuple[int, ...], config: ModelConfig
) -> DescribedSingles | None:
    describe, num_singles = config.kernels.attention.describe_singles, batch.num_singles
    if describe is None or not num_singles:
        return None
    page_size, table_width = pool.shape[1], batch.page_table_BP.shape[-1]
    with jax.named_scope("attention/paged_attention"):
        by_window = describe(
            batch.positions_T[:num_singles],
            page_size=page_size,
            table_width=table_width,
            windows=windows or (0,),
            ancestors_U=batch.ancestors_U,
            together=batch.together,
        )
        return DescribedSingles(by_window, batch.valid_T[:, None])


@jax.named_scope("attention")
def attend(
    weights: dict[str, jax.Array],
    rows: tuple[jax.Array, jax.Array],
    inputs: AttentionInputs,
    *,
    attention: Any,
    config: ModelConfig,
) -> tuple[jax.Array, jax.Array]:
    """Return what a layer adds to the stream [T, D], and its pool; `rows` are the normed stream and the pool.

    `attention` is the configuration that the kernels take.
    """
    normed_TD, pool = rows
    out_TD, pool = config.kernels.attention.attend(normed_TD, pool, inputs, config=attention)
    out_TD = config.plan.sum_over_tensor(out_TD).astype(normed_TD.dtype)
    return out_TD + weights["o_bias_LD"][inputs.layer] if "o_bias_LD" in weights else out_TD, pool
