"""Rotary frequencies."""

# h rotated elements of a head

from __future__ import annotations

import math

import numpy as np

from rayserve_moe.model.spec import RopeSpec, YarnSpec

LEAST_RAMP = 0.001
"""Width of a ramp whose ends meet, in dimensions: that of the implementation in transformers."""


def rope_frequencies(rope: RopeSpec, width: int) -> np.ndarray:
    """Return radians per position of each pair of `width` rotated elements: float32 [h / 2], rounded from float64.

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
    """Return the share of each pair's frequency that is divided by the factor, in [0, 1]."""

    def pair_that_turns(turns: float) -> float:
        return width * math.log(yarn.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_that_turns(yarn.beta_fast), pair_that_turns(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    if first == last:
        last += LEAST_RAMP
    return np.clip((np.arange(width // 2) - first) / (last - first), 0.0, 1.0)
