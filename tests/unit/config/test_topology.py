"""Laws of TPU slices: what a topology consists of, and that the settings are held against it at load."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayserve_moe.config.load import settings_from, settings_from_yaml
from rayserve_moe.config.settings import ClusterSettings, SettingsError
from rayserve_moe.config.topology import GENERATIONS, generation_name, num_chips, possible_slices, slice_for

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize(("topology", "chips"), [("1x1", 1), ("2x4", 8), ("16x16", 256), ("2x4x4", 32)])
def test_chips_are_the_product_of_the_dimensions(topology, chips):
    assert num_chips(topology) == chips


@pytest.mark.parametrize("topology", ["", "8", "2x", "2x0", "2*4", "2x2x2x2", "axb", "2x-4"])
def test_what_is_no_topology_is_named(topology):
    with pytest.raises(SettingsError, match="write chips per dimension"):
        num_chips(topology)


@pytest.mark.parametrize(
    ("written", "name"),
    [("v5litepod", "v5e"), ("v5e", "v5e"), ("tpu7x", "v7x"), ("v7x", "v7x"), ("7x", "v7x"), ("TPU-V6E", "v6e")],
)
def test_a_generation_has_several_spellings(written, name):
    assert generation_name(written) == name


def test_an_unknown_generation_is_named_with_the_known_ones():
    with pytest.raises(SettingsError, match=f"'v9' is unknown: write one of {', '.join(GENERATIONS)}"):
        generation_name("v9")


@pytest.mark.parametrize(
    ("version", "topology", "expected"),
    [
        ("v6e", "1x1", {(1, 1, 1)}),
        ("v6e", "2x2", {(1, 4, 4)}),
        ("v6e", "2x4", {(1, 8, 8), (2, 4, 4)}),
        ("v5litepod", "4x4", {(4, 4, 4)}),
        ("v6e", "8x8", {(16, 4, 4)}),
        ("v5p", "2x2x1", {(1, 4, 4)}),
        ("v5p", "2x2x2", {(2, 4, 4)}),
        ("v5p", "2x4x4", {(8, 4, 4)}),
        ("v4", "4x4x8", {(32, 4, 4)}),
        ("tpu7x", "2x2x1", {(1, 4, 8)}),
        ("v7x", "4x4x4", {(16, 4, 8)}),
    ],
)
def test_hosts_chips_and_devices_follow_from_the_topology(version, topology, expected):
    slices = possible_slices(topology, version)
    assert {(tpu.num_hosts, tpu.chips_per_host, tpu.devices_per_host) for tpu in slices} == expected
    assert all(tpu.num_hosts * tpu.chips_per_host == tpu.num_chips for tpu in slices)


@pytest.mark.parametrize(
    ("version", "topology"), [("v6e", "2x2x1"), ("v5p", "2x4"), ("v6e", "3x3"), ("v5p", "2x4x8"), ("v7x", "4x4x6")]
)
def test_a_topology_of_another_generation_is_named_with_its_own(version, topology):
    with pytest.raises(SettingsError, match=f"{version} has no topology {topology}: it has "):
        possible_slices(topology, version)


@pytest.mark.parametrize(("num_hosts", "chips"), [(1, 8), (2, 4), (4, 4)])
def test_the_number_of_hosts_decides_where_the_topology_leaves_them_open(num_hosts, chips):
    num_slices = 2 if num_hosts == 4 else 1
    cluster = ClusterSettings(tpu_topology="2x4", tpu_version="v6e")
    assert slice_for(cluster, num_hosts=num_hosts, num_slices=num_slices).chips_per_host == chips


V6E = {"model_path": "m", "tpu_topology": "2x4", "tpu_version": "v6e", "tpu_chips_per_host": 4, "num_hosts": 2}
V7X = {"model_path": "m", "tpu_topology": "2x2x2", "tpu_version": "tpu7x", "num_hosts": 2}


@pytest.mark.parametrize(
    "values",
    [
        V6E,
        {**V6E, "devices_per_host": 4, "data_parallel_size": 8},
        {**V6E, "num_slices": 2, "num_hosts": 4, "data_parallel_size": 16},
        {**V6E, "tpu_chips_per_host": 8, "num_hosts": 1},
        {**V7X, "devices_per_host": 8, "data_parallel_size": 16},
        {**V7X, "data_parallel_size": 1},
    ],
)
def test_settings_that_agree_with_the_slice_are_taken(values):
    settings_from(values)


WRONG = {
    "hosts of a slice": (
        {**V6E, "num_hosts": 3},
        r"a v6e slice of topology 2x4 \(8 chips\) is 2 hosts of 4 chips, num_slices is 1, .* is 3: set num_hosts to 2$",
    ),
    "hosts of an open topology": (
        {**V6E, "num_hosts": 4, "tpu_chips_per_host": 0},
        r"2 hosts of 4 chips or 1 host of 8 chips, num_slices is 1, num_hosts .* is 4: set num_hosts to 2 or 1$",
    ),
    "hosts of all slices": ({**V6E, "num_slices": 2, "data_parallel_size": 2}, "is 2: set num_hosts to 4"),
    "chips of a host": (
        {**V6E, "tpu_chips_per_host": 2},
        "has hosts of 4 or 8 chips, tpu_chips_per_host is 2: set it to 4 or 8",
    ),
    "devices of a host": (
        {**V6E, "devices_per_host": 8},
        "a host of v6e 2x4 has 4 chips and 4 devices, devices_per_host is 8: set it to 4, or leave it at 0",
    ),
    "two devices in a chip": (
        {**V7X, "devices_per_host": 4},
        "a host of v7x 2x2x2 has 4 chips and 8 devices, devices_per_host is 4: set it to 8",
    ),
    "data ranks": (
        {**V6E, "data_parallel_size": 3},
        "data_parallel_size 3 does not divide the 8 devices of 2 hosts of v6e 2x4 .*: set it to a divisor of 8$",
    ),
    "generation": ({**V6E, "tpu_version": "v6"}, "tpu_version 'v6' is unknown"),
    "topology": ({**V6E, "tpu_topology": "2x4x4"}, "v6e has no topology 2x4x4"),
}


@pytest.mark.parametrize(("values", "message"), WRONG.values(), ids=WRONG.keys())
def test_settings_at_odds_with_the_slice_are_named_at_load(values, message):
    with pytest.raises(SettingsError, match=message):
        settings_from(values)


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_config_of_ours_loads(file):
    settings_from_yaml(file)


@pytest.mark.parametrize(
    ("name", "num_chips", "num_hosts"), [("qwen3_30b_a3b_v6e8", 8, 2), ("qwen3_235b_a22b_v5p64", 32, 8)]
)
def test_a_config_for_a_slice_uses_all_of_it(name, num_chips, num_hosts):
    settings = settings_from_yaml(CONFIGS / f"{name}.yaml")
    parallel = settings.parallel
    tpu = slice_for(settings.cluster, num_hosts=parallel.num_hosts, num_slices=parallel.num_slices)
    assert (tpu.num_chips, tpu.num_hosts) == (num_chips, num_hosts)
    assert parallel.data_parallel_size == num_hosts * tpu.devices_per_host
