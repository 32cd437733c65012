"""Shared parts of attention over paged rows: preparation of a step, and attention of a layer."""

# T tokens   D model width   h rotated elements of a head

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.kernels.attention_layer import AttentionInputs, DescribedSingles, TokenBatch
from rayserve_moe.kernels.reference.layers import Rotation
from rayserve_moe.model.layers.kinds import LayerInputs
from rayserve_moe.model.model_config import ModelConfig, Pools, adapters_of
from rayserve_moe.model.spec import QueryScaleSpec, RopeSpec, YarnSpec


class AttentionStep(NamedTuple):
    """Arrays of a step that all attention layers share."""

    rotation: Rotation
    """Rotation of every token."""
    singles: DescribedSingles | None
    """Kernel description of single tokens; None if the kernel needs none or the step has none."""
    query_scale_T: jax.Array | None = None
    """Factors of queries, float32; None stands for 1."""


def prepare_attention(
    batch: TokenBatch,
    pool: jax.Array,
    *,
    rope: RopeSpec | None,
    width: int,
    windows: tuple[int, ...],
    config: ModelConfig,
) -> AttentionStep:
    """Return the rotation of `width` elements per head by position, and the kernel description of single tokens."""
    with jax.named_scope("rotation"):
        factor = rope.yarn.attention_factor if rope and rope.yarn else 1.0
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
            together=batch.together,
        )
        return DescribedSingles(by_window, batch.valid_T[:, None])


@jax.named_scope("attention")
def attend(  # noqa: PLR0913 (the differences between kinds of attention)
    rows: tuple[jax.Array, Pools],
    inputs: LayerInputs,
    *,
    mixer: str,
    state: str,
    attention: Any,
    made: tuple[jax.Array, jax.Array] | None = None,
    chosen_TK: jax.Array | None = None,
) -> tuple[jax.Array, Pools]:
    """Return the attention output [T, D] and the pools; `rows` are the normed stream and the pools.

    `mixer` and `state` name the kinds of mixer and state, `attention` is the kernel configuration, `made` as in
    `Mixer.apply`, `chosen_TK` as in `AttentionInputs`.
    """
    (normed_TD, pools), (weights, of_step, layer, config) = rows, inputs
    (pool,) = pools[state]
    step: AttentionStep = of_step.prepared[mixer]
    batch = of_step.batch.of_state(state)
    of_layer = AttentionInputs(weights, batch, step.rotation, layer, step.singles, made, step.query_scale_T)
    of_layer = of_layer._replace(chosen_TK=chosen_TK, adapters=adapters_of(of_step, mixer, layer))
    out_TD, pool = config.kernels.attention.attend(normed_TD, pool, of_layer, config=attention)
    out_TD = config.plan.sum_over_tensor(out_TD).astype(normed_TD.dtype)
    out_TD = out_TD + weights["o_bias_LD"][layer] if "o_bias_LD" in weights else out_TD
    return out_TD, {**pools, state: (pool,)}


def query_scales(batch: TokenBatch, spec: QueryScaleSpec) -> jax.Array:
    """Return the factor of each token's queries, float32 [T]; padding has the factor of position 0."""
    turns_T = jnp.maximum(batch.positions_T, 0) // spec.length
    return 1.0 + spec.beta * jnp.log1p(turns_T.astype(jnp.float32))


MIN_RAMP = 0.001
"""Minimum width of the ramp, in dimensions, as in transformers."""


def rope_frequencies(rope: RopeSpec | None, width: int) -> np.ndarray:
    """Return radians per position of each pair of `width` rotated elements: float32 [h / 2], rounded from float64.

    Without a rotation all are zero, which leaves heads as they are.

    Frequencies are theta ** (-2 i / h) (Su et al., arXiv:2104.09864). YaRN (arXiv:2309.00071, section 3.2) divides by
    the factor the frequency of pairs with fewer than `beta_slow` turns in the original length, keeps pairs with more
    than `beta_fast` turns, and interpolates linearly in i between them. Llama 3.1 interpolates linearly in turns.
    """
    if rope is None:
        return np.zeros(width // 2, np.float32)
    frequencies = rope.theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)
    if rope.turning_pairs is not None:
        frequencies[rope.turning_pairs :] = 0.0
    if rope.yarn is not None:
        slowed = _slowed_share(rope.yarn, rope.theta, width)
        frequencies = frequencies / rope.yarn.factor * slowed + frequencies * (1 - slowed)
    if (scaling := rope.llama3) is not None:
        turns = scaling.original_length * frequencies / (2 * math.pi)
        kept = np.clip((turns - scaling.low_turns) / (scaling.high_turns - scaling.low_turns), 0.0, 1.0)
        frequencies = frequencies * kept + frequencies / scaling.factor * (1 - kept)
    return frequencies.astype(np.float32)


def _slowed_share(yarn: YarnSpec, theta: float, width: int) -> np.ndarray:
    """Return the interpolation weight of each pair, in [0, 1]: 1 divides its frequency by the factor."""

    def pair_that_turns(turns: float) -> float:
        return width * math.log(yarn.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_that_turns(yarn.beta_fast), pair_that_turns(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    if first == last:
        last += MIN_RAMP
    return np.clip((np.arange(width // 2) - first) / (last - first), 0.0, 1.0)
