"""The kernel of gated delta layers compiles for every chip, and updates the pools in place."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from rayserve_moe.kernels.reference.gated_delta import (
    CHUNK,
    WINDOW_ROWS,
    DeltaPools,
    DeltaTokens,
    Pieces,
    RowEntries,
)
from rayserve_moe.kernels.tpu.delta_rule import advance_tokens
from rayserve_moe.tools.hlo_report import kernels_of
from tests.compile.topologies import TOPOLOGY_OF_CHIP, compile_for, text_of

HEADS = {"of 35B": (16, 32), "of 397B": (16, 64), "of 35B over 2": (8, 16)}
"""Key heads and value heads."""
TOKENS, ROWS, ENTRIES, WIDTH = 16, 24, 63, 128


def shapes_of(key_heads: int, heads: int) -> tuple[DeltaPools, DeltaTokens, Pieces]:
    """Return the shapes of a call."""
    channels = 2 * WIDTH + heads // key_heads * WIDTH
    of_rows = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    pools = DeltaPools(
        of_rows((ENTRIES, heads, WIDTH, WIDTH)),
        of_rows((ENTRIES, 3, key_heads, channels)),
        of_rows((ROWS, CHUNK, key_heads, WIDTH)),
        of_rows((ROWS, CHUNK, heads, WIDTH)),
        of_rows((ROWS, heads, WIDTH)),
        of_rows((ROWS, WINDOW_ROWS, key_heads, channels)),
    )
    narrow = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    keys, values = (narrow((TOKENS, count, WIDTH)) for count in (key_heads, heads))
    decays, betas = of_rows((TOKENS, heads, 1)), of_rows((TOKENS, heads))
    tokens = DeltaTokens(keys, keys, values, decays, betas, narrow((TOKENS, key_heads, channels)))
    ints = jax.ShapeDtypeStruct((TOKENS,), jnp.int32)
    return pools, tokens, Pieces(*[ints] * 5, RowEntries(*[ints] * 3))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "chip", ["v6e", *(pytest.param(chip, marks=pytest.mark.slow) for chip in TOPOLOGY_OF_CHIP if chip != "v6e")]
)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_it_compiles_and_copies_no_pool(chip: str, heads: tuple[int, int]):
    pools, *given = shapes_of(*heads)

    def step(pools: DeltaPools, tokens: DeltaTokens, pieces: Pieces, first_entry: jax.Array, first_row: jax.Array):
        return advance_tokens(tokens, pools, pieces, layer=(first_entry, first_row))

    place = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = compile_for(chip, step, pools, *given, place, place, donate=0)
    assert kernels_of(text_of(compiled)) == {"delta_rule": 1}
    memory, of_tokens = compiled.memory_analysis(), 4 * TOKENS * WIDTH * (2 * heads[0] + 3 * heads[1])
    pool_bytes = sum(pool.size * 4 for pool in pools)
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < 4 * of_tokens, "tokens in float32, and no pool"
