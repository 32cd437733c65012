"""Our own paged attention compiles for every chip and reads the pool where it lies, rows as wide as what they hold."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.kernels.kv_pool import write_rows
from rayserve_moe.kernels.reference.attention import FULL_CAUSAL, BlockPlaces, NewRows, ScoreConfig, Together
from rayserve_moe.kernels.tpu.byte_pairs import paired_rows
from rayserve_moe.kernels.tpu.packed_rows import latent_lanes, packed_width
from rayserve_moe.kernels.tpu.paged_attention import attend, attend_new, describe_singles
from rayserve_moe.tools.hlo_report import Piece, copies_of, kernels_of
from tests.compile.topologies import TOPOLOGY_OF_CHIP, compile_for, text_of

NUM_PAGES, PAGE, CONTEXT = 2000, 128, 4096


class Heads(NamedTuple):
    """The heads of a device, and their widths."""

    queries: int
    kv: int
    width: int
    latent_width: int = 0
    value_width: int = 0
    has_sinks: bool = False

    @property
    def lanes(self) -> int:
        """Return the numbers in a row of the pool."""
        if self.latent_width:
            return latent_lanes(self.width)
        return packed_width(self.kv, self.width, self.value_width or self.width)

    def knobs(self, sinks: jax.Array) -> dict[str, Any]:
        """Return the model's keywords of a call."""
        widths = {"latent_width": self.latent_width, "value_width": self.value_width}
        return widths | ({"sinks_H": sinks} if self.has_sinks else {})


MODELS = {
    "gpt-oss": Heads(64, 8, 64, has_sinks=True),
    "deepseek": Heads(128, 1, 576, latent_width=512),
    "heads of 128": Heads(32, 4, 128),
    "heads of 256": Heads(16, 8, 256),
    "heads of 512": Heads(16, 2, 512),
    "keys of 192, values of 128": Heads(16, 2, 192, value_width=128, has_sinks=True),
}
"""Heads of 256 and 512 are those of Gemma 4, keys of 192 those of MiMo-V2-Flash by four devices."""
NAME_OF = {"bfloat16": "bf16", "int16": "s16"}
"""Names of dtypes in programs."""


def shapes_of_rows(lanes: int, num_rows: int, *, is_8_bit: bool) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Return the shapes of a pool and of new rows, which are paired for a pool of 8 bits."""
    rows = jax.ShapeDtypeStruct((num_rows, lanes), jnp.bfloat16)
    if is_8_bit:
        return jax.ShapeDtypeStruct((NUM_PAGES, PAGE, lanes // 2), jnp.int16), rows
    return jax.ShapeDtypeStruct((NUM_PAGES, PAGE, lanes), jnp.bfloat16), rows


def compiled_step(
    chip: str,
    model: str,
    num_queries: int,
    *,
    config: ScoreConfig = FULL_CAUSAL,
    is_writing: bool = False,
    is_8_bit: bool = False,
):
    """New rows are written into a pool that is given away, then 16 blocks attend it; or both at once."""
    heads = MODELS[model]
    pool, rows = shapes_of_rows(heads.lanes, 16, is_8_bit=is_8_bit)
    queries = jax.ShapeDtypeStruct((16, num_queries, heads.queries, heads.width), jnp.bfloat16)
    table, positions = (jax.ShapeDtypeStruct((16, n), np.int32) for n in (CONTEXT // PAGE, num_queries))
    slots, sinks = jax.ShapeDtypeStruct((16,), np.int32), jax.ShapeDtypeStruct((heads.queries,), jnp.bfloat16)

    def step(pool, rows, slots, queries, table, positions, sinks):
        knobs = {"config": config} | heads.knobs(sinks)
        rows = paired_rows(rows) if is_8_bit else rows
        if is_writing:
            attended, pool = attend_new(queries[:, 0], pool, BlockPlaces(table, positions), NewRows(rows, 7), **knobs)
            return pool, attended
        pool = write_rows(pool, rows, slots)
        return pool, attend(queries, pool, BlockPlaces(table, positions), **knobs)

    return compile_for(chip, step, pool, rows, slots, queries, table, positions, sinks, donate=0), pool


def compiled_groups(chip: str, model: str, most: int, *, is_8_bit: bool = False):
    """64 single tokens, up to `most` of a sequence, attend and write a pool that is given away."""
    heads, num = MODELS[model], 64
    pool, rows = shapes_of_rows(heads.lanes, num, is_8_bit=is_8_bit)
    shapes = (num, heads.queries, heads.width), (heads.queries,)
    queries, sinks = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    table, of_tokens = (jax.ShapeDtypeStruct(shape, np.int32) for shape in ((num, CONTEXT // PAGE), (num,)))

    def step(pool, rows, queries, table, positions, sequences, sinks):
        together = Together(sequences, most)
        sizes = {"page_size": PAGE, "table_width": CONTEXT // PAGE, "windows": (0,)}
        described = describe_singles(positions, **sizes, together=together)
        places = BlockPlaces(table, positions[:, None], described[0], together)
        new = NewRows(paired_rows(rows) if is_8_bit else rows, 7)
        return attend_new(queries, pool, places, new, **heads.knobs(sinks))

    given = (rows, queries, table, of_tokens, of_tokens, sinks)
    return compile_for(chip, step, pool, *given, donate=0), pool


def assert_reads_in_place(compiled, pool, num_rows: int = 16 * 128, *, name: str = "paged_attention") -> None:
    """Beside the pool, queries and results of `num_rows` heads of all tokens, spread over lanes, are all there is."""
    analysis, pool_bytes = compiled.memory_analysis(), pool.size * pool.dtype.itemsize
    assert kernels_of(text_of(compiled)) == {name: 1}
    assert pool_bytes <= analysis.alias_size_in_bytes < 1.01 * pool_bytes, "written in place, and not padded"
    assert analysis.temp_size_in_bytes < 3 * num_rows * latent_lanes(576) * 2
    piece = Piece("kv", NAME_OF[str(pool.dtype)], pool.shape[2:], pool.size // 2, is_written=True)
    assert copies_of(text_of(compiled), [piece]) == []


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "chip", ["v6e", *(pytest.param(c, marks=pytest.mark.slow) for c in TOPOLOGY_OF_CHIP if c != "v6e")]
)
@pytest.mark.parametrize("model", MODELS)
def test_single_tokens_attend_the_pool_in_place(chip, model):
    assert_reads_in_place(*compiled_step(chip, model, 1))
    compiled, pool = compiled_step(chip, model, 1, is_writing=True)
    assert_reads_in_place(compiled, pool)
    assert "scatter" not in compiled.as_text()


@pytest.mark.slow
@pytest.mark.parametrize("chip", TOPOLOGY_OF_CHIP)
@pytest.mark.parametrize("model", MODELS)
def test_prompts_attend_the_pool_in_place(chip, model):
    compiled, pool = compiled_step(chip, model, 32, config=ScoreConfig(window=128, soft_cap=30.0))
    assert_reads_in_place(compiled, pool, 16 * 32 * MODELS[model].queries)


@pytest.mark.parametrize(
    "chip", ["v6e", *(pytest.param(c, marks=pytest.mark.slow) for c in TOPOLOGY_OF_CHIP if c != "v6e")]
)
@pytest.mark.parametrize(
    ("model", "most"),
    [("heads of 128", 4), *(pytest.param(m, n, marks=pytest.mark.slow) for m in MODELS for n in (5, 8))],
)
def test_groups_attend_and_write_the_pool_in_place(chip, model, most):
    """Nothing is scattered, and no group's queries are put together by XLA."""
    compiled, pool = compiled_groups(chip, model, most)
    assert_reads_in_place(compiled, pool, 64 * 128, name="paged_attention_of_groups")
    assert "scatter" not in compiled.as_text()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "chip", ["v6e", *(pytest.param(c, marks=pytest.mark.slow) for c in TOPOLOGY_OF_CHIP if c != "v6e")]
)
@pytest.mark.parametrize("model", ["heads of 128", "gpt-oss"])
@pytest.mark.parametrize(
    "knobs",
    [
        pytest.param({"num_queries": 1, "is_writing": True}, id="single tokens"),
        pytest.param({"num_queries": 32, "config": ScoreConfig(window=128)}, id="prompts", marks=pytest.mark.slow),
    ],
)
def test_pools_of_8_bits_are_read_and_written_in_place(chip, model, knobs):
    compiled, pool = compiled_step(chip, model, **knobs, is_8_bit=True)
    assert_reads_in_place(compiled, pool, 16 * knobs["num_queries"] * 128)


@pytest.mark.slow
@pytest.mark.parametrize("chip", TOPOLOGY_OF_CHIP)
@pytest.mark.parametrize("model", ["heads of 128", "gpt-oss"])
def test_groups_attend_and_write_pools_of_8_bits_in_place(chip, model):
    compiled, pool = compiled_groups(chip, model, 4, is_8_bit=True)
    assert_reads_in_place(compiled, pool, 64 * 128, name="paged_attention_of_groups")
    assert "scatter" not in compiled.as_text()
