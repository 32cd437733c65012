"""Rotary frequencies equal their definition pair by pair, and specs that nothing can rotate are refused."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import numpy as np
import pytest

from rayserve_moe.checkpoints.synthetic import PRESETS
from rayserve_moe.config.settings import ExpertSettings
from rayserve_moe.execution.weights.placing import model_config
from rayserve_moe.kernels.attention_config import PoolFormat
from rayserve_moe.kernels.operations import Kernels
from rayserve_moe.kernels.table import CPU, PAGED, TPU
from rayserve_moe.kernels.tpu.paged_attention import attend_new
from rayserve_moe.model.families.qwen3_moe import spec_from_hf
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.model.layers.attention import GroupedAttention, states
from rayserve_moe.model.layers.choice import divided_sizes, kernels_for
from rayserve_moe.model.layers.paged import rope_frequencies
from rayserve_moe.model.spec import RopeSpec, UnsupportedModelError, YarnSpec
from rayserve_moe.model.states import PoolCounts, layer_pages_of, pool_shapes, states_of
from rayserve_moe.parallel.mesh import plan_for
from rayserve_moe.state.groups import PageGroup
from rayserve_moe.state.kinds import ArraySpec
from tests.support.models.attention_specs import attention_of, with_attention
from tests.support.models.families import FAMILY_CASES, config_of

YARN = YarnSpec(factor=32.0, original_length=4096)


def row_of(own: GroupedAttention, *, kernels: Kernels, tensor_size: int) -> ArraySpec:
    ((row,),) = (kind.entry for kind in states(own, kernels=kernels, tensor_size=tensor_size))
    return row


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
    spec = spec_from_hf(PRESETS["tiny"].hf_config("float32"))
    head_dim = attention_of(spec).head_dim
    assert attention_of(spec).rotary_width == head_dim
    assert attention_of(with_attention(spec, rotary_dim=4)).rotary_width == 4
    for wrong in (5, head_dim + 2):
        with pytest.raises(UnsupportedModelError, match=f"rotary_dim {wrong} must be even and at most"):
            with_attention(spec, rotary_dim=wrong)


def test_pairs_beyond_those_that_turn_have_a_frequency_of_zero():
    """Exponents count all pairs of a head, other than for a rotation of its first elements."""
    found = rope_frequencies(RopeSpec(1e4, turning_pairs=2), 16)
    np.testing.assert_allclose(found, [1.0, 1e4 ** (-2 / 16), *[0.0] * 6], rtol=1e-7)
    assert not np.allclose(found[:2], rope_frequencies(RopeSpec(1e4, rotary_dim=4), 4))


def test_without_a_rotation_heads_turn_by_nothing():
    spec = spec_from_hf(PRESETS["tiny"].hf_config("float32"))
    own = attention_of(with_attention(spec, rope=None))
    assert own.rotary_width == own.head_dim
    assert rope_frequencies(own.rope, own.rotary_width).tolist() == [0.0] * (own.head_dim // 2)


def test_kinds_with_other_heads_have_a_pool_each():
    spec = next(spec_from_config(config_of(case)) for case in FAMILY_CASES if case.name == "laguna-2")
    config = model_config(spec, plan_for(jax.devices()[:1]), experts=ExpertSettings())
    assert [(state.kind.name, state.windows) for state in states_of(config)] == [
        ("kv", (0, 0)),
        ("window_kv", (20, 20)),
    ]
    groups = (PageGroup(0, 30), PageGroup(20, 12))
    assert layer_pages_of(states_of(config), groups) == (
        ("kv", ((0, 0, 30), (0, 30, 30))),
        ("window_kv", ((1, 0, 12), (1, 12, 12))),
    )
    assert layer_pages_of(states_of(config), groups[:1]) == (), "all layers see everything"
    counts, pages = PoolCounts(30), layer_pages_of(states_of(config), groups)
    of_tables = pool_shapes(config, counts, page_size=4, dtype="bfloat16", layer_pages=pages)
    of_one = pool_shapes(config, counts, page_size=4, dtype="bfloat16")
    assert [pools[name][0].shape[0] for pools in (of_tables, of_one) for name in pools] == [60, 24, 60, 60]
    assert divided_sizes(spec, 2)["num_attention_heads"] == 4
    assert divided_sizes(spec, 2)["num_attention_heads (swa)"] == 8


def test_a_tpu_has_one_attention_for_all_heads_and_pools():
    """Its pool has rows of its own, which hold as many elements."""
    spec = spec_from_hf(PRESETS["tiny"].hf_config("float32"))
    wide = with_attention(spec, head_dim=128, windows=(128, 0) * 2, score_scale=0.1)
    sinks = with_attention(wide, sinks=True)
    assert kernels_for(wide, TPU).attention is kernels_for(sinks, TPU).attention is PAGED
    assert kernels_for(wide, TPU, pool=PoolFormat(is_8_bit=True)).attention is PAGED
    odd = PoolFormat(page_size=8)
    assert kernels_for(wide, CPU, pool=odd) == CPU
    with pytest.raises(
        UnsupportedModelError, match="no attention of the tpu kernels: paged: page_size 8 is no multiple"
    ):
        kernels_for(wide, TPU, pool=odd)
    for other in (sinks, with_attention(spec, head_dim=64)):
        assert kernels_for(other, CPU) == CPU
        found = kernels_for(other, TPU)
        assert found.attention.has_packed_rows and found.name == "tpu"
        own = attention_of(other)
        row, flat = (row_of(own, kernels=kernels, tensor_size=2) for kernels in (CPU, found))
        assert flat.shape == (math.prod(row.shape) * max(1, 128 // own.head_dim),)


def test_a_row_holds_keys_and_values_of_their_own_sizes():
    """As they are, or in whole registers; pairs of 8 bits fill pairs of registers."""
    spec = with_attention(spec_from_hf(PRESETS["tiny"].hf_config("float32")), head_dim=192, value_dim=128)
    own = attention_of(with_attention(spec, num_kv_heads=4, num_heads=8))
    assert row_of(own, kernels=CPU, tensor_size=2).shape == (4, 192 + 128)
    assert row_of(own, kernels=kernels_for(spec, TPU), tensor_size=2).shape == (4 * (256 + 128),)
    with pytest.raises(UnsupportedModelError, match="pairs of registers, and keys of 192 with values of 128 take 3"):
        kernels_for(spec, TPU, pool=PoolFormat(is_8_bit=True))
    assert kernels_for(with_attention(spec, value_dim=256), TPU, pool=PoolFormat(is_8_bit=True)).name == "tpu"


@pytest.mark.parametrize(
    ("heads", "width", "tensor_size", "elements"), [(8, 64, 1, 1024), (8, 64, 4, 1024), (4, 128, 2, 1024)]
)
def test_flat_rows_spread_with_the_heads_and_hold_nothing_else(heads, width, tensor_size, elements):
    spec = spec_from_hf(PRESETS["tiny"].hf_config("float32"))
    spec = with_attention(spec, num_heads=16, num_kv_heads=heads, head_dim=width)
    flat = kernels_for(spec, TPU)
    row = row_of(attention_of(spec), kernels=flat, tensor_size=tensor_size)
    assert row.shape == (elements,) and row.axes == ("kv_heads",)


def test_a_window_holds_positions():
    spec = spec_from_hf(PRESETS["tiny"].hf_config("float32"))
    with pytest.raises(UnsupportedModelError, match="a window of -1 is not computed by gqa"):
        with_attention(spec, windows=(-1,) * spec.num_layers)


def test_new_rows_are_written_where_they_are_attended():
    spec = spec_from_hf(PRESETS["tiny"].hf_config("float32"))
    wide = with_attention(spec, head_dim=128)
    assert kernels_for(wide, TPU).attention.attend.keywords["write_and_decode"] is attend_new
