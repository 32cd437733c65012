"""Products per head of latent attention in kernels of our own are those of XLA, to the bit where sums are exact."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from rayserve_moe.kernels import latent_attention as by_xla
from rayserve_moe.kernels.adapters import LayerAdapters, TokenAdapters
from rayserve_moe.kernels.attention_heads import StackedWeights
from rayserve_moe.kernels.attention_layer import ProjectedRows
from rayserve_moe.kernels.latent_attention import LatentConfig
from rayserve_moe.kernels.reference.layers import rotation_of
from rayserve_moe.kernels.table import PAGED_LATENTS, latent_products
from rayserve_moe.kernels.tpu import latent_heads
from rayserve_moe.kernels.tpu.latent_heads import angles_of_lanes
from rayserve_moe.kernels.tpu.packed_rows import latent_lanes

LAYERS, LAYER = 2, 1


@dataclass(frozen=True)
class Sizes:
    """Sizes of a call; `rotated` elements of a query turn."""

    tokens: int = 20
    heads: int = 4
    nope: int = 128
    turning: int = 64
    rotated: int = 64
    value: int = 128
    latent: int = 256
    interleaved: bool = False

    @property
    def config(self) -> LatentConfig:
        return LatentConfig(self.nope, 1e-6, 0.1, self.interleaved)

    @property
    def part(self) -> ProjectedRows:
        frequencies = (100.0 ** (-np.arange(0, self.rotated, 2) / max(self.rotated, 1))).astype(np.float32)
        rotation = rotation_of(jnp.arange(self.tokens), frequencies)
        return ProjectedRows(jnp.zeros((self.tokens, 1), jnp.bfloat16), rotation, None)

    def drawn(self, *shape: int) -> jax.Array:
        """Whole numbers, whose products of 16 bits add up exactly in any order."""
        return jnp.asarray(np.random.default_rng(sum(shape)).integers(-4, 5, shape), jnp.bfloat16)

    @property
    def stacked(self) -> StackedWeights:
        shapes = {"k_b_LHC": self.nope, "v_b_LHC": self.value}
        weights = {name: self.drawn(LAYERS, self.heads * width, self.latent) for name, width in shapes.items()}
        return StackedWeights(weights, jnp.int32(LAYER))

    @property
    def queries(self) -> jax.Array:
        return self.drawn(self.tokens, self.heads * (self.nope + self.turning))

    @property
    def attended(self) -> jax.Array:
        return self.drawn(self.tokens, self.heads, self.latent)


CASES = {
    "halves rotate": Sizes(),
    "neighbours rotate": Sizes(interleaved=True),
    "a part rotates": Sizes(rotated=32),
    "nothing rotates": Sizes(rotated=0),
    "several tiles, the last one short": Sizes(tokens=130, nope=64, value=64, latent=128),
    "one token": Sizes(tokens=1, turning=32, rotated=32, latent=128),
    "several sets of heads": Sizes(heads=32, interleaved=True),
}
QUICK = {"neighbours rotate", "several tiles, the last one short"}
BY_NAME = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CASES]


@pytest.mark.parametrize("name", BY_NAME)
def test_queries_are_those_of_xla_with_zeros_behind(name):
    sizes, width = CASES[name], CASES[name].latent + CASES[name].turning
    call = sizes.queries, sizes.part, sizes.stacked
    assert not latent_heads.unsupported_absorb(*call, config=sizes.config)
    found = latent_heads.absorb(*call, config=sizes.config, interpret=True)
    assert found.shape == (sizes.tokens, sizes.heads, latent_lanes(width)) and found.dtype == jnp.bfloat16
    wanted = by_xla.absorb(*call, config=sizes.config).astype(jnp.bfloat16)
    np.testing.assert_array_equal(found[..., :width].astype(np.float32), wanted.astype(np.float32))
    assert not found[..., width:].any()


@pytest.mark.parametrize("name", BY_NAME)
def test_values_are_those_of_xla(name):
    sizes = CASES[name]
    call = sizes.attended, sizes.part, sizes.stacked
    assert not latent_heads.unsupported_expand(*call)
    found, wanted = latent_heads.expand(*call, interpret=True), by_xla.expand(*call)
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    np.testing.assert_array_equal(found.astype(np.float32), wanted.astype(np.float32))


def exchanged(*given: Any, **named: Any) -> tuple[jax.Array, jax.Array]:
    return angles_of_lanes(*given, **named)[::-1]


FAULTS = {
    "another layer": ("_scalars", lambda _: jnp.zeros(1, jnp.int32)),
    "pairs turned back": ("angles_of_lanes", exchanged),
    "heads of a neighbour": (
        "_matrices",
        lambda rows, latent: pl.BlockSpec((None, rows, latent), lambda *_: (1, 1, 0)),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch):
    sizes = Sizes(heads=32, nope=32, turning=32, rotated=32, value=32, latent=128)
    call = sizes.part, sizes.stacked
    monkeypatch.setattr(latent_heads, *FAULTS[fault])
    found = latent_heads.absorb(sizes.queries, *call, config=sizes.config, interpret=True)
    wanted = by_xla.absorb(sizes.queries, *call, config=sizes.config).astype(jnp.bfloat16)
    assert (found[..., : wanted.shape[2]] != wanted).any()
    if fault != "pairs turned back":
        found, wanted = latent_heads.expand(sizes.attended, *call, interpret=True), by_xla.expand(sizes.attended, *call)
        assert (found != wanted).any()


@pytest.mark.parametrize(
    ("changes", "named", "reason"),
    [
        ({"tokens": latent_heads.MAX_TOKENS + 1}, {}, f"{latent_heads.MAX_TOKENS + 1} tokens, more than"),
        ({"heads": 20}, {}, "20 heads are no multiple of 16"),
        ({"latent": 192}, {}, "latents of 192 elements fill no registers"),
        (
            {},
            {"adapters": LayerAdapters({}, jnp.int32(0), TokenAdapters(jnp.zeros(1, int), jnp.zeros(20, int)))},
            "ada",
        ),
    ],
    ids=["tokens", "heads", "latents", "adapters"],
)
def test_a_call_that_no_kernel_takes_names_the_reason(changes: dict[str, Any], named: dict[str, Any], reason: str):
    sizes = Sizes(**changes)
    call = sizes.part, sizes.stacked
    assert reason in latent_heads.unsupported_absorb(sizes.queries, *call, config=sizes.config, **named)
    assert reason in latent_heads.unsupported_expand(sizes.attended, *call, **named)


def test_widths_that_fill_no_registers_and_scaled_queries_name_the_reason():
    sizes = Sizes(heads=32, nope=100, turning=50, rotated=50, value=100)
    reason = latent_heads.unsupported_absorb(sizes.queries, sizes.part, sizes.stacked, config=sizes.config)
    assert reason == "16 heads of 150 elements fill no registers"
    reason = latent_heads.unsupported_expand(sizes.attended, sizes.part, sizes.stacked)
    assert reason == "16 heads of 100 elements fill no registers"
    scaled, scales = Sizes(), jnp.ones(20)
    call = scaled.queries, scaled.part, scaled.stacked
    reason = latent_heads.unsupported_absorb(*call, config=scaled.config, query_scale_T=scales)
    assert reason == "queries are scaled by position"
    found = latent_products(interpret=True)["absorb"](*call, config=scaled.config, query_scale_T=2 * scales)
    np.testing.assert_array_equal(found, 2 * by_xla.absorb(*call, config=scaled.config))


@pytest.mark.parametrize("num_tokens", [20, latent_heads.MAX_TOKENS + 16])
def test_the_table_of_tpus_takes_the_kernels_for_few_tokens_and_xla_for_more(num_tokens: int):
    sizes, is_few = Sizes(tokens=num_tokens), num_tokens <= latent_heads.MAX_TOKENS
    call = sizes.part, sizes.stacked
    absorb = PAGED_LATENTS.absorb.choose(sizes.queries, *call, config=sizes.config)
    assert absorb.name == ("absorb_queries" if is_few else "xla")
    assert PAGED_LATENTS.expand.choose(sizes.attended, *call).name == ("expand_values" if is_few else "xla")
