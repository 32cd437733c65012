"""The experts of a device are multiplied by one kernel, or by the compiler's own ones where it does not suit."""

from __future__ import annotations

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.kernels.adapters import AdapterPair, ExpertAdapters, RowAdapters
from rayserve_moe.kernels.narrow_weights import NARROW, scale_rows
from rayserve_moe.kernels.reference.expert_products import (
    ExpertWeights,
    LayerExperts,
    ProductConfig,
    multiply_by_ragged_dot,
)
from rayserve_moe.kernels.table import TPU
from rayserve_moe.tools.hlo_report import kernels_of
from tests.compile.topologies import compile_for, text_of

SLOTS, WIDTH, INNER = 16, 2048, 768


def compiled_for(
    chip: str,
    product,
    num_tokens: int,
    *,
    width: int = WIDTH,
    inner: int = INNER,
    dtype=jnp.bfloat16,
    in_blocks: bool = False,
    ranks: tuple[int, int] | None = None,
) -> jax.stages.Compiled:
    """The program in which six choices of each of `num_tokens` are multiplied.

    `ranks` are number and rank of the resident adapters.
    """
    up = jax.ShapeDtypeStruct((SLOTS, width, inner), dtype)
    rows = [scale_rows(size) if in_blocks else 1 for size in (width, inner)]
    scale, of_down = (
        jax.ShapeDtypeStruct((SLOTS, count, size), jnp.float32)
        for count, size in zip(rows, (inner, width), strict=True)
    )
    scales = (scale, scale, of_down) if dtype in NARROW else ()
    shapes = (
        jax.ShapeDtypeStruct((num_tokens, width), jnp.bfloat16),
        jax.ShapeDtypeStruct((num_tokens, 6), np.int32),
        up,
        up,
        jax.ShapeDtypeStruct((SLOTS, inner, width), dtype),
        *scales,
    )
    if ranks is not None:
        by_size = {size: jax.ShapeDtypeStruct((SLOTS, *ranks, size), jnp.bfloat16) for size in (width, inner)}
        before = AdapterPair(by_size[width], by_size[inner])
        adapters = ExpertAdapters(before, before, AdapterPair(by_size[inner], by_size[width]))
        shapes += (RowAdapters(adapters, jax.ShapeDtypeStruct((num_tokens,), np.int32)),)

    def multiply(rows, slots, *weights):
        *weights, adapters = weights if ranks is not None else (*weights, None)
        held = ExpertWeights(*weights[:3], None, None, None, *weights[3:])
        experts = LayerExperts(held, 0, ProductConfig(SLOTS, 8.0), adapters)
        return product(rows, slots, experts)

    return compile_for(chip, multiply, *shapes)


def kernels_for(chip: str, product, num_tokens: int, **more) -> Counter[str]:
    """The kernels of the program of `compiled_for`."""
    return Counter(kernels_of(text_of(compiled_for(chip, product, num_tokens, **more))))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("num_tokens", [1, 3, 16, pytest.param(161, marks=pytest.mark.slow)])
def test_any_number_of_rows_is_multiplied_by_the_compilers_kernel(num_tokens):
    assert kernels_for("v6e", multiply_by_ragged_dot, num_tokens)["ragged-dot-none"] == 3


@pytest.mark.parametrize(
    ("chip", "num_tokens", "width", "inner"),
    [
        ("v6e", 3, WIDTH, INNER),
        pytest.param("v6e", 256, WIDTH, INNER, marks=pytest.mark.slow),
        pytest.param("v6e", 53, 7168, 2048, marks=pytest.mark.slow, id="the most rows of 7168"),
        pytest.param("v5e", 101, 4096, 1536, marks=pytest.mark.slow, id="the most rows of 4096"),
        pytest.param("7x", 128, WIDTH, INNER, marks=pytest.mark.slow),
    ],
)
def test_few_rows_are_multiplied_by_one_kernel(chip, num_tokens, width, inner):
    found = kernels_for(chip, TPU.experts.results, num_tokens, width=width, inner=inner)
    assert found["grouped_ffn"] == 1 and not found["ragged-dot-none"]


@pytest.mark.parametrize(
    ("chip", "dtype", "ranks"),
    [
        ("v6e", jnp.bfloat16, (8, 16)),
        pytest.param("v6e", jnp.bfloat16, (4, 32), marks=pytest.mark.slow),
        pytest.param("v6e", jnp.int8, (2, 8), marks=pytest.mark.slow),
        pytest.param("7x", jnp.bfloat16, (8, 16), marks=pytest.mark.slow),
    ],
)
def test_few_rows_with_adapters_are_multiplied_by_one_kernel(chip, dtype, ranks):
    """Resident adapters are read where they lie."""
    compiled = compiled_for(chip, TPU.experts.results, 16, dtype=dtype, ranks=ranks)
    found = Counter(kernels_of(text_of(compiled)))
    assert found["grouped_ffn"] == 1 and not found["ragged-dot-none"]
    assert compiled.memory_analysis().temp_size_in_bytes < SLOTS * np.prod(ranks) * INNER * 2, "no adapter is copied"


BY_ROWS, BY_COLUMNS = "2,1,0", "1,2,0"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("width", "inner", "orders", "kernel"),
    [
        pytest.param(2816, 704, (BY_COLUMNS, BY_ROWS), "ragged-dot-none", id="Gemma 4, as in files"),
        pytest.param(2816, 768, (BY_ROWS, BY_ROWS), "grouped_ffn", id="Gemma 4, padded"),
        pytest.param(2880, 2880, (BY_ROWS, BY_ROWS), "ragged-dot-none", id="gpt-oss", marks=pytest.mark.slow),
        pytest.param(
            2880, 2944, (BY_ROWS, BY_COLUMNS), "ragged-dot-none", id="gpt-oss, padded", marks=pytest.mark.slow
        ),
    ],
)
def test_experts_lie_by_rows_unless_one_of_their_widths_alone_is_whole_lanes(width, inner, orders, kernel):
    """The grouped product reads row-major weights; column-major ones would be copied first."""
    compiled = compiled_for("v6e", TPU.experts.results, 64, width=width, inner=inner)
    layout = compiled.as_text().partition("entry_computation_layout={")[2].partition("->")[0]
    found = re.findall(rf"bf16\[{SLOTS},\d+,\d+\]{{([\d,]+):", layout)
    assert found == [orders[0], *orders]
    assert kernel in kernels_of(text_of(compiled))


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "inner"), [("v6e", INNER), ("v6e", 4096), ("v5e", INNER), ("7x", INNER)])
@pytest.mark.parametrize(("dtype", "in_blocks"), [("int8", False), ("float8_e4m3fn", False), ("float8_e4m3fn", True)])
def test_8_bits_are_multiplied_by_the_same_kernel(chip, inner, dtype, in_blocks):
    """Held whole and in parts."""
    found = kernels_for(chip, TPU.experts.results, 16, inner=inner, dtype=jnp.dtype(dtype), in_blocks=in_blocks)
    assert found["grouped_ffn"] == 1 and not found["ragged-dot-none"]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "in_blocks"), [("int8", False), ("float8_e4m3fn", True)])
def test_many_rows_of_8_bits_are_multiplied_by_the_compilers_kernel(dtype, in_blocks):
    found = kernels_for("v6e", TPU.experts.results, 1024, dtype=jnp.dtype(dtype), in_blocks=in_blocks)
    assert found["ragged-dot-none"] == 3


@pytest.mark.parametrize(("chip", "num_tokens"), [pytest.param("v6e", 1024, marks=pytest.mark.slow), ("v5p", 16)])
def test_many_rows_and_cores_that_share_a_device_are_not_for_it(chip, num_tokens):
    found = kernels_for(chip, TPU.experts.results, num_tokens)
    assert found["ragged-dot-none"] == 3 and not found["grouped_ffn"]
