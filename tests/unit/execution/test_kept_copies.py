"""Copies of sent weights that are to be kept have their memory, or are refused at the start."""

from __future__ import annotations

import pytest

from rayserve_moe.config.derive import sent_copies
from rayserve_moe.config.settings import CacheSettings, ClusterSettings, SettingsError
from rayserve_moe.execution import fewer_hosts
from rayserve_moe.execution.fewer_hosts import pages_beside_copies
from rayserve_moe.execution.memory import bytes_on_device, rounded_down
from tests.unit.execution.test_fewer_hosts import laid_out

SHARE = 1_000_000


def available(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(fewer_hosts, "memory_available", lambda: num_bytes)


@pytest.mark.parametrize(
    ("settings", "at_first", "later"),
    [
        (ClusterSettings(), 0, 0),
        (ClusterSettings(keep_sent_weights="off"), 0, 0),
        (ClusterSettings(keep_sent_weights="before_swap"), 3, 2),
        (ClusterSettings(keep_sent_weights="after_swap"), 2, 1),
        (ClusterSettings(keep_sent_weights="before_swap", keep_next_weights=True), 5, 3),
        (ClusterSettings(keep_sent_weights="after_swap", keep_next_weights=True), 3, 1),
    ],
)
def test_a_copy_is_staged_and_one_or_two_are_kept(settings: ClusterSettings, at_first: int, later: int) -> None:
    """Of the share of the next host too, where that is asked for; what is kept by now has its memory."""
    assert sent_copies(settings) == (at_first, later)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_pages_are_those_that_fit_beside_the_copies(num_devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    served, free = laid_out(num_devices), 3_000_000
    available(monkeypatch, free + 2 * SHARE)
    many = served.num_pages_within(free + 2 * SHARE)
    found = pages_beside_copies(served, many, num_copies=2, share_bytes=SHARE)
    assert found == served.num_pages_within(rounded_down(free // num_devices)) < many
    assert pages_beside_copies(served, 2, num_copies=2, share_bytes=SHARE) == 2
    assert pages_beside_copies(served, many, num_copies=0, share_bytes=SHARE) == many


def test_what_does_not_fit_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies alone, or beside as many pages as are asked for."""
    served = laid_out(1)
    available(monkeypatch, 2 * SHARE - 1)
    with pytest.raises(SettingsError, match="keep_sent_weights: 2 copies"):
        pages_beside_copies(served, 2, num_copies=2, share_bytes=SHARE)
    asked = laid_out(1, cache=CacheSettings(num_pages=100))
    pool = bytes_on_device(asked.state(100))
    available(monkeypatch, pool + SHARE)
    assert pages_beside_copies(asked, 100, num_copies=1, share_bytes=SHARE) == 100
    available(monkeypatch, pool + SHARE - 1)
    with pytest.raises(SettingsError, match="by 1 bytes"):
        pages_beside_copies(asked, 100, num_copies=1, share_bytes=SHARE)
