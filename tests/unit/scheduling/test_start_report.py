"""What the hosts of a slice report at the start, taken together."""

from __future__ import annotations

from rayserve_moe.scheduling.step_plan import StartReport, slowest_start
from rayserve_moe.state.groups import PageGroup

FAST = StartReport(90, load_s=1.0, compile_s=5.0, compile_sum_s=9.0, first_run_s=2.0, num_programs=4)
SLOW = StartReport(80, load_s=3.0, compile_s=0.5, compile_sum_s=1.0, first_run_s=1.0, num_programs=4)


def test_hosts_that_start_together_wait_for_the_slowest():
    together = slowest_start([FAST, SLOW])
    assert together == StartReport(80, 3.0, 5.0, 9.0, 2.0, 4)
    assert slowest_start([FAST]) == FAST


def test_programs_are_found_on_disk_where_every_host_finds_them():
    found = [StartReport(80, num_programs=4, num_programs_found=n) for n in (4, 1)]
    assert slowest_start(found).num_programs_found == 1


def test_a_report_says_what_layers_with_a_window_keep():
    groups = (PageGroup(0, 80), PageGroup(128, 40))
    (windowed,) = {slowest_start([StartReport(80, page_groups=groups) for _ in range(2)])}
    assert windowed.page_groups == groups and "page_groups" not in windowed.statistics()
    assert str(windowed).startswith("80 KV pages per data rank, 40 for a window of 128; weights")
    assert str(FAST).startswith("90 KV pages per data rank; weights")


def test_statistics_name_every_part():
    assert SLOW.statistics() == {
        "start_load_s": 3.0,
        "start_compile_s": 0.5,
        "start_compile_sum_s": 1.0,
        "start_first_run_s": 1.0,
        "start_num_programs": 4.0,
        "start_num_programs_found": 0.0,
    }
    assert "4 programs compiled in 0.5 s (1.0 s one by one, 0 found on disk)" in str(SLOW)
