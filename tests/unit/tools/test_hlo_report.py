"""What is read from a program's text: activations that are only moved, and how many operations a layer has."""

from __future__ import annotations

import pytest

from rayserve_moe.tools.hlo_report import Piece, activation_copies, ops_per_layer
from rayserve_moe.tools.hlo_text import ProgramText, read_program

COST = 'backend_config={"estimated_cycles":"300"}'


def program(*lines: str, scope: str = "attention", fused: str = "") -> ProgramText:
    """A loop of 48 turns over `x`, f32[64,128], with `lines` in its body, whose operations are in a named scope."""
    of_scope = f'metadata={{op_name="jit(step)/shard_map/while/body/closed_call/{scope}/mul"}}, {COST}'
    body = "\n".join(f"  {line}, {of_scope}" for line in lines)
    return read_program(f"""HloModule step

%fused (a: f32[64,128], b: f32[]) -> f32[64,128] {{
  %a = f32[64,128]{{1,0}} parameter(0)
  %b = f32[] parameter(1)
  {fused}
}}

%body (state: (s32[], f32[64,128])) -> (s32[], f32[64,128]) {{
  %state = (s32[], f32[64,128]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[64,128]{{1,0}} get-tuple-element(%state), index=1
{body}
  ROOT %next = (s32[], f32[64,128]{{1,0}}) tuple(%i, %x)
}}

%cond (state: (s32[], f32[64,128])) -> pred[] {{
  %state = (s32[], f32[64,128]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %limit = s32[] constant(48)
  ROOT %goes_on = pred[] compare(%i, %limit), direction=LT
}}

ENTRY %main (x: f32[64,128]) -> (s32[], f32[64,128]) {{
  %x = f32[64,128]{{1,0}} parameter(0)
  %zero = s32[] constant(0)
  %first = (s32[], f32[64,128]{{1,0}}) tuple(%zero, %x)
  ROOT %loop = (s32[], f32[64,128]{{1,0}}) while(%first), condition=%cond, body=%body
}}
""")


COPY = "%copy.1 = f32[64,128]{0,1:T(8,128)} copy(%x)"


@pytest.mark.parametrize("space", ["", "S(1)"], ids=["hbm", "vmem"])
def test_an_activation_in_another_layout_is_a_copy_wherever_it_lies(space):
    (copy,) = activation_copies(program(COPY.replace("(8,128)", "(8,128)" + space)), [])
    assert (copy.shape, copy.num_bytes, copy.times, copy.cycles) == ("f32[64,128]", 64 * 128 * 4, 48, 300)
    assert copy.block == "attention" and copy.is_in_hbm == (space == "")


@pytest.mark.parametrize(
    ("result", "is_copy"),
    [
        ("ROOT %t = f32[64,128]{0,1} copy(%a)", True),
        ("ROOT %t = f32[64,128]{1,0} reverse(%a), dimensions={0}", False),
        ("ROOT %t = f32[64,128]{1,0} multiply(%a, %a)", False),
        ("ROOT %t = f32[64,128]{1,0} convert(%a)", False),
        ("ROOT %t = f32[64,128]{1,0} select(%a, %a, %a)", False),
        ("ROOT %t = f32[128,128]{1,0} broadcast(%b), dimensions={}", False),
    ],
)
def test_a_fusion_is_a_copy_where_it_only_moves(result, is_copy):
    shape = "f32[128,128]" if "128,128" in result else "f32[64,128]"
    line = f"%fusion.1 = {shape}{{1,0}} fusion(%x, %i), kind=kLoop, calls=%fused"
    assert bool(activation_copies(program(line, fused=result), [])) == is_copy


def test_what_is_fetched_ahead_or_small_or_a_weight_is_no_copy_of_an_activation():
    start = "%copy-start.1 = (f32[64,128]{1,0:S(1)}, f32[64,128]{1,0}, u32[]) copy-start(%x)"
    done = "%copy-done.1 = f32[64,128]{1,0:S(1)} copy-done(%copy-start.1)"
    assert activation_copies(program(start, done), []) == []
    assert activation_copies(program("%copy.1 = f32[8,8]{0,1} copy(%x)"), []) == []
    assert activation_copies(program(COPY), [Piece("experts", "f32", (128, 64), 64 * 128)]) == []


def test_a_layer_has_the_operations_of_the_loop_that_attention_is_in():
    lines = COPY, "%add.1 = f32[64,128]{1,0} add(%x, %copy.1)"
    assert ops_per_layer(program(*lines)) == 2
    assert ops_per_layer(program(*lines, scope="sampling")) == 0


def test_a_block_is_what_jax_was_given_as_scopes():
    (copy,) = activation_copies(program(COPY, scope="token_probe/cond/branch_1_fun/head"), [])
    assert copy.block == "token_probe/head"
    bare = read_program("ENTRY %main (x: f32[2]) -> f32[2] {\n  ROOT %x = f32[2] parameter(0)\n}")
    assert bare.computations["main"][0].scope == ""
