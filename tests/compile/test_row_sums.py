"""Programs compiled for TPUs name the order of XLA's products and sums, and blocks of rows fix that order."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec

from rayserve_moe.execution.programs.specs import programs_of
from rayserve_moe.kernels.invariant import in_tpu_blocks, masses_in_rows
from rayserve_moe.kernels.reference import layers
from rayserve_moe.kernels.reference.layers import project
from rayserve_moe.kernels.row_blocks import in_blocks
from rayserve_moe.tools.hlo_text import ProgramText
from rayserve_moe.tools.row_sums import PRODUCT, compared, products_of, reductions_of, traced_sums
from rayserve_moe.tools.served_cases import case_of_model, lay_out
from tests.compile.topologies import compile_for, mesh_of_one, text_of

WIDTH, WORDS = 2048, 18992
SIZES = (32, 256)
"""Size of a head for which XLA swaps the operands at many rows, and so uses another emitter."""


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


@pytest.mark.slow
def test_a_product_that_the_compiler_turns_around_is_found():
    (found,) = compared_sizes(blocks=False)
    assert "project" in found.line
    assert sorted(found.orders.values()) == [("rows 256",), ("rows 32",)]
    assert all(order.startswith(f"windows of {WIDTH}, Emit") for order in found.orders)


def test_a_product_in_blocks_of_rows_has_one_order():
    assert compared_sizes(blocks=True) == []


LAYOUTS = {"in rows": (0, 1), "in columns": (1, 0)}
"""Orders of dimensions of an array in memory, from the one that varies slowest."""


def test_a_sum_over_an_array_in_another_layout_is_found():
    """XLA adds words up in windows of an array as it lies in memory."""
    masses = partial(layers.masses_of, num_words=jnp.int32(WORDS))
    (found,) = compared_layouts(partial(in_tpu_blocks, lambda rows: masses(*rows)))
    assert "masses_of" in found.line
    assert sorted(found.orders.values()) == [("in columns",), ("in rows",)]


def test_masses_are_added_up_in_one_order_for_any_layout():
    assert compared_layouts(lambda rows: masses_in_rows(*rows, jnp.int32(WORDS))) == []


def compared_layouts(function):
    sums = {name: [*reductions_of(of_layout(function, order))] for name, order in LAYOUTS.items()}
    assert all(sums.values()), "every program has the sum"
    return compared(sums)


def of_layout(function, order: tuple[int, int]) -> ProgramText:
    """Return a program of 128 rows of logits with this order of dimensions."""
    alone = NamedSharding(mesh_of_one("v6e"), PartitionSpec())
    logits, temperatures = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((128, WORDS), (128,)))
    with jax.set_mesh(mesh_of_one("v6e")):
        placed = jax.jit(function, in_shardings=((Format(Layout(order), alone), alone),))
        return text_of(placed.lower((logits, temperatures)).compile())


BY_SIZE = {
    "qwen3-30b-a3b": {
        "experts/routing.py",
        "kernels/reference/layers.py",
        "kernels/tpu/add_norm.py",
        "kernels/tpu/rotary_heads.py",
        "kernels/tpu/streamed_heads.py",
        "kernels/tpu/top_experts.py",
    },
    "gpt-oss-20b": {
        "experts/routing.py",
        "kernels/reference/expert_products.py",
        "kernels/reference/layers.py",
        "kernels/tpu/add_norm.py",
    },
}
"""Modules whose sums differ between steps of 16 and of 1,024 tokens on TPUs. Paged attention is not among them."""


@pytest.mark.slow
@pytest.mark.parametrize("model", BY_SIZE)
def test_sums_of_tpus_that_depend_on_the_size_of_a_step_are_named(model):
    """TPUs compute these sums by other kernels with `invariant_products`."""
    served = lay_out(case_of_model(model, "v6e:2x4", num_layers=2, values={"max_model_len": 4096}))
    steps = [one for one in programs_of(served, num_pages=64) if one.name in ("decode_16", "prefill_1024")]
    sums = {step.name: traced_sums(step, served.config.plan) for step in steps}
    own = {name: [one for one in found if one.in_kernel or one.operation != PRODUCT] for name, found in sums.items()}
    assert {each.line.partition(":")[0] for each in compared(own)} == BY_SIZE[model]
