"""Devices are laid out by slice and host, the same in whatever order they are named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import jax
import numpy as np
import pytest

from rayserve_moe.parallel.mesh import MeshError, local_devices, plan_for


@dataclass(frozen=True)
class Chip:
    """What the layout asks of a device of a platform that knows slices."""

    id: int
    process_index: int = 0
    slice_index: int = 0


def chips(num_hosts: int, chips_per_host: int, num_slices: int = 1) -> list[jax.Device]:
    """All chips of slices of equally many hosts, numbered as a platform may do: hosts and slices interleaved."""
    hosts_per_slice = num_hosts // num_slices
    named = [
        Chip(place * num_hosts + host, host, host // hosts_per_slice)
        for place in range(chips_per_host)
        for host in range(num_hosts)
    ]
    return cast(list[jax.Device], named)


def laid_out(devices: list[jax.Device], **sizes: int) -> np.ndarray:
    """Host of each place on the mesh, [data, tensor]."""
    return np.vectorize(lambda chip: chip.process_index, otypes=[int])(plan_for(devices, **sizes).mesh.devices)


def test_without_more_said_all_devices_share_the_heads():
    plan = plan_for(jax.devices()[:4])
    assert (plan.data_size, plan.tensor_size, plan.num_expert_ranks) == (1, 4, 4)
    assert plan.mesh.devices.tolist() == [jax.devices()[:4]]


@pytest.mark.parametrize(("data_size", "tensor_size"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_the_order_that_devices_are_named_in_does_not_show(data_size, tensor_size):
    plan = plan_for(jax.devices()[:8], data_size=data_size)
    assert plan.mesh.axis_names == ("data", "tensor")
    assert (plan.data_size, plan.tensor_size, plan.num_expert_ranks) == (data_size, tensor_size, 8)
    assert plan_for(jax.devices()[:8][::-1], data_size=data_size) == plan


@pytest.mark.parametrize("data_size", [2, 4, 8])
def test_hosts_are_neighbours_on_the_data_axis(data_size):
    hosts = laid_out(chips(2, 4), data_size=data_size)
    np.testing.assert_array_equal(hosts.reshape(-1), [0] * 4 + [1] * 4)
    assert (hosts == hosts[:, :1]).all(), "the heads of a data rank are on one host"


@pytest.mark.parametrize("shuffle_seed", [0, 1])
def test_slices_are_outermost_on_the_data_axis(shuffle_seed):
    devices = chips(8, 2, num_slices=4)
    shuffled = [devices[i] for i in np.random.default_rng(shuffle_seed).permutation(16)]
    hosts = laid_out(shuffled, data_size=4, num_slices=4)
    np.testing.assert_array_equal(hosts // 2, np.repeat(np.arange(4), 4).reshape(4, 4))


def test_devices_that_know_of_no_slice_are_cut_into_runs_of_hosts():
    hosts = laid_out(chips(4, 2), data_size=2, num_slices=2)
    np.testing.assert_array_equal(hosts, [[0, 0, 1, 1], [2, 2, 3, 3]])


WRONG = {
    "data ranks": ({"data_size": 3}, chips(2, 4), "data_parallel_size 3 does not divide the 8 devices"),
    "no data rank": ({"data_size": 0}, chips(2, 4), "data_parallel_size 0 does not divide"),
    "a rank on two slices": (
        {"data_size": 2, "num_slices": 4},
        chips(4, 2),
        "num_slices 4 does not divide data_parallel_size 2: a data rank cannot span two slices",
    ),
    "slices that are not there": (
        {"data_size": 4, "num_slices": 4},
        chips(4, 2, 2),
        "the devices are on 2 slices, but num_slices is 4",
    ),
    "slices unsaid": ({"data_size": 4}, chips(4, 2, 2), "the devices are on 2 slices, but num_slices is 1"),
    "slices that differ in size": (
        {"data_size": 2, "num_slices": 2},
        chips(4, 2, 2)[:-2],
        "6 devices do not spread evenly over num_slices 2",
    ),
    "devices left over": ({"data_size": 3, "num_slices": 3}, chips(4, 2), "8 devices do not spread evenly over num_sl"),
    "no slice": ({"num_slices": 0}, chips(1, 4), "4 devices do not spread evenly over num_slices 0"),
}


@pytest.mark.parametrize(("sizes", "devices", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_does_not_divide_is_named(sizes, devices, message):
    with pytest.raises(MeshError, match=message):
        plan_for(devices, **sizes)


def test_local_devices_are_as_many_as_asked_for():
    assert local_devices(3) == jax.local_devices()[:3]
    assert len(local_devices(0)) == 1, "emulated devices are used only when asked for"
    with pytest.raises(ValueError, match="99 devices are required, jax has 8"):
        local_devices(99)
