"""What the TPU compiler says about the order of its own products, and that blocks of rows fix it."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from rayserve_moe.kernels.reference.layers import project
from rayserve_moe.kernels.row_blocks import in_blocks
from rayserve_moe.tools.row_sums import compared, products_of
from tests.compile.topologies import compile_for, text_of

WIDTH, WORDS = 2048, 18992
SIZES = (32, 256)
"""A head of so many words is turned around for many rows: another emitter multiplies the words by the rows."""


def of_rows(rows, matrix, *, blocks: bool):
    multiply = partial(project, weight=matrix)
    return in_blocks(multiply, rows) if blocks else multiply(rows)


def compared_sizes(*, blocks: bool):
    matrix = jax.ShapeDtypeStruct((WIDTH, WORDS), jnp.bfloat16)
    rows = {f"rows {size}": jax.ShapeDtypeStruct((size, WIDTH), jnp.bfloat16) for size in SIZES}
    texts = {
        name: text_of(compile_for("v6e", partial(of_rows, blocks=blocks), one, matrix)) for name, one in rows.items()
    }
    sums = {name: [*products_of(text)] for name, text in texts.items()}
    assert all(sums.values()), "every program has the product"
    return compared(sums)


def test_a_product_that_the_compiler_turns_around_is_found():
    (found,) = compared_sizes(blocks=False)
    assert "project" in found.line
    assert sorted(found.orders.values()) == [("rows 256",), ("rows 32",)]
    assert all(order.startswith(f"windows of {WIDTH}, Emit") for order in found.orders)


def test_a_product_in_blocks_of_rows_has_one_order():
    assert compared_sizes(blocks=True) == []
