"""One formula over a program's ops: trips of loops, what is hidden, cheapest branches, layers not compiled."""

from __future__ import annotations

import base64
from dataclasses import replace

import pytest

from rayserve_moe.tools.estimate.bundles import Loop, Schedule
from rayserve_moe.tools.estimate.chips import CHIPS, OVERHEAD_S
from rayserve_moe.tools.estimate.dump import Schedules
from rayserve_moe.tools.estimate.kernel_work import KernelWork, work_of
from rayserve_moe.tools.estimate.links import Slice
from rayserve_moe.tools.estimate.program_ops import Block, Op, ProgramReader, divides_over_cores, scope_of
from rayserve_moe.tools.estimate.rates import (
    AT_PEAK,
    ATTENTION,
    COLLECTIVE,
    COPY,
    KERNEL,
    PRODUCT,
    PROMPT_ATTENTION,
    calibrated,
)
from rayserve_moe.tools.estimate.step_time import Estimate, OpPrice, Pricing, estimate
from rayserve_moe.tools.estimate.step_work import AttentionSizes, AttentionWork, RecurrentWork, StepWork
from rayserve_moe.tools.hlo_text import Instruction, read_program

V6E = CHIPS["v6e"]
WORK = StepWork(
    used_slots=4.0,
    expert_rows=100.0,
    attention={AttentionSizes(2, 4, 128): AttentionWork(2, 6, 6144, 12)},
    flops=1e9,
    hbm_bytes=2e6,
)
BUNDLES = 100


def schedule(num_bundles: int = BUNDLES, copy: str = "") -> str:
    lines = [f"  {address:#5x}   :  {{}}" if address else "     0   :  {}" for address in range(num_bundles)]
    if copy:
        lines[-1] = lines[-1].replace("{}", f"{{ %8 = dma.hbm_to_vmem [thread:$0] /*size_in_granules=*/{copy}, x }}")
    return "\n".join(lines)


PROGRAM = """\
HloModule step, is_scheduled=true

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %next = s32[] add(%x, %x)
  %first = f32[8]{0} fusion(%x), kind=kLoop, calls=%inner, \
metadata={op_name="jit(run)/while/body/closed_call/attention/projections/dot"}
  %twin = f32[8]{0} fusion(%first), kind=kLoop, calls=%inner.2, metadata={op_name="jit(run)/while/body/router/add"}
  %sum = f32[8]{0} all-reduce(%twin), replica_groups={{0,1}}, to_apply=%add, metadata={op_name="jit(run)/combine/psum"}
  ROOT %out = (s32[], f32[8]{0}) tuple(%next, %sum)
}

%condition (p.1: (s32[], f32[8])) -> pred[] {
  %p.1 = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p.1), index=0
  %limit = s32[] constant(3)
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}

%inner (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %doubled = f32[8]{0} add(%a, %a)
}

%inner.2 (a.2: f32[8]) -> f32[8] {
  %a.2 = f32[8]{0} parameter(0)
  ROOT %doubled.2 = f32[8]{0} add(%a.2, %a.2)
}

%other (o: f32[8]) -> f32[8] {
  %o = f32[8]{0} parameter(0)
  ROOT %squared = f32[8]{0} multiply(%o, %o)
}

%cheap (c: f32[8]) -> f32[8] {
  ROOT %c = f32[8]{0} parameter(0)
}

%dear (d: f32[8]) -> f32[8] {
  %d = f32[8]{0} parameter(0)
  ROOT %worked = f32[8]{0} fusion(%d), kind=kLoop, calls=%other
}

ENTRY %main (arg: (s32[], f32[8]), big: f32[1024,1024], chosen: pred[]) -> f32[8] {
  %arg = (s32[], f32[8]{0}) parameter(0)
  %big = f32[1024,1024]{1,0} parameter(1)
  %chosen = pred[] parameter(2)
  %fetch = (f32[1024,1024]{1,0:S(1)}, f32[1024,1024]{1,0}, u32[]) copy-start(%big)
  %beside = f32[8]{0} fusion(%arg), kind=kLoop, calls=%other, metadata={op_name="jit(run)/head/SD,VD->SV/dot"}
  %fetched = f32[1024,1024]{1,0:S(1)} copy-done(%fetch)
  %layers = (s32[], f32[8]{0}) while(%arg), condition=%condition, body=%body, \
metadata={op_name="jit(run)/shard_map/while"}
  %y = f32[8]{0} get-tuple-element(%layers), index=1
  ROOT %end = f32[8]{0} conditional(%chosen, %y, %y), true_computation=%dear, false_computation=%cheap
}
"""
SCHEDULES = {"first": schedule(copy="1000"), "beside": schedule(500), "worked": schedule(7)}


def read(
    text: str = PROGRAM,
    schedules: dict[str, str] | None = None,
    *,
    chip: str = "v6e",
    missing_layers: int = 0,
    work: StepWork = WORK,
    num_expert_layers: int = 1,
) -> Estimate:
    program, figures = read_program(text), CHIPS[chip]
    place = Slice(figures, ((0, 0, 0), (1, 0, 0)))
    dumped = Schedules(program, SCHEDULES if schedules is None else schedules)
    reader = ProgramReader(program, dumped, place, work, num_expert_layers)
    return estimate(reader.tree(), chip=figures, work=work, missing_layers=missing_layers)


def op_named(found: Estimate, name: str) -> Op:
    return next(one.op for one in found.ops if one.op.name == name)


def test_an_op_costs_its_bundles_or_its_bytes_and_the_overhead():
    found = read()
    costs = {one.op.name: one for one in found.ops}
    in_memory, in_core = 1000 * 32 / V6E.hbm_bytes, BUNDLES / V6E.clock_hz
    assert in_core > in_memory
    assert costs["first"].peak_seconds == pytest.approx(in_core + OVERHEAD_S)
    slower = read(schedules=SCHEDULES | {"first": schedule(copy="100000")})
    (first,) = (one for one in slower.ops if one.op.name == "first")
    assert first.peak_seconds == pytest.approx(100000 * 32 / V6E.hbm_bytes + OVERHEAD_S)
    assert first.seconds == pytest.approx(100000 * 32 / V6E.hbm_bytes / V6E.hbm_share + OVERHEAD_S)


def test_ops_that_are_alike_share_a_schedule_and_scalars_are_no_ops():
    found = read()
    assert op_named(found, "twin").bundles == BUNDLES
    assert "next" not in {one.op.name for one in found.ops}


def test_ops_are_named_by_their_scope():
    found = read()
    scopes = {one.op.name: one.op.scope for one in found.ops}
    assert scopes["first"] == "attention/projections" and scopes["twin"] == "router" and scopes["sum"] == "combine"
    assert set(found.by_scope()) == {"attention/projections", "router", "combine"}


def test_a_loop_over_layers_is_scaled_to_the_model():
    compiled, whole = read(), read(missing_layers=45)
    assert compiled.layer == whole.layer and whole.layer.num_ops == 3
    assert whole.step.seconds - compiled.step.seconds == pytest.approx(45 * whole.layer.seconds)
    flat = PROGRAM.replace(
        'metadata={op_name="jit(run)/shard_map/while"}', 'metadata={op_name="jit(run)/sampling/while"}'
    )
    with pytest.raises(ValueError, match="requires one loop over layers"):
        read(flat, missing_layers=45)
    assert read(flat).step.seconds == pytest.approx(compiled.step.seconds), "three trips all the same"


def test_two_loops_over_layers_are_one_average_layer():
    twice = PROGRAM.replace(
        "  %y = f32[8]",
        '  %more = (s32[], f32[8]{0}) while(%layers), condition=%condition, body=%body.2, metadata={op_name="while"}\n'
        "  %y = f32[8]",
    ).replace(
        "%condition (p.1",
        "%body.2 (q: (s32[], f32[8])) -> (s32[], f32[8]) {\n"
        "  %q = (s32[], f32[8]{0}) parameter(0)\n"
        "  %z = f32[8]{0} get-tuple-element(%q), index=1\n"
        "  %alone = f32[8]{0} fusion(%z), kind=kLoop, calls=%inner\n"
        "  ROOT %out.2 = (s32[], f32[8]{0}) tuple(%z, %alone)\n"
        "}\n\n%condition (p.1",
    )
    one, both = read(), read(twice)
    (alone,) = (found for found in both.ops if found.op.name == "alone")
    assert alone.times == 0.5 and both.layer.num_ops == (3 + 1) / 2
    assert both.step.seconds - one.step.seconds == pytest.approx(3 * alone.seconds)
    with pytest.raises(ValueError, match="the program has 2"):
        read(twice, missing_layers=1)


def test_of_a_conditional_the_cheapest_branch_counts():
    assert "worked" not in {one.op.name for one in read().ops}
    only = PROGRAM.replace("false_computation=%cheap", "false_computation=%dear")
    assert "worked" in {one.op.name for one in read(only).ops}


def test_what_was_started_earlier_costs_what_is_not_hidden():
    found = read()
    transfer = 4 * 1024 * 1024 / V6E.hbm_bytes
    (fetch,) = (one for one in found.ops if one.op.name == "fetch")
    assert fetch.peak_seconds == pytest.approx(transfer - 500 / V6E.clock_hz), "the overhead of one hides the other's"
    assert fetch.seconds == pytest.approx(transfer / V6E.hbm_share - 500 / V6E.clock_hz)
    hidden = read(schedules=SCHEDULES | {"beside": schedule(6000)})
    (fetch,) = (one for one in hidden.ops if one.op.name == "fetch")
    assert fetch.seconds == 0
    # Beside an op that waits for memory itself nothing is hidden from memory.
    busy = read(schedules=SCHEDULES | {"beside": schedule(5, copy="10000000")})
    (fetch,) = (one for one in busy.ops if one.op.name == "fetch")
    assert fetch.peak_seconds == pytest.approx(transfer)


def test_what_a_call_starts_is_hidden_by_what_the_call_does():
    called = PROGRAM.replace("ENTRY %main (arg", "%inside (arg").replace("HloModule step", "HloModule called")
    called += """
ENTRY %main (arg.1: (s32[], f32[8]), big.1: f32[1024,1024], chosen.1: pred[]) -> f32[8] {
  %arg.1 = (s32[], f32[8]{0}) parameter(0)
  %big.1 = f32[1024,1024]{1,0} parameter(1)
  %chosen.1 = pred[] parameter(2)
  %ahead = f32[8]{0} fusion(%arg.1), kind=kLoop, calls=%other
  ROOT %result = f32[8]{0} call(%arg.1, %big.1, %chosen.1), to_apply=%inside
}
"""
    plain, found = read(), read(called, SCHEDULES | {"ahead": schedule(9000)})
    costs = {one.op.name: one.seconds for one in plain.ops}
    assert {one.op.name: one.seconds for one in found.ops if one.op.name != "ahead"} == costs


def test_exchanges_that_are_underway_together_share_what_hides_them():
    """Of 10 us of computing the first takes 8 of the links' time, and leaves 2 to the second."""
    computing = Op("product", "fusion", "", bundles=10e-6 * V6E.clock_hz)
    one, other = (Op(name, "ragged-all-to-all", "", link_s=8e-6, starts_at=0) for name in ("one", "other"))
    costs = Pricing(V6E, AT_PEAK).costs(Block([computing, one, other]))
    assert costs == pytest.approx([10e-6 + OVERHEAD_S, 0.0, 6e-6]), "the overhead of the product hides theirs"


RATES = calibrated(V6E)
BYTES_OF_10_US = 10e-6 * V6E.hbm_bytes * RATES.hbm_share


def price(op: Op) -> OpPrice:
    return OpPrice(op, V6E, RATES)


@pytest.mark.parametrize(("core_us", "expected_us"), [(5.0, 12.0), (11.0, 12.0), (13.0, 13.0)])
def test_visits_of_a_kernel_take_their_code_or_their_copy_with_its_latency(core_us, expected_us):
    """Ten visits of 1 us of bytes each, which wait 0.2 us more; then the last visit, which no copy hides."""
    kernel = Op("k", "custom-call", "", bundles=core_us * 1e-6 * V6E.clock_hz, hbm_bytes=BYTES_OF_10_US, visits=10)
    found = price(replace(kernel, kind=KERNEL))
    assert RATES.wait_s == 0.2e-6
    assert found.seconds == pytest.approx(expected_us * 1e-6 + min(core_us, 10.0) * 1e-6 / 10)
    assert price(kernel).seconds == pytest.approx(max(10.0, core_us) * 1e-6), "XLA's own op"


def test_code_and_waits_before_the_first_copy_are_added():
    kernel = Op("k", "custom-call", "", bundles=2e-6 * V6E.clock_hz, hbm_bytes=BYTES_OF_10_US, visits=1e9, kind=KERNEL)
    plain = price(replace(kernel, visits=10))
    led = price(replace(kernel, visits=10, lead_bundles=1e-6 * V6E.clock_hz, num_waits=5))
    code_less = 1e-6 / 10  # of the visit that nothing hides
    assert led.seconds - plain.seconds == pytest.approx(1e-6 + 5 * RATES.wait_s - code_less)


def test_attention_of_single_tokens_hides_only_a_part():
    both = Op("a", "custom-call", "", bundles=8e-6 * V6E.clock_hz, hbm_bytes=BYTES_OF_10_US, visits=4, kind=ATTENTION)
    ends = 8e-6 / 4
    assert price(both).seconds == pytest.approx(10e-6 + RATES.exposed_share * 8e-6 + 4 * 2 * RATES.wait_s + ends)
    shared = price(replace(both, num_ahead=4)).seconds
    assert price(both).seconds - shared == pytest.approx(3 * 2 * RATES.wait_s), "four copies in flight wait together"
    prompts = price(replace(both, kind=PROMPT_ATTENTION))
    assert prompts.core_s == pytest.approx(8e-6 * RATES.prompt_stall)


def test_matrix_units_bound_what_bundles_do_not_show():
    """16 rows of 256 x 256 are 8 cycles of one of two units."""
    product = Op("p", "fusion", "", bundles=100.0, matrix_ops=1000.0)
    assert price(product).seconds == pytest.approx(1000 * 8 / 2 / V6E.clock_hz / RATES.matrix_share)
    assert price(product).kind == PRODUCT and price(replace(product, matrix_ops=1.0)).kind == COPY


def test_a_collective_of_many_devices_starts_late():
    one = Op("c", "all-gather", "", link_s=5e-6, kind=COLLECTIVE, num_peers=2)
    assert price(one).overhead_s == OVERHEAD_S
    assert price(replace(one, num_peers=3)).overhead_s == RATES.collective_s


def test_ranges_hold_the_estimate_and_the_peaks_are_below_them():
    step = read().step
    assert step.min_seconds < step.seconds < step.max_seconds and step.peak_seconds < step.seconds


def test_a_collective_costs_its_links():
    found = read()
    (exchange,) = (one for one in found.ops if one.op.name == "sum")
    assert exchange.seconds == pytest.approx(32 / V6E.link_bytes + OVERHEAD_S), "two devices wait for nobody else"
    assert found.step.link_s == pytest.approx(3 * 32 / V6E.link_bytes)


def test_the_roofline_is_the_largest_bound():
    """It is of the hardware: what the program's own exchange sends does not raise it."""
    found = read()
    assert found.roofline.link_s == 0.0 < found.step.link_s
    assert found.roofline.seconds == pytest.approx(2e6 / V6E.hbm_bytes) and found.roofline.bound == "hbm"
    assert found.share_of_roofline == pytest.approx(found.roofline.seconds / found.step.seconds)


def test_the_largest_ops_come_first():
    found = read()
    assert [one.op.name for one in found.by_cost(in_layer=False)][:1] == ["fetch"]
    seconds = [one.seconds * one.times for one in found.by_cost()]
    assert seconds == sorted(seconds, reverse=True) and len(seconds) == 3


ROUNDS = """\
HloModule rounds, is_scheduled=true

%body (p: (s32[], s32[])) -> (s32[], s32[]) {
  %p = (s32[], s32[]) parameter(0)
  %i.2 = s32[] get-tuple-element(%p), index=0
  %work = f32[8]{0} fusion(%i.2), kind=kLoop, calls=%inner
  ROOT %out = (s32[], s32[]) tuple(%i.2, %i.2)
}

%inner (a: s32[]) -> f32[8] {
  %a = s32[] parameter(0)
  ROOT %wide = f32[8]{0} broadcast(%a), dimensions={}
}

%condition (p.1: (s32[], s32[])) -> pred[] {
  %p.1 = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p.1), index=0
  %needed = s32[] get-tuple-element(%p.1), index=1
  ROOT %less = pred[] compare(%i, %needed), direction=LT
}

ENTRY %main (needed.1: s32[]) -> (s32[], s32[]) {
  %needed.1 = s32[] parameter(0)
  %start = s32[] constant(FIRST)
  %copied = s32[] copy(%start)
  %state = (s32[], s32[]) tuple(%copied, %needed.1)
  ROOT %loop = (s32[], s32[]) while(%state), condition=%condition, body=%body
}
"""


@pytest.mark.parametrize(("first", "times"), [("0", 1), ("1", 0)])
def test_rounds_that_only_a_run_can_count_are_one_in_all(first, times):
    found = read(ROUNDS.replace("FIRST", first), {"work": schedule()})
    (work,) = found.ops
    assert work.times == times


EXPERTS = """\
HloModule experts, is_scheduled=true

FileNames
1 "/somewhere/src/rayserve_moe/kernels/reference/expert_products.py"

FunctionNames
1 "multiply_in_blocks"

FileLocations
1 {file_name_id=1 function_name_id=1 line=131 end_line=131 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%block (p: (s32[], s32[])) -> (s32[], s32[]) {
  %p = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %needed = s32[] get-tuple-element(%p), index=1
  %is_there = pred[] compare(%i, %needed), direction=LT
  %rows = f32[8]{0} conditional(%is_there, %i, %i), true_computation=%multiply, false_computation=%zeros
  ROOT %out = (s32[], s32[]) tuple(%i, %needed)
}

%multiply (m: s32[]) -> f32[8] {
  %m = s32[] parameter(0)
  ROOT %product = f32[8]{0} fusion(%m), kind=kLoop, calls=%inner
}

%zeros (z: s32[]) -> f32[8] {
  %z = s32[] parameter(0)
  ROOT %zero = f32[8]{0} fusion(%z), kind=kLoop, calls=%inner.2
}

%inner (a: s32[]) -> f32[8] {
  %a = s32[] parameter(0)
  ROOT %wide = f32[8]{0} broadcast(%a), dimensions={}
}

%inner.2 (a.2: s32[]) -> f32[8] {
  %a.2 = s32[] parameter(0)
  ROOT %wide.2 = f32[8]{0} broadcast(%a.2), dimensions={}
}

%open (o: (s32[], s32[])) -> pred[] {
  %o = (s32[], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%o), index=0
  %k = s32[] get-tuple-element(%o), index=1
  ROOT %less = pred[] compare(%j, %k), direction=LT
}

%layer (l: (s32[], s32[])) -> (s32[], s32[]) {
  %l = (s32[], s32[]) parameter(0)
  %one = (s32[], s32[]) while(%l), condition=%open, body=%block, metadata={op_name="while" stack_frame_id=1}
  ROOT %other = (s32[], s32[]) while(%one), condition=%open, body=%block, metadata={op_name="while" stack_frame_id=1}
}

%three (t: (s32[], s32[])) -> pred[] {
  %t = (s32[], s32[]) parameter(0)
  %n = s32[] get-tuple-element(%t), index=0
  %limit = s32[] constant(3)
  ROOT %more = pred[] compare(%n, %limit), direction=LT
}

ENTRY %main (state: (s32[], s32[])) -> (s32[], s32[]) {
  %state = (s32[], s32[]) parameter(0)
  ROOT %layers = (s32[], s32[]) while(%state), condition=%three, body=%layer, metadata={op_name="while"}
}
"""


@pytest.mark.parametrize(
    ("expert_rows", "num_layers", "blocks_of_slot"),
    [(64, 3, 1), (2048, 3, 1), (2049, 3, 2), (4000, 3, 2), (1024, 6, 1), (4000, 6, 4)],
)
def test_a_loop_over_blocks_of_experts_multiplies_those_of_even_routing(
    expert_rows: int, num_layers: int, blocks_of_slot: int
):
    """Blocks have 256 rows, and four slots are in use.

    A trip of the loop over layers calls twice: the calls share the rows of a layer, or belong to two layers.
    """
    few = {"product": schedule(), "zero": schedule(5)}
    found = read(EXPERTS, few, work=replace(WORK, expert_rows=expert_rows), num_expert_layers=num_layers)
    times = {one.op.name: 0.0 for one in found.ops}
    for one in found.ops:
        times[one.op.name] += one.times
    assert times == {"product": 2 * 4 * blocks_of_slot}
    assert found.step.bundles == 3 * times["product"] * BUNDLES


KERNELS = """\
HloModule kernels, is_scheduled=true

ENTRY %main (rows: bf16[48,64], weights: bf16[12,64,32], q: bf16[2,4,8]) -> f32[48,32] {
  %rows = bf16[48,64]{1,0} parameter(0)
  %weights = bf16[12,64,32]{2,1,0} parameter(1)
  %q = bf16[2,4,8]{2,1,0} parameter(2)
  %paged_attention.7 = bf16[2,4,8,128]{3,2,1,0} custom-call(%q), custom_call_target="tpu_custom_call"
  ROOT %ragged-dot-none.3 = f32[48,32]{1,0} custom-call(%rows, %weights), \
custom_call_target="tpu_custom_call", frontend_attributes={ragged_dot_tiling="16,64,32"}
}
"""
PIPELINED = """\
     0   :  { %s1_s1 = smov 0 } /* Start region 1 */
   0x1 LB: > { %s3_s3 = sphi %s1_s1, %s2_s2 /* iteration index, stage = 1 */ } /* Start region 5 */
   0x2   : > { %s2_s2 = sadd.s32 1, %s3_s3  ;;  %8 = dma.hbm_to_vmem [thread:$0] /*size_in_granules=*/64, x }
   0x3   : > { %p1_p1 = scmp.ge.s32.totalorder %s2_s2, LIMIT  ;;  %20 = sbr.rel (!%p1_p1) target = $region5 }
   0x4   :  {}
"""
VISIT = """\
     0   :  {}
   0x1   : > {} /* Start region 5 */
   0x2   : > { %20 = sbr.rel (!%p1_p1) target = $region5 }
"""


def adjacent_loops(number: int) -> str:
    """Write a schedule of loops of two bundles each, one after the other."""
    lines = ["     0   :  {}"]
    for loop in range(number):
        first, region = 1 + 2 * loop, 5 + loop
        lines.append(f"   {first:#x}   : > {{}} /* Start region {region} */")
        lines.append(f"   {first + 1:#x}   : > {{ %20 = sbr.rel (!%p1_p1) target = $region{region} }}")
    return "\n".join(lines) + "\n"


def test_kernels_are_told_the_trips_that_only_a_run_knows():
    found = read(KERNELS, {"paged_attention.7": adjacent_loops(6), "ragged-dot-none.3": VISIT})
    attention, product = op_named(found, "paged_attention.7"), op_named(found, "ragged-dot-none.3")
    # Two tiles: four buffers are filled in the first one; three blocks of two pages each; four pieces are cleared.
    assert attention.bundles == pytest.approx(1 + 2 * (4 / 2 + 2 + 3 + 2 + 0 + 4 / 3))
    assert attention.hbm_bytes == 6144 and (attention.visits, attention.num_ahead) == (2, 3)
    # 48 rows of room hold 32 of even routing: two tiles, so four used slots are visited five times.
    assert product.bundles == 1 + 5 * 2
    assert product.hbm_bytes == 4 * 64 * 32 * 2 + 48 * 64 * 2 + 48 * 32 * 4
    assert not attention.is_least and not product.is_least


SUMMED = """\
HloModule kernels, is_scheduled=true

ENTRY %main (first: s32[1], begin: s32[2,5], base: s32[3], places: s32[128], gates: f32[128], rows: u32[768,128], \
up: bf16[12,2048,128], down: bf16[12,128,2048]) -> u32[768,128] {
  %first = s32[1]{0} parameter(0)
  %begin = s32[2,5]{1,0} parameter(1)
  %base = s32[3]{0} parameter(2)
  %places = s32[128]{0} parameter(3)
  %gates = f32[128]{0} parameter(4)
  %rows = u32[768,128]{1,0} parameter(5)
  %up = bf16[12,2048,128]{2,1,0} parameter(6)
  %down = bf16[12,128,2048]{2,1,0} parameter(7)
  ROOT %device_sums.3 = u32[768,128]{1,0} custom-call(%first, %begin, %base, %places, %gates, %rows, %up, %up, %down), \
custom_call_target="tpu_custom_call"
}
"""


def test_the_kernel_of_device_sums_multiplies_tiles_and_moves_the_rows_that_are_there():
    """Two ranks have 56 assignments each, for four used slots; of 96 rows of room three quarters have a token."""
    program = read_program(SUMMED)
    instructions = {one.name: one for one in program.computations[program.entry]}
    kernel = instructions["device_sums.3"]
    operands = [instructions[name] for name in kernel.operands]
    found = work_of(kernel, operands, work=replace(WORK, used_slots=4, device_share=0.75))
    assert found is not None
    num_rows, of_slot = 96 * 0.75, 56 / 4
    tiles = of_slot / 128 + 0.5
    clear, listed = num_rows / 8 / 4, of_slot / 2 / 8 + 0.5
    assert found.trips_each == pytest.approx((4, clear, listed, tiles, of_slot / tiles / 8, clear))
    scalars = 4 * (1 + 10 + 3 + 128 + 128)
    assert found.hbm_bytes == pytest.approx(4 * 3 * 2048 * 128 * 2 + 2 * num_rows * 4096 + scalars)


DRAFTED = """\
HloModule kernels, is_scheduled=true

ENTRY %main (q: bf16[8,4,8,128], pool: bf16[64,16,256]) -> (bf16[8,4,8,128], bf16[64,16,256]) {
  %q = bf16[8,4,8,128]{3,2,1,0} parameter(0)
  %pool = bf16[64,16,256]{2,1,0} parameter(1)
  ROOT %paged_attention_of_groups.3 = (bf16[8,4,8,128]{3,2,1,0}, bf16[64,16,256]{2,1,0}) custom-call(%q, %pool), \
custom_call_target="tpu_custom_call"
}
"""


def test_pages_of_a_sequence_are_visited_once_for_all_of_its_drafts():
    """Two sequences of four rows each, of two blocks of keys: rows lie in a piece of 16, or now and then in two."""
    program = read_program(DRAFTED)
    kernel = next(part for part in program.computations[program.entry] if part.opcode == "custom-call")
    attention = {AttentionSizes(8, 4, 128): AttentionWork(2, 4, 6144, 16)}
    found = work_of(kernel, [], work=replace(WORK, attention=attention))
    pieces = 2 + 6 / 16
    groups, *trips = found.trips_each if found else ()
    assert groups == 2 and tuple(trips[:2]) == (4 / 2, 16 / 4), "buffers are filled once, with the pages of a block"
    assert trips[2:5] == [8 / 2, 4 / 2, 16 / 4] and trips[-1] == pieces / 2
    assert found.hbm_bytes == 6144 + pieces * 16 * 256 * 2


RECURRENT = """\
HloModule kernels, is_scheduled=true

ENTRY %main (rows: f32[4,8,128], states: f32[9,8,128,128], windows: f32[9,3,8,384], keys: f32[5,64,8,128], \
fresh: f32[5,64,8,128], decays: f32[5,8,128], inputs: f32[5,16,8,384]) -> f32[4,8,128] {
  %rows = f32[4,8,128]{2,1,0} parameter(0)
  ROOT %delta_rule.3 = (f32[4,8,128]{2,1,0}, f32[9,8,128,128]{3,2,1,0}, f32[9,3,8,384]{3,2,1,0}, \
f32[5,64,8,128]{3,2,1,0}, f32[5,64,8,128]{3,2,1,0}, f32[5,8,128]{2,1,0}, f32[5,16,8,384]{3,2,1,0}) custom-call(%rows), \
custom_call_target="tpu_custom_call"
}
"""


def test_a_recurrence_reads_rings_to_their_cursors_and_folds_now_and_then():
    """Four tokens alone and two pieces of a prompt in three rows; an entry is written every fourth step."""
    program = read_program(RECURRENT)
    kernel = next(part for part in program.computations[program.entry] if part.opcode == "custom-call")
    assert work_of(kernel, [], work=WORK) is None, "no layer has a recurrent state"
    found = work_of(kernel, [], work=replace(WORK, recurrent=RecurrentWork(4, 2, 3, 16, 0.25)))
    state, window, row, channels = 8 * 128 * 128 * 4, 3 * 8 * 384 * 4, 8 * 128 * 4, 8 * 384 * 4
    assert found is not None
    visits, pieces, tokens = 3 * (state + 2 * row + 16 * 2 * row), 6 * 8 * 3 * row, (4 + 16) * (3 * row + 2 * channels)
    assert found.hbm_bytes == visits + pieces + tokens + 0.25 * (state + 2 * window)
    tiles, waits = (2,) * 5, (2, 4 / 6, 2)
    assert found.trips_each == (*tiles, *waits, 4 / 6, 1, *waits), "16 tokens are two tiles"
    assert [region.runs for region in found.region_runs] == [6, 1, 3, 0.25, 2, 4, 3]
    assert [region.num_bytes for region in found.region_runs] == [state, state, state, state, 8 * row, row, row]


GROUPED = """\
HloModule kernels, is_scheduled=true

ENTRY %main (rows: bf16[96,128], up: bf16[12,128,256], down: bf16[12,256,128]) -> bf16[96,128] {
  %rows = bf16[96,128]{1,0} parameter(0)
  %up = bf16[12,128,256]{2,1,0} parameter(1)
  %down = bf16[12,256,128]{2,1,0} parameter(2)
  ROOT %grouped_ffn.3 = bf16[96,128]{1,0} custom-call(%rows, %up, %up, %down), custom_call_target="tpu_custom_call"
}
"""


def test_bundles_beside_copies_are_hidden_and_others_are_added():
    """The first of two loops runs beside copies."""
    loops = Loop(10, 19, None), Loop(30, 39, None)
    kernel = KernelWork(0.0, (), trips_each=(5.0, 2.0), trips_beside=(0.0, 2.0))
    spent = kernel.of_core(Schedule(100, loops), cores=1, iterations=0)
    assert spent.bundles == 80 + 5 * 10 + 2 * 10
    assert kernel.lead_bundles(Schedule(100, loops), spent, iterations=0) == 80 + 2 * 10


def test_loops_in_a_loop_that_does_not_run_cost_nothing():
    assert Schedule(100, (Loop(10, 39, None), Loop(20, 29, None))).spent(open_trips=(0.0, 0.0)).bundles == 70


def test_the_kernel_of_whole_experts_visits_a_tile_more_per_slot_than_its_rows_fill():
    kernel = op_named(read(GROUPED, {"grouped_ffn.3": VISIT}), "grouped_ffn.3")
    # 96 rows of room hold 64 of even routing: one tile, and one more of each of four used slots.
    assert kernel.bundles == 1 + 5 * 2
    assert kernel.hbm_bytes == 4 * 3 * 128 * 256 * 2 + 2 * 96 * 128 * 2


PUSHED = """\
HloModule kernels, is_scheduled=true

ENTRY %main (rows: bf16[32,128], up: bf16[12,128,256], down: bf16[12,256,128]) -> bf16[32,128] {
  %rows = bf16[32,128]{1,0} parameter(0)
  %up = bf16[12,128,256]{2,1,0} parameter(1)
  %down = bf16[12,256,128]{2,1,0} parameter(2)
  ROOT %low_latency_dispatch.3 = bf16[32,128]{1,0} custom-call(%rows, %up, %up, %down), \
custom_call_target="tpu_custom_call"
}
"""


def test_the_kernel_that_pushes_rows_keeps_links_busy_too():
    found = read(PUSHED, {"low_latency_dispatch.3": VISIT})
    kernel = op_named(found, "low_latency_dispatch.3")
    # 100 rows fill two tiles at most, beside one of each of four used slots.
    assert kernel.bundles == 1 + (4 + 100 / 64) * 2
    assert kernel.hbm_bytes == 4 * 3 * 128 * 256 * 2 + 2 * 32 * 128 * 2
    # Two devices: half of the rows go over the one link between them, and half of the results.
    assert kernel.link_s == pytest.approx(100 * 128 * 2 / V6E.link_bytes)


IN_BLOCKS = """\
HloModule kernels, is_scheduled=true

ENTRY %main (rows: bf16[32,4096], up: bf16[12,4096,1536], down: bf16[12,1536,4096]) -> bf16[2,32,4096] {
  %rows = bf16[32,4096]{1,0} parameter(0)
  %up = bf16[12,4096,1536]{2,1,0} parameter(1)
  %down = bf16[12,1536,4096]{2,1,0} parameter(2)
  %low_latency_dispatch.3 = (bf16[2,32,4096]{2,1,0}, u32[2,9600,128]{2,1,0}) custom-call(%rows, %up, %up, %down), \
custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"mesh_axes":"[\\"data\\"]"
}}, backend_config={"body":"BODY"}
  ROOT %out = bf16[2,32,4096]{2,1,0} get-tuple-element(%low_latency_dispatch.3), index=0
}
"""


def test_large_experts_are_read_in_blocks_by_the_cores_that_share_a_device():
    """What a kernel says of its mesh takes lines of its own, with more of the kernel behind them."""
    body = base64.b64encode(b"#tpu.dimension_semantics<parallel>").decode()
    kernel = op_named(
        read(IN_BLOCKS.replace("BODY", body), {"low_latency_dispatch.3": VISIT}, chip="v5p"), "low_latency_dispatch.3"
    )
    assert kernel.idle_factor == 1
    assert kernel.bundles == 1 + (4 + 100 / 64) * 3 * 2 / 2, "three blocks of 512 each, shared by two cores"
    # Rows are written and read as they come and as results; the kernel takes 32 and gives two cores' sums of them.
    assert kernel.hbm_bytes == 4 * 3 * 4096 * 1536 * 2 + (4 * 100 + 3 * 32) * 4096 * 2


def test_a_kernel_that_leaves_a_core_idle_counts_double():
    """A schedule is one core's: of a grid that cores share it has half of the steps, and half of the bytes."""
    body = base64.b64encode(b"#tpu.dimension_semantics<parallel>").decode()
    shared = KERNELS.replace("frontend_attributes={", f'backend_config={{"body":"{body}"}}, frontend_attributes={{')
    schedules = {"paged_attention.7": VISIT, "ragged-dot-none.3": VISIT}
    idle, both = (op_named(read(text, schedules, chip="v5p"), "ragged-dot-none.3") for text in (KERNELS, shared))
    assert idle.bundles == 1 + 5 * 2 and both.bundles == 1 + 5
    assert (idle.idle_factor, both.idle_factor) == (2, 1) and idle.hbm_bytes == both.hbm_bytes


def test_xla_divides_its_ops_over_cores():
    loop = PIPELINED.replace("LIMIT", "6")
    text = PROGRAM.replace("kind=kLoop, calls=%other", 'kind=kLoop, calls=%other, x={"iteration_bounds":["4","2"]}')
    one, two = (op_named(read(text, SCHEDULES | {"beside": loop}, chip=chip), "beside") for chip in ("v6e", "v5p"))
    assert one.bundles == 2 + 8 * 3 and two.bundles == 2 + 4 * 3
    assert one.hbm_bytes == two.hbm_bytes == 8 * 64 * 32


@pytest.mark.parametrize(
    ("body", "divides"),
    [
        ("dimension_semantics = [#tpu.dimension_semantics<parallel>], iteration_bounds = array<i64: 4>", True),
        ("dimension_semantics = [#tpu.dimension_semantics<parallel>], iteration_bounds = array<i64: 1>", False),
        ("dimension_semantics = [#tpu.dimension_semantics<arbitrary>], iteration_bounds = array<i64: 4>", False),
        ("bytecode with #tpu.dimension_semantics<parallel> in it", True),
        ("", False),
    ],
)
def test_kernels_divide_over_cores_by_parallel_dimensions(body, divides):
    encoded = base64.b64encode(body.encode()).decode()
    kernel = Instruction("k", "custom-call", (), f'%a), backend_config={{"body":"{encoded}"}}', is_root=False)
    assert divides_over_cores(kernel) == divides


def test_a_body_that_is_no_base64_divides_over_nothing():
    kernel = Instruction("k", "custom-call", (), '%a), backend_config={"body":"abc"}', is_root=False)
    assert not divides_over_cores(kernel)


PARTS = """\
HloModule parts, is_scheduled=true

%taken (t: f32[100,8], i: s32[4]) -> f32[4,8] {
  %t = f32[100,8]{1,0} parameter(0)
  %i = s32[4]{0} parameter(1)
  ROOT %g = f32[4,8]{1,0} gather(%t, %i), offset_dims={1}
}

%changed (c: f32[100,8], u: f32[1,8], n: s32[]) -> f32[100,8] {
  %c = f32[100,8]{1,0} parameter(0)
  %u = f32[1,8]{1,0} parameter(1)
  %n = s32[] parameter(2)
  ROOT %d = f32[100,8]{1,0} dynamic-update-slice(%c, %u, %n, %n)
}

ENTRY %main (a: f32[100,8], b: s32[4], e: f32[1,8], n.1: s32[]) -> f32[100,8] {
  %a = f32[100,8]{1,0} parameter(0)
  %b = s32[4]{0:S(1)} parameter(1)
  %e = f32[1,8]{1,0} parameter(2)
  %n.1 = s32[]{:S(2)} parameter(3)
  %rows = f32[4,8]{1,0} fusion(%a, %b), kind=kCustom, calls=%taken
  %whole = f32[100,8]{1,0} add(%a, %a)
  ROOT %written = f32[100,8]{1,0} fusion(%a, %e, %n.1), kind=kLoop, calls=%changed
}
"""


def test_bytes_of_unknown_copies_follow_from_shapes():
    open_copy = schedule(copy="%s1_s1")
    found = read(PARTS, {"rows": open_copy, "whole": open_copy, "written": open_copy})
    assert op_named(found, "rows").hbm_bytes == 2 * 4 * 8 * 4, "four rows read, four written"
    assert op_named(found, "whole").hbm_bytes == 3 * 100 * 8 * 4
    assert op_named(found, "written").hbm_bytes == 2 * 8 * 4, "one row read, one changed in place"


def test_an_op_without_a_name_has_the_scope_of_its_parts():
    text = PARTS.replace(
        "offset_dims={1}", 'offset_dims={1}, metadata={op_name="jit(f)/cond/branch_1_fun/experts/gather"}'
    )
    program = read_program(text)
    rows = next(one for one in program.computations["main"] if one.name == "rows")
    assert scope_of(rows, program) == "experts"
