"""The kernels around attention and experts compile for every chip, at the sizes that are served."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from rayserve_moe.experts.router_spec import RouterSpec
from rayserve_moe.experts.routing import gates_of
from rayserve_moe.kernels.reference.layers import take_rows
from rayserve_moe.kernels.table import TPU
from rayserve_moe.kernels.tpu.add_norm import add_and_norm
from rayserve_moe.kernels.tpu.top_experts import StackedRouter, choose_experts
from rayserve_moe.tools.hlo_report import kernels_of
from tests.compile.topologies import TOPOLOGY_OF_CHIP, compile_for, text_of

CHIP = pytest.mark.parametrize("chip", TOPOLOGY_OF_CHIP)
LAYERS, WIDTH = 48, 2048
LAYER = jax.ShapeDtypeStruct((), jnp.int32)


@pytest.mark.slow
@CHIP
@pytest.mark.parametrize("num_tokens", [2, 32, 256])
def test_a_router_with_its_choice_compiles(chip, num_tokens):
    spec = RouterSpec(128, 8, renormalize=True, score="sigmoid", logit_bias=True, selection_bias=True)
    matrix = jax.ShapeDtypeStruct((LAYERS, WIDTH, spec.num_experts), jnp.float32)
    biases = [jax.ShapeDtypeStruct((LAYERS, spec.num_experts), jnp.float32)] * 2
    hidden = jax.ShapeDtypeStruct((num_tokens, WIDTH), jnp.bfloat16)
    finish = partial(gates_of, router=spec)
    choose = partial(choose_experts, top_k=spec.top_k, score=spec.score, finish=finish)
    compiled = compile_for(chip, choose, hidden, StackedRouter(matrix, *biases, LAYER))
    assert kernels_of(text_of(compiled)) == {"top_experts": 1}
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * WIDTH * spec.num_experts, "no router is copied"


@pytest.mark.slow
@CHIP
@pytest.mark.parametrize("num_tokens", [2, 32, 256, 1040])
def test_a_sum_with_its_norm_compiles(chip, num_tokens):
    hidden, scales = (jax.ShapeDtypeStruct((rows, WIDTH), jnp.bfloat16) for rows in (num_tokens, LAYERS))

    def both(hidden, added, scales, layer):
        return add_and_norm(hidden, added, scales, layer=layer, eps=1e-6)

    compiled = compile_for(chip, both, hidden, hidden, scales, LAYER)
    assert kernels_of(text_of(compiled)) == {"add_norm": 1}


@pytest.mark.slow
@CHIP
def test_padded_tables_lie_by_rows(chip):
    """A sixteenth of gpt-oss' words; whose table, unpadded, XLA lays out by columns, and copies to look rows up."""
    width, words = 2880, 12568
    padded = width + -width % TPU.parameters.multiples["table_row"]
    ids = jax.ShapeDtypeStruct((256,), jnp.int32)
    for size, order in ((width, "0,1"), (padded, "1,0")):
        program = compile_for(chip, take_rows, jax.ShapeDtypeStruct((words, size), jnp.bfloat16), ids).as_text()
        layout = program.partition("entry_computation_layout={")[2].partition("->")[0]
        assert f"bf16[{words},{size}]{{{order}:" in layout
