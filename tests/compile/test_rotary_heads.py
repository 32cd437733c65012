"""The kernel of norms and rotation compiles for every chip, for few tokens and for many, in tiles of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from rayserve_moe.kernels.attention_config import AttentionConfig
from rayserve_moe.kernels.reference.layers import Rotation
from rayserve_moe.kernels.tpu.rotary_heads import project_rows_at_once
from rayserve_moe.tools.hlo_report import kernels_of
from tests.compile.topologies import TOPOLOGY_OF_CHIP, compile_for, text_of

WIDTH, CONFIG = 2048, AttentionConfig(128, 1e-6)
HEADS = {"of 30B": (32, 4), "of 235B over 4": (16, 1)}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "chip", ["v6e", *(pytest.param(chip, marks=pytest.mark.slow) for chip in TOPOLOGY_OF_CHIP if chip != "v6e")]
)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("num_tokens", [16, 1000])
def test_it_compiles(chip: str, heads: tuple[int, int], num_tokens: int):
    num_heads, num_kv = heads
    widths = {"q_LDH": num_heads, "k_LDG": num_kv, "v_LDG": num_kv}
    weights = {name: jax.ShapeDtypeStruct((WIDTH, 128 * count), jnp.bfloat16) for name, count in widths.items()}
    weights |= {name: jax.ShapeDtypeStruct((128,), jnp.bfloat16) for name in ("q_norm_Lh", "k_norm_Lh")}
    angles = jax.ShapeDtypeStruct((num_tokens, 64), jnp.float32)

    def step(normed, weights, cos, sin):
        how = {"rotation": Rotation(cos, sin), "config": CONFIG}
        return project_rows_at_once(normed, weights, **how)

    normed = jax.ShapeDtypeStruct((num_tokens, WIDTH), jnp.bfloat16)
    compiled = compile_for(chip, step, normed, weights, angles, angles)
    assert kernels_of(text_of(compiled)) == {"rotary_heads": 1}
