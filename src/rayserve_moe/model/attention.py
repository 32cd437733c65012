"""What the attention kernels take from a model: the frequencies of its rotary embedding, and their configuration."""

# h rotated elements of a head

from __future__ import annotations

import math

import numpy as np

from rayserve_moe.kernels.attention_layer import AttentionConfig
from rayserve_moe.model.spec import ModelSpec, RopeSpec, YarnSpec

LEAST_RAMP = 0.001
"""Width of a ramp whose ends meet, in dimensions: that of the implementation in transformers."""


def attention_config(spec: ModelSpec) -> AttentionConfig:
    """What is fixed about the attention of all layers."""
    return AttentionConfig(
        head_dim=spec.attention.head_dim, eps=spec.norm_eps, interleaved_rotation=spec.rope.interleaved
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
