"""What is read from an optimised program: copies where there are some, none where there are none, loops counted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.tools.hlo_report import Piece, collectives_of, copies_of, cycles_of
from rayserve_moe.tools.hlo_text import ArrayShape, read_program
from tests.compile.topologies import compile_for, text_of

# The experts of a layer are larger than VMEM: what is small goes there, and is no copy in HBM.
LAYERS, EXPERTS, WIDTH, INNER = 3, 64, 2048, 1024
EXPERT = Piece("experts", "bf16", (WIDTH, INNER), WIDTH * INNER)


def experts_in_turn(tokens, weights, sizes, *, as_scanned: bool):
    """A grouped product per layer, over weights that are scanned over, or over all of them with an offset."""

    def visit(tokens, layer):
        if as_scanned:
            weights_of_layer, _ = layer
            product = jax.lax.ragged_dot(tokens, weights_of_layer, sizes)
        else:
            own = jax.lax.dynamic_update_slice(jnp.zeros(LAYERS * EXPERTS, jnp.int32), sizes, (layer * EXPERTS,))
            product = jax.lax.ragged_dot(tokens, weights.reshape(-1, WIDTH, INNER), own)
        return jnp.concatenate([product, product], axis=1), None

    layers = (weights, jnp.arange(LAYERS)) if as_scanned else jnp.arange(LAYERS)
    return jax.lax.scan(visit, tokens, layers)[0]


def program_of(*, as_scanned: bool):
    shapes = (
        jax.ShapeDtypeStruct((64, WIDTH), jnp.bfloat16),
        jax.ShapeDtypeStruct((LAYERS, EXPERTS, WIDTH, INNER), jnp.bfloat16),
        jax.ShapeDtypeStruct((EXPERTS,), np.int32),
    )
    return text_of(compile_for("v6e", lambda *arrays: experts_in_turn(*arrays, as_scanned=as_scanned), *shapes))


def test_weights_that_are_scanned_over_are_copied_once_per_layer():
    copies = copies_of(program_of(as_scanned=True), [EXPERT])
    assert copies and {copy.kind for copy in copies} == {"experts"}
    layer_bytes = EXPERTS * WIDTH * INNER * 2
    assert sum(copy.num_bytes * copy.times for copy in copies) >= LAYERS * layer_bytes


def test_weights_that_are_read_where_they_lie_are_not_copied():
    assert copies_of(program_of(as_scanned=False), [EXPERT]) == []


def test_what_is_computed_from_a_weight_is_no_copy_of_it():
    shape = jax.ShapeDtypeStruct((LAYERS, EXPERTS, WIDTH, INNER), jnp.bfloat16)
    taken = text_of(compile_for("v6e", lambda array: array[1], shape))
    assert [copy.times for copy in copies_of(taken, [EXPERT])] == [1]
    added = text_of(compile_for("v6e", lambda array: array[1] + 1, shape))
    assert copies_of(added, [EXPERT]) == []


def test_activations_of_a_weights_shape_are_no_copies():
    tokens = jax.ShapeDtypeStruct((WIDTH, INNER), jnp.bfloat16)
    turned = compile_for(
        "v6e", lambda tokens: (tokens * 2).reshape(-1, 2, INNER)[:, ::-1].reshape(WIDTH, INNER), tokens
    )
    assert copies_of(text_of(turned), [EXPERT]) == []


MASKED = f"""\
HloModule masked, is_scheduled=true

%fused (row: bf16[1,{INNER}], mask: pred[{WIDTH},{INNER}]) -> bf16[{WIDTH},{INNER}] {{
  %row = bf16[1,{INNER}]{{1,0}} parameter(0)
  %mask = pred[{WIDTH},{INNER}]{{1,0}} parameter(1)
  %everywhere = bf16[{WIDTH},{INNER}]{{1,0}} broadcast(%row), dimensions={{}}
  ROOT %chosen = bf16[{WIDTH},{INNER}]{{1,0}} select(%mask, %everywhere, %everywhere)
}}

ENTRY %main (table: bf16[1,{INNER}], mask: pred[{WIDTH},{INNER}]) -> bf16[{WIDTH},{INNER}] {{
  %table = bf16[1,{INNER}]{{1,0}} parameter(0)
  %mask.1 = pred[{WIDTH},{INNER}]{{1,0}} parameter(1)
  ROOT %masked = bf16[{WIDTH},{INNER}]{{1,0}} fusion(%table, %mask.1), kind=kLoop, calls=%fused
}}
"""


def test_what_is_taken_from_an_argument_without_such_a_piece_is_no_copy():
    """Masked rows of a small table, as many as a weight has."""
    assert copies_of(read_program(MASKED), [EXPERT]) == []
    from_a_weight = MASKED.replace(f"table: bf16[1,{INNER}]", f"table: bf16[{WIDTH},{INNER}]")
    from_a_weight = from_a_weight.replace(f"%table = bf16[1,{INNER}]", f"%table = bf16[{WIDTH},{INNER}]")
    assert len(copies_of(read_program(from_a_weight), [EXPERT])) == 1


PROGRAM = """\
HloModule small, is_scheduled=true

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[], f32[4]{0}) parameter(0)
  %x = f32[4]{0:T(128)} get-tuple-element(%p), index=1
  %sum = f32[4]{0:T(128)S(1)} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add
  %moved = f32[4]{0:T(128)} copy(%x), backend_config={"estimated_cycles":"100"}
  ROOT %out = (s32[], f32[4]{0}) tuple(%moved, %moved)
}

%condition (p.1: (s32[], f32[4])) -> pred[] {
  %p.1 = (s32[], f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p.1), index=0
  %limit = s32[] constant(5)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}

%open_condition (p.2: (s32[], f32[4])) -> pred[] {
  %p.2 = (s32[], f32[4]{0}) parameter(0)
  %i.2 = s32[] get-tuple-element(%p.2), index=0
  %j.2 = s32[] get-tuple-element(%p.2), index=0
  ROOT %less.2 = pred[] compare(%i.2, %j.2), direction=LT
}

ENTRY %main (a: (s32[], f32[4])) -> (s32[], f32[4]) {
  %a = (s32[], f32[4]{0}) parameter(0)
  %start = (f32[2]{0}, f32[4]{0}) all-gather-start(%a), replica_groups=[2,2]<=[4], dimensions={0}
  %done = f32[4]{0} all-gather-done(%start)
  %loop = (s32[], f32[4]{0}) while(%a), condition=%condition, body=%body
  %unsure = fusion(%a), kind=kLoop, calls=%condition, backend_config={"estimated_cycles":"9223372036854775807"}
  ROOT %other = (s32[], f32[4]{0}) while(%loop), condition=%open_condition, body=%body
}
"""


def test_loops_multiply_what_they_run_and_open_ones_count_once():
    program = read_program(PROGRAM)
    found = {(part.operation, part.times, part.is_least): part for part in collectives_of(program)}
    assert set(found) == {("all-gather", 1, False), ("all-reduce", 5, False), ("all-reduce", 1, True)}
    assert {part.group_size for part in found.values()} == {2}
    assert {part.num_bytes for part in found.values()} == {16}
    assert cycles_of(program) == (200, 600)


def test_a_result_in_another_memory_is_no_copy_in_hbm():
    pieces = [Piece("weight", "f32", (4,), 4)]
    assert [copy.times for copy in copies_of(read_program(PROGRAM), pieces)] == [5, 1]
    computed = PROGRAM.replace("copy(%x)", "copy(%sum)")
    assert copies_of(read_program(computed), pieces) == []
    written = [Piece("pool", "f32", (4,), 4, is_written=True)]
    assert [copy.times for copy in copies_of(read_program(computed), written)] == [5, 1]
    in_vmem = PROGRAM.replace("%moved = f32[4]{0:T(128)}", "%moved = f32[4]{0:T(128)S(1)}")
    assert copies_of(read_program(in_vmem), pieces) == []


MOVED = """\
HloModule moved, is_scheduled=true

%cut (pool.1: f32[9,4], at.1: s32[]) -> f32[3,4] {
  %pool.1 = f32[9,4]{1,0} parameter(0)
  %at.1 = s32[] parameter(1)
  ROOT %some = f32[3,4]{1,0} dynamic-slice(%pool.1, %at.1, %at.1), dynamic_slice_sizes={3,4}
}

%twice (pool.2: f32[9,4], at.2: s32[]) -> f32[3,4] {
  %pool.2 = f32[9,4]{1,0} parameter(0)
  %at.2 = s32[] parameter(1)
  %part = f32[3,4]{1,0} dynamic-slice(%pool.2, %at.2, %at.2), dynamic_slice_sizes={3,4}
  ROOT %doubled = f32[3,4]{1,0} add(%part, %part)
}

ENTRY %main (pool: f32[9,4], tokens: f32[12], long: f32[40], at: s32[]) -> (f32[3,4], f32[3,4], f32[9,4]) {
  %pool = f32[9,4]{1,0} parameter(0)
  %tokens = f32[12]{0} parameter(1)
  %long = f32[40]{0} parameter(3)
  %at = s32[] parameter(2)
  %many = f32[10,4]{1,0} reshape(%long)
  %kernel.1 = (f32[3,4]{1,0}, f32[9,4]{1,0}) custom-call(%pool), custom_call_target="tpu_custom_call"
  %out = f32[3,4]{1,0} get-tuple-element(%kernel.1), index=0
  %after = f32[9,4]{1,0} get-tuple-element(%kernel.1), index=1
  %state = f32[3,4]{1,0} fusion(%after, %at), kind=kLoop, calls=%twice
  %rows = f32[3,4]{1,0} reshape(%tokens)
  %computed = f32[3,4]{0,1} copy(%state)
  %turned = f32[3,4]{0,1} copy(%out)
  %layer = f32[3,4]{1,0} fusion(%after, %at), kind=kLoop, calls=%cut
  %again = f32[3,4]{0,1} copy(%layer)
  %whole = f32[9,4]{0,1} copy(%pool)
  ROOT %all = (f32[3,4]{0,1}, f32[3,4]{0,1}, f32[9,4]{0,1}) tuple(%turned, %again, %whole)
}
"""


def test_tokens_of_the_shape_of_a_ring_are_no_copy_of_it():
    """A copy of a part of a pool comes from the pool, be it in two steps, or from what a kernel wrote to.

    What is computed from the pool, or returned beside it, is none, nor are tokens of a larger array than the pool.
    """
    ring = Piece("ring", "f32", (4,), 9, is_written=True, pool_elements=36)
    assert [copy.instruction for copy in copies_of(read_program(MOVED), [ring])] == ["layer", "again", "whole"]
    by_size = Piece("ring", "f32", (4,), 9, is_written=True)
    assert {"rows", "turned", "computed", "many"} <= {
        copy.instruction for copy in copies_of(read_program(MOVED), [by_size])
    }


OTHER_POOL = """
HloModule two_pools

ENTRY %main (ring: f32[9,4], inputs: f32[50,4], at: s32[]) -> (f32[3,4], f32[3,4]) {
  %ring = f32[9,4]{1,0} parameter(0)
  %inputs = f32[50,4]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %of_ring = f32[3,4]{1,0} dynamic-slice(%ring, %at, %at), dynamic_slice_sizes={3,4}
  %of_inputs = f32[3,4]{1,0} dynamic-slice(%inputs, %at, %at), dynamic_slice_sizes={3,4}
  ROOT %all = (f32[3,4]{1,0}, f32[3,4]{1,0}) tuple(%of_ring, %of_inputs)
}
"""


def test_a_few_rows_of_a_larger_pool_are_no_copy_of_a_smaller_one():
    ring = Piece("ring", "f32", (4,), 9, is_written=True, pool_elements=36)
    assert [copy.instruction for copy in copies_of(read_program(OTHER_POOL), [ring])] == ["of_ring"]
    inputs = Piece("inputs", "f32", (4,), 9, is_written=True, pool_elements=200)
    assert [copy.instruction for copy in copies_of(read_program(OTHER_POOL), [inputs])] == ["of_inputs"]
    for pieces in ([ring, inputs], [inputs, ring]):
        found = copies_of(read_program(OTHER_POOL), pieces)
        assert {(copy.kind, copy.instruction) for copy in found} == {("ring", "of_ring"), ("inputs", "of_inputs")}


def test_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="no entry computation"):
        read_program("HloModule nothing")


@pytest.mark.parametrize(
    ("dtype", "num_bytes"), [("bf16", 12), ("f8e4m3fn", 6), ("s32", 24), ("pred", 6), ("u4", 3), ("token", 0)]
)
def test_bytes_follow_from_the_name_of_a_type(dtype, num_bytes):
    assert ArrayShape(dtype, (2, 3)).num_bytes == num_bytes
