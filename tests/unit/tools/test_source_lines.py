"""Which line of source an op was traced from: the innermost frame of the package."""

from __future__ import annotations

from rayserve_moe.tools.hlo_text import read_program, source_lines

TEXT = """\
HloModule traced, is_scheduled=true

FileNames
1 "/somewhere/src/rayserve_moe/model/transformer.py"
2 "/somewhere/site-packages/jax/_src/lax/lax.py"

FunctionNames
1 "forward"
2 "add"

FileLocations
1 {file_name_id=1 function_name_id=1 line=70 end_line=70 column=25 end_column=25}
2 {file_name_id=2 function_name_id=2 line=9 end_line=9 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=2}

%inner (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %doubled = f32[8]{0} add(%a, %a), metadata={op_name="jit(f)/add" stack_frame_id=2}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %known = f32[8]{0} fusion(%x), kind=kLoop, calls=%inner, metadata={op_name="jit(f)/mul" stack_frame_id=3}
  ROOT %unknown = f32[8]{0} copy(%known)
}
"""


def test_a_frame_has_the_line_of_ours_that_led_to_it():
    assert source_lines(TEXT) == dict.fromkeys((1, 2), "model/transformer.py:70 forward")
    assert source_lines("HloModule without tables") == {}


def test_a_fusion_without_a_line_has_that_of_its_parts():
    program = read_program(TEXT)
    lines = {one.name: program.source_of(one) for one in program.computations["main"]}
    assert lines == {"x": "", "known": "model/transformer.py:70 forward", "unknown": ""}
