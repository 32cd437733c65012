"""Rotary frequencies equal their definition pair by pair, and specs that nothing can rotate are refused."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import numpy as np
import pytest

from rayserve_moe.checkpoints.synthetic import PRESETS
from rayserve_moe.kernels.registry import CPU, TPU
from rayserve_moe.model.attention import kernels_for, rope_frequencies, rotary_width
from rayserve_moe.model.families.qwen3_moe import spec_from_hf
from rayserve_moe.model.spec import RopeSpec, UnsupportedModelError, YarnSpec

YARN = YarnSpec(factor=32.0, original_length=4096)


def test_frequencies_are_powers_of_theta_rounded_once():
    found = rope_frequencies(RopeSpec(theta=1e4), 24)
    expected = [np.float32(1e4 ** (-i / 12)) for i in range(12)]
    assert found.dtype == np.float32 and found.tolist() == [float(value) for value in expected]


@pytest.mark.parametrize(
    ("yarn", "theta", "width"),
    [
        (YARN, 1.5e5, 64),
        (replace(YARN, truncate=False), 1.5e5, 64),
        (replace(YARN, beta_fast=1.0, factor=4.0), 5e4, 64),
        (YarnSpec(factor=8.0, original_length=16), 1e4, 8),
    ],
    ids=["truncated", "not truncated", "ends meet", "short"],
)
def test_yarn_slows_pairs_by_their_turns_in_the_original_length(yarn, theta, width):
    def place_of(turns: float) -> float:
        # theta ** (-2 i / width) * original_length = 2 pi turns, solved for i.
        return width / 2 * math.log(yarn.original_length / (2 * math.pi * turns)) / math.log(theta)

    first, last = place_of(yarn.beta_fast), place_of(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    expected = []
    for i in range(width // 2):
        frequency = theta ** (-2 * i / width)
        slowed = min(max((i - first) / ((last - first) or 0.001), 0.0), 1.0)
        expected.append((1 - slowed) * frequency + slowed * frequency / yarn.factor)
    found = rope_frequencies(RopeSpec(theta, yarn=yarn), width)
    np.testing.assert_allclose(found, expected, rtol=1e-7)
    plain = rope_frequencies(RopeSpec(theta), width)
    assert found[-1] == pytest.approx(plain[-1] / yarn.factor, rel=1e-6), "the slowest pair turns less than once"


def test_the_rotated_part_is_an_even_part_of_a_head():
    spec = spec_from_hf(asdict(PRESETS["tiny"]))
    assert rotary_width(spec) == spec.attention.head_dim
    assert rotary_width(replace(spec, rope=replace(spec.rope, rotary_dim=4))) == 4
    for wrong in (5, spec.attention.head_dim + 2):
        with pytest.raises(UnsupportedModelError, match=f"rotary_dim {wrong} is no even part of heads"):
            replace(spec, rope=replace(spec.rope, rotary_dim=wrong))


def test_a_tpu_refuses_sinks_by_name_and_takes_windows():
    spec = spec_from_hf(asdict(PRESETS["tiny"]))
    windows = replace(spec, attention=replace(spec.attention, windows=(128, 0) * 2, score_scale=0.1))
    assert kernels_for(windows, TPU) is TPU
    sinks = replace(spec, attention=replace(spec.attention, sinks=True))
    assert kernels_for(sinks, CPU) is CPU
    with pytest.raises(UnsupportedModelError, match=r"attention\.sinks = True is not computed by the tpu kernels"):
        kernels_for(sinks, TPU)


def test_there_is_a_window_for_every_layer():
    spec = spec_from_hf(asdict(PRESETS["tiny"]))
    for windows in ((128,), (-1,) * spec.num_layers):
        with pytest.raises(UnsupportedModelError, match="are no positions for"):
            replace(spec, attention=replace(spec.attention, windows=windows))
