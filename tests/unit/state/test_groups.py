"""Layers form groups by state kind and window, and groups with a window keep what rows can see."""

from __future__ import annotations

from rayserve_moe.config.settings import CacheSettings, SchedulerSettings
from rayserve_moe.state.groups import page_groups
from rayserve_moe.state.kinds import StateKind

SCHEDULER = SchedulerSettings(max_running_requests=5, max_step_tokens=64)
CACHED, UNCACHED = (CacheSettings(page_size=16, enable_prefix_caching=on) for on in (True, False))


def kinds(*windows: int, name: str = "kv") -> tuple[StateKind, ...]:
    return tuple(StateKind(name, "token", (), window=window) for window in windows)


def test_a_window_keeps_the_pages_that_all_rows_can_see_at_once():
    """Of 5 rows and a window of 33 tokens on pages of 16: 32 before a step, on 3 pages; 64 in it, on one more each."""
    groups = page_groups(kinds(33, 0, 33), 1000, scheduler=SCHEDULER, cache=UNCACHED)
    assert groups == (("kv", 0, 1000), ("kv", 33, 5 * 4 + 4 + 1))
    (group,) = page_groups(kinds(33, 33), 1000, scheduler=SCHEDULER, cache=CACHED)
    assert group.num_pages == 2 * (5 * 4 + 4) + 1


def test_a_window_keeps_no_more_pages_than_sequences_hold():
    groups = page_groups(kinds(0, 33), 7, scheduler=SCHEDULER, cache=CACHED)
    assert groups == (("kv", 0, 7), ("kv", 33, 7))


def test_kinds_with_the_same_window_have_page_tables_of_their_own():
    both = (*kinds(33, 0), *kinds(33, 0, name="index"))
    groups = page_groups(both, 7, scheduler=SCHEDULER, cache=CACHED)
    assert groups == (("index", 0, 7), ("kv", 0, 7), ("index", 33, 7), ("kv", 33, 7)), "by window, then by name"
