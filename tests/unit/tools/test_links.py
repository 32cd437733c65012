"""Bytes over the cuts of a slice, and the chips' figures."""

from __future__ import annotations

from itertools import product

import pytest

from rayserve_moe.tools.estimate.chips import CHIPS, chip_of
from rayserve_moe.tools.estimate.links import Slice, groups_of
from rayserve_moe.tools.hlo_text import Instruction

MB = 1_000_000
ALL = list(range(8))


def slice_of(topology: str) -> Slice:
    name, shape = topology.split(":")
    sizes = [int(size) for size in shape.split("x")]
    # x counts first, as in jax's order of devices.
    places = [tuple(reversed(place)) for place in product(*(range(size) for size in reversed(sizes)))]
    chip = chip_of(name)
    return Slice(chip, tuple(place for place in places for _ in range(chip.num_devices)))


def per_link(found: Slice, operation: str, groups: list[list[int]], num_bytes: int = MB) -> float:
    return found.seconds(operation, num_bytes, groups=groups) * found.chip.link_bytes / MB


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        # Two links across the middle of the four; each half has four devices.
        ("all-gather", 4 / 2),
        # More than over the cut is what a chip with two links sends: twice all parts but its own.
        ("all-reduce", 2 * 7 / 8 / 2),
        ("reduce-scatter", 4 / 8 / 2),
        ("all-to-all", 4 * 4 / 8 / 2),
        ("ragged-all-to-all", 4 * 4 / 8 / 2),
        ("collective-permute", 1 / 2),
    ],
)
def test_a_collective_is_bound_by_the_narrowest_cut_or_by_a_chip(operation, expected):
    # A gather is worst for a chip in a corner: it receives seven shards over its two links.
    worst = 7 / 2 if operation == "all-gather" else 7 / 8 / 2 if operation == "reduce-scatter" else expected
    assert per_link(slice_of("v6e:2x4"), operation, [ALL]) == pytest.approx(worst)


def test_a_chip_receives_a_gathered_shard_once_for_all_its_devices():
    """Four chips of two devices, in a square: six shards from elsewhere over two links."""
    found = slice_of("tpu7x:2x2x1")
    assert found.min_chip_links() == 2
    assert per_link(found, "all-gather", [ALL]) == pytest.approx(6 / 2)
    assert per_link(found, "all-reduce", [ALL]) == pytest.approx(2 * 3 / 4 / 2), "four chips, not eight devices"


def test_chips_of_a_torus_have_links_on_both_sides():
    assert slice_of("v5p:4x4x4").min_chip_links() == 6 and slice_of("v5p:2x4x4").min_chip_links() == 3


def test_groups_that_no_cut_divides_send_nothing():
    found = slice_of("v6e:2x4")
    assert found.seconds("all-reduce", MB, groups=[[0], [1]]) == 0
    pairs = [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert per_link(found, "all-reduce", pairs) == pytest.approx(4 / 4), "four pairs, four links across"


def test_a_ring_has_two_ways():
    open_axis, ring = slice_of("v5p:2x4x4"), slice_of("v5p:4x4x4")
    assert not open_axis.chip.is_ring(open_axis.shape, 1) and ring.chip.is_ring(ring.shape, 1)
    assert max(links for _, links in ring.cuts()) == 32
    assert max(links for _, links in open_axis.cuts()) == 16
    assert chip_of("v6e").is_ring((4, 16), 1) and not chip_of("v6e").is_ring((4, 16), 0)


def test_devices_of_one_chip_have_no_link_between_them():
    found = slice_of("tpu7x:2x2x1")
    assert len(found.devices) == 8
    assert found.seconds("all-reduce", MB, groups=[[0, 1]]) == 0


def attributes(text: str) -> Instruction:
    return Instruction("x", "all-gather", (), text, is_root=False)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("%a), replica_groups={{0,1},{2,3}}, dimensions={0}", [[0, 1], [2, 3]]),
        ("%a), replica_groups=[2,2]<=[4], dimensions={0}", [[0, 1], [2, 3]]),
        ("%a), replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}", [[0, 2], [1, 3]]),
        ("%a), source_target_pairs={{0,1},{1,0}}", [[0, 1], [1, 0]]),
        ("%a), replica_groups={}", [[0, 1, 2, 3]]),
    ],
)
def test_groups_are_read_as_the_compiler_writes_them(text, groups):
    assert groups_of(attributes(text), num_devices=4) == groups


def test_a_chip_without_figures_is_refused():
    with pytest.raises(ValueError, match="no figures for the chip v9x; known chips: v5e"):
        chip_of("v9x:2x2")


@pytest.mark.parametrize(
    ("name", "units", "rows"),
    [("v5e", 4 * 128**2, 1), ("v5p", 8 * 128**2, 1), ("v6e", 2 * 256**2, 2), ("tpu7x", 4 * 256**2, 2)],
)
def test_clocks_are_the_peak_over_the_matrix_units(name, units, rows):
    chip = CHIPS[name]
    assert chip.clock_hz == pytest.approx(chip.peak_flops / (units * 2 * rows), rel=0.01)
