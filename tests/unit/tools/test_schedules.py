"""Schedules as libtpu writes them: bundles times the trips of their loops, bytes times the trips of their copies."""

from __future__ import annotations

import pytest

from rayserve_moe.tools.estimate.bundles import (
    GRANULE_BYTES,
    Region,
    RegionRuns,
    Schedule,
    Spent,
    read_schedule,
)
from rayserve_moe.tools.estimate.dump import DumpFolder, NoScheduleError, dump_environment

STRAIGHT = """\
= control target key start
LH: loop header
= control target key end

     0   :  { %s0_s0 = inlined_call_operand.hbm [shape: s32[2], index: 0] } /* entry bundle */
   0x1   :  { %v2_v0 = vld [vmem:[%s33_s0] sm:$0x1] }
   0x2   :  { %619 = shalt.err (!%p614_p4) /* BoundsCheck 0 for %8 = dma.hbm_to_vmem /*hbm=*/%s6, \
/*size_in_granules=*/4096, /*vmem=*/%s9
hlo: some_fusion
 */ }
   0x3   :  { %8 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s6_s1, /*size_in_granules=*/64, /*vmem=*/%s810_s14 /*
element_size_in_bytes: 2048 */ }
   0x4   :  { %9 = dma.vmem_to_smem /*vmem=*/%s6_s1, /*size_in_granules=*/16, /*smem=*/%s810_s14 } /* exit bundle */
"""

COUNTED = """\
     0   :  { %s1_s1 = smov 0 /* copy for cssa */ } /* Start region 1 */
   0x1 LB: > { %s3_s3 = sphi %s1_s1, %s2_s2 /* phi copy */ } /* Start region 5 */
   0x2   : > { %s2_s2 = sadd.s32 STEP, %s3_s3  ;;  %v1_v1 = vld [vmem:[%s4_s4]] }
   0x3   : > { %8 = dma.vmem_to_hbm [thread:$0] /*vmem=*/%s6_s1, /*size_in_granules=*/2, /*hbm=*/%s8_s1 }
   0x4   : > { %p1_p1 = scmp.ge.s32.totalorder %s2_s2, LIMIT /* loop exit test */ }
   0x5   :  { %20 = sbr.rel (!%p1_p1) target = $region5 }
   0x6   :  {}
"""


def counted(step: str, limit: str, *more: tuple[str, str]) -> Schedule:
    text = COUNTED.replace("STEP", step).replace("LIMIT", limit)
    for old, new in more:
        assert old in text
        text = text.replace(old, new)
    return read_schedule(text)


def test_without_loops_every_bundle_counts_once():
    schedule = read_schedule(STRAIGHT)
    assert schedule.num_bundles == 5 and schedule.loops == ()
    assert schedule.spent() == Spent(5, 64 * GRANULE_BYTES, is_least=False)


def test_a_loop_multiplies_its_bundles_and_copies():
    schedule = counted("1", "8")
    assert [(loop.first, loop.last, loop.trips) for loop in schedule.loops] == [(1, 5, 8)]
    assert schedule.spent() == Spent(2 + 8 * 5, 8 * 2 * GRANULE_BYTES, is_least=False)


@pytest.mark.parametrize(
    ("step", "limit", "trips"),
    [("1", "1", 1), ("2", "7", 4), ("4", "8", 2), ("1", "%s9_s9", None), ("%s9_s9", "8", None), ("-1", "8", None)],
)
def test_trips_follow_from_constants_or_not_at_all(step, limit, trips):
    (loop,) = counted(step, limit).loops
    assert loop.trips == trips


@pytest.mark.parametrize(
    ("change", "trips"),
    [
        # The limit is computed from constants, or lies beyond the address that the counter starts from.
        (("{ %s1_s1 = smov 0", "{ %s9_s9 = sshll.u32 3, 2  ;;  %s1_s1 = smov 0"), 12),
        (("{ %s1_s1 = smov 0", "{ %s8_s8 = smov 40  ;;  %s9_s9 = ssub.s32 %s8_s8, 10  ;;  %s1_s1 = smov 0"), 30),
        (("{ %s1_s1 = smov 0", "{ %s9_s9 = smov [#allocation1 + $0x40]  ;;  %s1_s1 = smov [#allocation1]"), 64),
        (("{ %s1_s1 = smov 0", "{ %s9_s9 = smov [#allocation2]  ;;  %s1_s1 = smov [#allocation1]"), None),
        (("{ %s1_s1 = smov 0", "{ %s9_s9 = smov 4294967295  ;;  %s1_s1 = smov 4294967291"), 4),
        # One that is written twice is none that could be known.
        (("{ %s1_s1 = smov 0", "{ %s9_s9 = smov 8  ;;  %s9_s9 = smov 9  ;;  %s1_s1 = smov 0"), None),
    ],
)
def test_limits_are_computed(change, trips):
    (loop,) = counted("1", "%s9_s9", change).loops
    assert loop.trips == trips


def test_a_counter_is_found_where_it_was_spilled():
    spilled = (
        "%s2_s2 = sadd.s32 1, %s3_s3",
        "%9 = sst [smem:[#a_spill]] %s3_s3 ;; %s7_s7 = sld [smem:[#a_spill]] ;; %s2_s2 = sadd.s32 1, %s7_s7".replace(
            "#a", "#allocation5"
        ),
    )
    (loop,) = counted("1", "6", spilled).loops
    assert loop.trips == 6


def test_a_loop_that_is_left_at_once_runs_once():
    (loop,) = counted("1", "6", ("%p1_p1 = scmp.ge.s32.totalorder %s2_s2, 6", "%p1_p1 = pmov 1")).loops
    assert loop.trips == 1
    (loop,) = counted("1", "6", ("(!%p1_p1)", "(%p1_p1)")).loops
    assert loop.trips is None, "left when the predicate is false: no exit that is read here"


def test_a_pipelined_loop_has_fewer_iterations_than_trips():
    """It loads before its first one and stores after its last."""
    schedule = counted("1", "4", ("/* phi copy */", "/* iteration index, stage = 0 :: iteration index, stage = 1 */"))
    assert schedule.spent().bundles == 2 + 2 * 5
    assert schedule.spent(iterations=3).bundles == 2 + 3 * 5, "what XLA says is known better"


def test_open_loops_count_once_or_what_the_caller_knows():
    schedule = counted("1", "%s9_s9")
    assert schedule.spent() == Spent(7, 2 * GRANULE_BYTES, is_least=True)
    assert schedule.spent(open_trips=(10,)) == Spent(2 + 10 * 5, 10 * 2 * GRANULE_BYTES, is_least=False)
    assert schedule.spent(open_trips=(3, 10)).bundles == 2 + 10 * 5, "the innermost stands last"


NESTED = """\
     0   :  {}
   0x1   : > {} /* Start region 1 */
   0x2   : >> {} /* Start region 2 */
   0x3   : >> { %1 = sbr.rel (!%p1_p1) target = $region2 }
   0x4   : > { %2 = sbr.rel (!%p2_p2) target = $region1 }
"""


def test_trips_of_nested_open_loops_are_given_in_all():
    schedule = read_schedule(NESTED)
    assert schedule.spent(open_trips=(4, 12)).bundles == 1 + 4 * 2 + 12 * 2
    assert schedule.spent().is_least and schedule.spent(open_trips=(4,)).is_least


def test_trips_of_open_loops_may_be_given_by_entry():
    schedule = read_schedule(NESTED)
    assert schedule.spent(trips_each=(4, 3)).bundles == 1 + 4 * 2 + 4 * 3 * 2
    assert schedule.spent(trips_each=(4,)).is_least, "another kernel"


SKIPPED = """\
     0   :  { %s1_s1 = smov 0 }
   0x1 LB: > { %s3_s3 = sphi %s1_s1, %s2_s2 } /* Start region 1 */
   0x2   : > { %1 = sbr.rel (%p1_p1) target = $region4 }
   0x3   : > { %2 = sbr.rel (%p2_p2) target = $region3 } /* Start region 2 */
   0x4   : >> { %8 = dma.hbm_to_vmem [thread:$0] /*hbm=*/%s6_s1, /*size_in_granules=*/8, /*vmem=*/%s8_s1 }
   0x5 PF: >> { %3 = sbr.rel (%p3_p3) target = $region5 } /* Start region 3 */
   0x6   : >> { %9 = dma.vmem_to_hbm [thread:$0] /*vmem=*/%s6_s1, /*size_in_granules=*/8, /*hbm=*/%s8_s1 }
   0x7 PF: > {} /* Start/End empty region 5 */
   0x8 PF: > { %s2_s2 = sadd.s32 1, %s3_s3  ;;  %p4_p4 = scmp.ge.s32.totalorder %s2_s2, 8 } /* Start region 4 */
   0x9   :  { %4 = sbr.rel (!%p4_p4) target = $region1 }
"""
STATE_BYTES = 8 * GRANULE_BYTES


def executed(*, reads: bool, writes: bool, runs: float) -> RegionRuns:
    return RegionRuns(STATE_BYTES, reads=reads, writes=writes, runs=runs)


def test_a_region_is_executed_unless_the_caller_knows_how_often():
    """The region of a trip is found by what it does with states: it reads and writes them, or does one of both."""
    schedule = read_schedule(SKIPPED)
    assert schedule.regions == (Region(3, 7), Region(4, 4), Region(6, 6))
    assert schedule.spent() == Spent(1 + 8 * 9, 8 * 2 * STATE_BYTES, is_least=False, visits=8)
    of_trips, of_writes = executed(reads=True, writes=True, runs=4), executed(reads=False, writes=True, runs=0.5)
    assert schedule.spent(region_runs=[of_trips]).bundles == 1 + 8 * 4 + 4 * 5
    found = schedule.spent(region_runs=[of_trips, of_writes])
    assert found.bundles == 1 + 8 * 4 + 4 * 4 + 0.5 and found.hbm_bytes == 4.5 * STATE_BYTES
    reads = executed(reads=True, writes=False, runs=1)
    assert schedule.spent(region_runs=[reads]).bundles == 1 + 8 * 8 + 1
    assert schedule.spent(region_runs=[reads, reads]) == schedule.spent(region_runs=[reads]), "there is no other"


def test_the_largest_region_of_a_kind_counts():
    text = SKIPPED.replace("vmem_to_hbm", "hbm_to_vmem")
    read = executed(reads=True, writes=False, runs=2)
    assert read_schedule(text).spent(region_runs=[read]).bundles == 1 + 8 * 4 + 2 * 5


def test_a_copy_of_unknown_size_makes_the_bytes_unknown():
    text = STRAIGHT.replace("/*size_in_granules=*/64", "/*size_in_granules=*/%s3_s3")
    assert read_schedule(text).spent().hbm_bytes is None


@pytest.mark.parametrize(("text", "message"), [("nothing", "no bundle"), ("   0x3   :  {}\n", "is at index 0")])
def test_what_is_no_schedule_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        read_schedule(text)


def test_a_folder_gives_the_schedules_of_one_program_after_the_other(tmp_path):
    folder = DumpFolder(tmp_path)
    with pytest.raises(NoScheduleError, match="wrote no schedules"):
        folder.take()
    for name in (
        "17-fusion.3-01-final_bundles.txt",
        "17-fusion.3-00-schedule-analysis_final_bundles.txt",
        "17-TLP-01-final_bundles.txt",
        "17-<late-initialization>-01-final_bundles.txt",
        "17-TLP-hlo.txt",
    ):
        (tmp_path / name).write_text(name)
    assert folder.take() == {"fusion.3": "17-fusion.3-01-final_bundles.txt"}
    (tmp_path / "18-fusion.3-01-final_bundles.txt").write_text("another program's")
    assert folder.take() == {"fusion.3": "another program's"}
    (tmp_path / "19-fusion.4-01-final_bundles.txt").write_text("passed over")
    folder.pass_over()
    with pytest.raises(NoScheduleError):
        folder.take()


def test_the_folder_is_named_to_libtpu(tmp_path):
    assert f"--xla_jf_dump_to={tmp_path} " in dump_environment(tmp_path)["LIBTPU_INIT_ARGS"]


STREAMED = """\
     0   :  { %8 = dma.hbm_to_vmem [thread:$0] /*hbm=*/%s6_s1, /*size_in_granules=*/8, /*vmem=*/%s8_s1 }
   0x1   :  { %9 = dma.done.wait [#allocation8], 8 }
   0x2   :  { %1 = vwait.ge.trace [#allocation26], 0  ;;  %s1_s1 = smov 0 }
   0x3 LB: > { %s3_s3 = sphi %s1_s1, %s2_s2 } /* Start region 1 */
   0x4   : > { %8 = dma.hbm_to_vmem [thread:$0] /*hbm=*/%s6_s1, /*size_in_granules=*/8192, /*vmem=*/%s8_s1 }
   0x5   : > { %9 = dma.done.wait [#allocation9], 8192 }
   0x6   : > { %5 = vmatmul.mubr.bf16.gmra.mxu0 %v1_v1  ;;  %6 = vmatmul.mubr.bf16.gmra.mrb[4].mxu1 %v2_v2 }
   0x7   : > { %s2_s2 = sadd.s32 1, %s3_s3  ;;  %p4_p4 = scmp.ge.s32.totalorder %s2_s2, 5 }
   0x8   :  { %4 = sbr.rel (!%p4_p4) target = $region1 }
   0x9   :  { %9 = dma.done.wait [#allocation7], 8 }
"""


def test_what_stands_before_the_first_large_copy_and_outside_the_visits_is_counted():
    """Indices and a barrier come first; three waits are not repeated with the five visits."""
    spent = read_schedule(STREAMED).spent()
    assert spent.lead_bundles == 3 + 1, "of the first visit too"
    assert (spent.num_waits, spent.visits, spent.matrix_ops) == (3, 5, 10)
    early = read_schedule(STREAMED.replace("size_in_granules=*/8,", "size_in_granules=*/8192,", 1)).spent()
    assert (early.num_waits, early.lead_bundles) == (1, 0), "the first copy hides two waits until the loop over others"
