"""Which attention a model gets of a table of kernels, and what it takes: its configuration, and frequencies."""

# h rotated elements of a head

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from rayserve_moe.kernels.attention_config import AttentionConfig
from rayserve_moe.kernels.latent_attention import LatentConfig
from rayserve_moe.kernels.table import FLAT_ATTENTION, LATENT_ATTENTION, Kernels
from rayserve_moe.kernels.tpu.flat_rows import LANES
from rayserve_moe.model.spec import ModelSpec, RopeSpec, UnsupportedModelError, YarnSpec
from rayserve_moe.parallel.sharding import ParallelPlan

LEAST_RAMP = 0.001
"""Width of a ramp whose ends meet, in dimensions: that of the implementation in transformers."""


def kernels_for(spec: ModelSpec, kernels: Kernels, *, prefers_flat: bool = False) -> Kernels:
    """The kernels with the attention of a model as theirs. UnsupportedModelError where they have none of its kind.

    `prefers_flat`: flat rows also where other rows would do, as jax's kernel takes them: it runs on one core, writes no
    rows, and reads pages once for every token.
    """
    if spec.attention.latent is None:
        is_plain = not spec.attention.sinks and spec.attention.head_dim % LANES == 0 and not prefers_flat
        own = None if is_plain else FLAT_ATTENTION.get(kernels.name)
    elif kernels.name in LATENT_ATTENTION:
        own = LATENT_ATTENTION[kernels.name]
    else:
        raise UnsupportedModelError(
            f"{spec.family}.attention.latent: the {kernels.name} kernels have no multi-head latent attention "
            f"(only {', '.join(LATENT_ATTENTION)})"
        )
    return kernels if own is None else replace(kernels, attention=own)


def attention_config(spec: ModelSpec, plan: ParallelPlan | None = None) -> AttentionConfig | LatentConfig:
    """What is fixed about the attention of all layers, for the attention that `kernels_for` chooses.

    `plan` says how heads lie over devices; None: all on one.
    """
    attention, latent = spec.attention, spec.attention.latent
    if latent is not None:
        scale = attention.head_dim**-0.5 if attention.score_scale is None else attention.score_scale
        return LatentConfig(latent.nope_dim, latent.norm_eps, scale, spec.rope.interleaved)
    return AttentionConfig(
        head_dim=attention.head_dim,
        eps=spec.norm_eps,
        plan=plan,
        interleaved_rotation=spec.rope.interleaved,
        norms_after_rotation=attention.qk_norm_after_rope,
        clip=attention.clip_qkv,
        score_scale=attention.score_scale,
        windows=attention.windows,
    )


def rotary_width(spec: ModelSpec) -> int:
    """How many elements of a head rotate."""
    attention = spec.attention
    return spec.rope.rotary_dim or (attention.latent.rope_dim if attention.latent else attention.head_dim)


def rope_frequencies(rope: RopeSpec, width: int) -> np.ndarray:
    """Radians per position of each pair of `width` rotated elements: float32 [h / 2], rounded from float64.

    They are theta ** (-2 i / h) (Su et al., arXiv:2104.09864). With YaRN (arXiv:2309.00071, section 3.2) pairs that
    turn less than `beta_slow` times in the original length are slowed down by the factor, those that turn more than
    `beta_fast` times are not, and between them the share of each is linear in i.
    """
    frequencies = rope.theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)
    if rope.yarn is not None:
        slowed = _slowed_share(rope.yarn, rope.theta, width)
        frequencies = frequencies / rope.yarn.factor * slowed + frequencies * (1 - slowed)
    return frequencies.astype(np.float32)


def _slowed_share(yarn: YarnSpec, theta: float, width: int) -> np.ndarray:
    """How much of each pair's frequency is divided by the factor, in [0, 1]."""

    def pair_that_turns(turns: float) -> float:
        return width * math.log(yarn.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_that_turns(yarn.beta_fast), pair_that_turns(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    if first == last:
        last += LEAST_RAMP
    return np.clip((np.arange(width // 2) - first) / (last - first), 0.0, 1.0)
