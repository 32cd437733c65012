"""Sums of steps are compared by what decides their order; a product whose tile is free is found."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from rayserve_moe.config.load import settings_from
from rayserve_moe.decoding.log_probs import entropy_of
from rayserve_moe.execution import native_kernels
from rayserve_moe.execution.served_model import ServedModel, runner_settings, served_model
from rayserve_moe.kernels.reference import layers
from rayserve_moe.kernels.row_blocks import at_once, in_blocks
from rayserve_moe.kernels.table import CPU, CPU_INVARIANT
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.parallel.mesh import plan_for
from rayserve_moe.parallel.sharding import DATA
from rayserve_moe.parallel.vocabulary_part import VocabularyPart
from rayserve_moe.tools.row_sums import RowSum, compared, differences, sums_of
from tests.support.models.families import FAMILY_CASES, FamilyCase, config_of

WIDTH, INNER = 256, 128
SIZES = (4, 64, 96)
BY_DEFAULT = ("deepseek_v32-0", "qwen3_next-0")
CASES = [
    pytest.param(case, id=case.name, marks=() if case.name in BY_DEFAULT else pytest.mark.slow)
    for case in FAMILY_CASES
    if not case.variant
]
FREE = {
    "norm": {"norm": layers.rms_norm},
    "mlp": {"mlp": layers.gated_mlp},
    "attention": {"attention": CPU.attention},
    "router": {"experts": replace(CPU_INVARIANT.experts, router_scores=layers.router_scores)},
    "experts": {"experts": replace(CPU_INVARIANT.experts, results=CPU.experts.results, sums=CPU.experts.sums)},
    "head": {"head": CPU.head},
    "sampling": {"sampling": CPU.sampling},
    "sum and norm": {"add_norm": CPU.add_norm},
    "rows": {"by_rows": at_once},
}
"""Tables with one operation that chooses its tile by the rows of a step."""


def found_between(function, *sizes, num_devices=1):
    shapes = {f"rows {n}": jax.ShapeDtypeStruct((n, WIDTH), jnp.float32) for n in sizes or SIZES}
    traced = jax.make_jaxpr(function, axis_env=[(DATA, num_devices)])
    return compared({name: sums_of(traced(shape).jaxpr) for name, shape in shapes.items()})


def served_by(case: FamilyCase, **values) -> ServedModel:
    settings = {"max_running_requests": 16, "precompile_bs_paddings": [1, 4, 16], "max_step_tokens": 96, **values}
    found = settings_from({"model_path": "none", "cpu_kernels": "off", "invariant_products": "on", **settings})
    spec, plan = spec_from_config(config_of(case)), plan_for(jax.devices()[:1])
    return served_model(spec, plan, settings=runner_settings(found, found.model))


def test_a_product_with_a_free_tile_is_found_and_one_in_blocks_is_not():
    matrix = jnp.zeros((WIDTH, INNER))
    (found,) = found_between(lambda rows: layers.rms_norm(rows, matrix[:, 0], eps=1e-6), 4, 64)
    assert found.operation == "reduce_sum" and found.line.startswith("kernels/reference/layers.py:")
    assert list(found.orders.values()) == [("rows 4",), ("rows 64",)]
    assert found_between(partial(in_blocks, lambda rows: layers.rms_norm(rows, matrix[:, 0], eps=1e-6))) == []


@pytest.mark.parametrize("num_devices", [1, 4])
def test_entropies_are_added_up_in_blocks_and_in_the_order_of_devices(num_devices):
    part = VocabularyPart(num_devices * WIDTH, WIDTH, (DATA,) if num_devices > 1 else (), num_devices)
    assert found_between(partial(entropy_of, part=part), num_devices=num_devices) == []


def test_a_sum_over_devices_by_a_collective_is_found():
    (found,) = found_between(lambda rows: jax.lax.psum(rows[:, 0], DATA), num_devices=4)
    assert found.operation == "psum"


def test_a_sum_that_only_some_steps_have_is_found():
    def product(rows):
        return layers.rms_norm(rows, rows[0], eps=1e-6) if len(rows) < 50 else rows

    (found,) = found_between(product, 4, 64)
    assert found.orders[""] == ("rows 64",)
    assert "none in rows 64" in str(found)


def multiply_by_parts(rows, *, part: int):
    """A kernel that adds up parts of the width."""

    def kernel(row_ref, matrix_ref, out_ref):
        out_ref[...] = layers.project(row_ref[...], matrix_ref[...], name="")

    whole = pl.BlockSpec((len(rows), part), lambda k: (0, k))
    return pl.pallas_call(
        kernel,
        grid=(WIDTH // part,),
        in_specs=[whole, pl.BlockSpec((part, INNER), lambda k: (k, 0))],
        out_specs=pl.BlockSpec((len(rows), INNER), lambda _: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((len(rows), INNER), rows.dtype),
        interpret=True,
    )(rows, jnp.zeros((WIDTH, INNER)))


def test_of_a_kernel_its_block_over_the_summed_width_counts_and_its_rows_do_not():
    assert found_between(partial(multiply_by_parts, part=128)) == []
    (found,) = found_between(lambda rows: multiply_by_parts(rows, part=128 if len(rows) < 50 else 256), 4, 64)
    assert found.operation == "dot_general"
    assert len(found.orders) == 2


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES)
def test_steps_of_every_family_add_up_rows_in_one_order(case: FamilyCase):
    assert list(map(str, differences(served_by(case)))) == []


@pytest.mark.sampled(5)
@pytest.mark.parametrize("planted", FREE)
def test_a_planted_free_tile_is_found(planted: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(native_kernels.INVARIANT, "cpu", replace(CPU_INVARIANT, **FREE[planted]))
    name = "qwen3_moe-0" if planted == "rows" else "qwen3_moe-1"  # one divides weights by their sum, one is dense
    (case,) = (case for case in FAMILY_CASES if case.name == name)
    assert differences(served_by(case), names=("decode_4", "decode_16")) != []


def test_steps_without_the_setting_differ():
    (case,) = (case for case in FAMILY_CASES if case.name == "qwen3_moe-1")
    served = served_by(case, invariant_products="off")
    assert len(differences(served, names=("decode_4", "decode_16"))) > 5


def test_programs_that_score_have_some_of_the_sums_of_steps():
    step, other = RowSum("a.py:1 norm", "reduce_sum", "(256, 8)"), RowSum("a.py:1 norm", "reduce_sum", "(256, 16)")
    own = RowSum("a.py:9 score", "reduce_sum", "(128, 8)")
    steps = {"small": [step, other], "large": [step, other]}
    assert compared(steps | {"probe": [step, own], "gather": [own]}, parts={"probe", "gather"}) == []
    assert len(compared(steps | {"probe": [replace(step, order="(128, 8)")]}, parts={"probe"})) == 1
    assert len(compared(steps | {"probe": [own], "gather": [replace(own, order="8")]}, parts={"probe", "gather"})) == 1
    assert len(compared({"small": [step, other], "large": [step]})) == 1, "a step lacks a sum"
