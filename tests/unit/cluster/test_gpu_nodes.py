"""GPUs of a cluster's nodes are counted; a cluster, or a worker, without one is refused by name."""

from __future__ import annotations

import pytest

from rayserve_moe.cluster.host_worker import lay_out, place_of
from rayserve_moe.cluster.slice_placement import gpus_of_node
from rayserve_moe.config.load import settings_from
from rayserve_moe.config.settings import ClusterSettings, ParallelSettings, SettingsError
from rayserve_moe.execution.served_model import runner_settings


def node(*, gpus: float | None, is_alive: bool = True) -> dict:
    return {"Alive": is_alive, "Resources": {"CPU": 8.0} if gpus is None else {"CPU": 8.0, "GPU": gpus}}


def test_a_host_takes_the_gpus_of_the_node_that_has_most():
    assert gpus_of_node([node(gpus=None), node(gpus=8.0), node(gpus=2.0)]) == 8


def test_a_cluster_without_gpus_is_refused():
    dead = node(gpus=8.0, is_alive=False)
    with pytest.raises(SettingsError, match="platform gpu: Ray finds no GPU on any of 2 nodes"):
        gpus_of_node([node(gpus=None), node(gpus=0.0), dead])


def test_a_worker_of_gpus_emulates_no_cpus_and_refuses_them():
    parallel, cluster = ParallelSettings(), ClusterSettings(platform="gpu")
    place = place_of(0, parallel, cluster=cluster)
    assert (place.platform, place.num_cpu_devices) == ("gpu", 0)
    found = settings_from({"model_path": "trained:calculator"})
    with pytest.raises(SettingsError, match=r"platform gpu: jax computes on .* cpu"):
        lay_out(runner_settings(found, found.model), place, coordinator="")
