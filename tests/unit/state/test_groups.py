"""Layers form groups by window, and groups with a window keep what rows can see."""

from __future__ import annotations

from rayserve_moe.config.settings import CacheSettings, SchedulerSettings
from rayserve_moe.state.groups import page_groups

SCHEDULER = SchedulerSettings(max_running_requests=5, max_step_tokens=64)
CACHED, UNCACHED = (CacheSettings(page_size=16, enable_prefix_caching=on) for on in (True, False))


def test_a_window_keeps_the_pages_that_all_rows_can_see_at_once():
    """Of 5 rows and a window of 33 tokens on pages of 16: 32 before a step, on 3 pages; 64 in it, on one more each."""
    groups = page_groups((33, 0, 33), 1000, scheduler=SCHEDULER, cache=UNCACHED)
    assert groups == ((0, 1000), (33, 5 * 4 + 4 + 1))
    (group,) = page_groups((33, 33), 1000, scheduler=SCHEDULER, cache=CACHED)
    assert group.num_pages == 2 * (5 * 4 + 4) + 1


def test_a_window_keeps_no_more_pages_than_sequences_hold():
    groups = page_groups((33, 0), 7, scheduler=SCHEDULER, cache=CACHED)
    assert groups == ((0, 7), (33, 7))
