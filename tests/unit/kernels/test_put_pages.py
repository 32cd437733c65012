"""Pages are put at their targets in a pool, and nothing else changes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from rayserve_moe.kernels.operations import Kernels
from rayserve_moe.kernels.table import CPU, CPU_NATIVE
from tests.support.kernels.native_kernels import need_native_kernels

NUM_PAGES, PAGE = 11, (4, 2, 6)
TARGETS = np.array([7, NUM_PAGES, 0, 3], np.int32)
"""The second target is beyond the pool."""


def put(kernels: Kernels, pool: np.ndarray, pages: np.ndarray) -> jax.Array:
    """Put pages at TARGETS of a donated pool."""
    if kernels is CPU_NATIVE:
        need_native_kernels()
    return jax.jit(kernels.pool.put_pages, donate_argnums=0)(jnp.asarray(pool), jnp.asarray(pages), TARGETS)


@pytest.mark.parametrize("shape", [PAGE, (5,)], ids=["pages", "entries"])
@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [(CPU, np.float32), (CPU, np.uint16), (CPU_NATIVE, ml_dtypes.bfloat16), (CPU_NATIVE, np.float32)],
    ids=["xla-float32", "xla-uint16", "native-bfloat16", "native-float32"],
)
def test_pages_are_put_at_their_targets(kernels: Kernels, dtype: type, shape: tuple[int, ...]):
    generator = np.random.default_rng(1)
    pool, pages = (generator.integers(0, 200, (count, *shape)).astype(dtype) for count in (NUM_PAGES, len(TARGETS)))
    expected = pool.copy()
    for page, target in zip(pages, TARGETS, strict=True):
        if target < NUM_PAGES:
            expected[target] = page
    np.testing.assert_array_equal(put(kernels, pool, pages), expected)


def test_the_native_kernel_converts_no_pool():
    need_native_kernels()
    pool, pages = jnp.zeros((NUM_PAGES, *PAGE), jnp.bfloat16), jnp.ones((len(TARGETS), *PAGE), jnp.bfloat16)
    ours, theirs = (
        jax.jit(kernels.pool.put_pages, donate_argnums=0).lower(pool, pages, TARGETS).compile().as_text()
        for kernels in (CPU_NATIVE, CPU)
    )
    wide = f"f32[{NUM_PAGES},"
    assert wide not in ours
    assert wide in theirs, "it would be seen"


@pytest.mark.parametrize(
    ("num_pages", "shape", "message"),
    [(3, PAGE, "each row that is put has a place"), (4, PAGE[1:], "rows are as long as those of the pool")],
)
def test_the_native_kernel_refuses_pages_that_do_not_fit(num_pages: int, shape: tuple[int, ...], message: str):
    pages = np.zeros((num_pages, *shape), ml_dtypes.bfloat16)
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(put(CPU_NATIVE, np.zeros((NUM_PAGES, *PAGE), ml_dtypes.bfloat16), pages))
