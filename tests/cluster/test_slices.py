"""Laws of slice reservations: hosts of one slice stay together, and what is not used is given back."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import ray

from rayserve_moe.cluster.slice_placement import reserve_slice
from rayserve_moe.config.settings import ClusterSettings, SettingsError
from tests.cluster.tpu_slices import SETTINGS, wait_for

Told = dict[str, Any]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def told() -> Told:
    """What `tests.cluster.tpu_slices` says of its cluster of two fake v6e slices with two hosts each."""
    command = [sys.executable, "-m", "tests.cluster.tpu_slices"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_hosts_of_a_slice_lie_on_one_slice_in_its_own_order(told: Told) -> None:
    hosts = told["one slice"]
    assert len({host["slice"] for host in hosts}) == 1
    assert [host["number"] for host in hosts] == ["0", "1"]


def test_an_actor_gets_all_chips_of_its_host(told: Told) -> None:
    for host in [*told["one slice"], *told["two slices"]]:
        assert host["TPU_VISIBLE_CHIPS"] == "0,1,2,3"


def test_a_reservation_leaves_the_head_of_its_slice_and_all_of_the_other(told: Told) -> None:
    assert told["at the start"] == {"TPU": 16.0, "TPU-v6e-8-head": 2.0}
    assert told["left beside one"]


def test_slices_follow_each_other_and_know_where_to_meet(told: Told) -> None:
    hosts = told["two slices"]
    assert [host["number"] for host in hosts] == ["0", "1", "0", "1"]
    names = [host["slice"] for host in hosts]
    assert names[0] == names[1] != names[2] == names[3]
    assert [host["MEGASCALE_SLICE_ID"] for host in hosts] == ["0", "0", "1", "1"]
    assert {host["MEGASCALE_NUM_SLICES"] for host in hosts} == {"2"}
    (coordinator,) = {host["MEGASCALE_COORDINATOR_ADDRESS"] for host in hosts}
    assert coordinator


def test_one_slice_needs_no_place_to_meet(told: Told) -> None:
    assert {host["MEGASCALE_COORDINATOR_ADDRESS"] for host in told["one slice"]} == {None}


def test_slices_that_are_taken_are_refused_and_nothing_stays_reserved(told: Told) -> None:
    assert told["refusal of two more"] == (
        "the cluster had no 2 free v6e slices of topology 2x4 (4 hosts of 4 chips in all) within 2.0 s"
    )
    assert told["left after the refusal"]


def test_a_wait_for_slices_is_given_up_at_once_and_nothing_stays_reserved(told: Told) -> None:
    """Also where one of two slices was there already."""
    assert 0.0 <= told["seconds to give up"] < 5.0
    assert told["left after giving up"]


def test_a_release_gives_everything_back(told: Told) -> None:
    assert told["all is given back"] and told["all is given back again"]


def test_the_rollout_job_takes_the_slices_that_are_free(told: Told) -> None:
    assert told["replicas"] == [2, 1] and told["replicas beside one"] == 1


def test_a_number_of_hosts_that_the_slice_does_not_have_is_refused_before_ray_is_asked() -> None:
    with pytest.raises(SettingsError, match=r"2x4 \(8 chips\) is 2 hosts of 4 chips, .* is 3: set num_hosts to 2$"):
        reserve_slice(SETTINGS, num_hosts=3)


def test_cpu_hosts_that_find_no_room_are_refused_and_nothing_stays_reserved(raylets: int) -> None:
    crowded = ClusterSettings(cpus_per_host=3.0, start_timeout_s=1.0)
    with pytest.raises(TimeoutError, match=r"no capacity for 2 hosts with \{'CPU': 3.0\} each within 1.0 s"):
        reserve_slice(crowded, num_hosts=raylets)
    modest = reserve_slice(ClusterSettings(cpus_per_host=0.5), num_hosts=raylets)
    modest.release()
    assert wait_for(lambda: ray.cluster_resources()["CPU"] == ray.available_resources().get("CPU"))
