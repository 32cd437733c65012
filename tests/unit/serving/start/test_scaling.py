"""Scaling changes one number of what is deployed, and is refused before anything changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from ray.serve.schema import ServeApplicationSchema

from rayserve_moe.config.load import settings_from
from rayserve_moe.serving.start.ports import StartError
from rayserve_moe.serving.start.scaling import check_capacity, scaled_config
from rayserve_moe.serving.start.state import APPLICATION

ARGS = {"model_path": "x", "num_replicas": 2}


def details(**changes: Any) -> dict[str, Any]:
    ours = {"name": "moe", "import_path": APPLICATION, "args": ARGS, **changes}
    other = {"name": "other", "import_path": "their:app", "route_prefix": "/other"}
    applications = {one["name"]: {"deployed_app_config": one} for one in (ours, other)}
    return {"proxy_location": "HeadOnly", "http_options": {"port": 8000}, "applications": applications}


@pytest.mark.parametrize("overrides", [[], [{"name": "moe-server", "max_constructor_retry_count": 1}]])
def test_only_an_override_changes(overrides: list[dict[str, Any]]) -> None:
    """`args` and whatever else Serve hashes into the version of an application stay: nothing restarts."""
    before = details(deployments=overrides)
    config = scaled_config(copy.deepcopy(before), application="moe", num_replicas=3)
    other, ours = config["applications"]
    assert other == before["applications"]["other"]["deployed_app_config"]
    (override,) = ours.pop("deployments")
    assert override == {**(overrides[0] if overrides else {"name": "moe-server"}), "num_replicas": 3}
    kept = before["applications"]["moe"]["deployed_app_config"]
    assert ours == {name: value for name, value in kept.items() if name != "deployments"}
    assert config["http_options"] == {"port": 8000} and ServeApplicationSchema.model_validate(ours)


@pytest.mark.parametrize(
    ("found", "name", "number", "message"),
    [
        (details(), "mo", 2, "unknown application 'mo'; known: moe, other"),
        (details(), "other", 2, "not one of ours"),
        (details(), "moe", 0, r"must lie in \[1, 4096\]"),
        (details(deployments=[{"name": "moe-server", "num_replicas": "auto"}]), "moe", 2, "scaled by its demand"),
        (
            details(deployments=[{"name": "moe-server", "autoscaling_config": {"max_replicas": 2}}]),
            "moe",
            2,
            "by its demand",
        ),
        (details(args={**ARGS, "max_replicas": 4}), "moe", 3, "min_replicas and max_replicas"),
        ({"applications": {"moe": {"deployed_app_config": None}}}, "moe", 2, "deployed by code"),
        ({"applications": {**details()["applications"], "a": {"deployed_app_config": None}}}, "moe", 2, "another"),
    ],
)
def test_what_cannot_be_scaled_is_refused_by_its_cause(
    found: dict[str, Any], name: str, number: int, message: str
) -> None:
    with pytest.raises(StartError, match=message):
        scaled_config(found, application=name, num_replicas=number)


@pytest.mark.parametrize(
    ("args", "nodes", "most"),
    [
        ({"cpus_per_host": 0.5}, [{"CPU": 2.0}], 2),
        ({"cpus_per_host": 0.5, "num_hosts": 3, "data_parallel_size": 3}, [{"CPU": 2.0}, {"CPU": 3.0}], 2),
        ({"tpu_topology": "2x4", "tpu_version": "v6e", "num_hosts": 2, "tpu_chips_per_host": 4}, [{"TPU": 4.0}] * 6, 3),
    ],
)
def test_more_replicas_than_there_are_hosts_for_are_refused(
    args: dict[str, Any], nodes: list[dict[str, float]], most: int
) -> None:
    settings = settings_from({"model_path": "x", **args})
    nodes = [{"CPU": 64.0, **node} if "TPU" in node else node for node in nodes]
    check_capacity(settings, num_replicas=most, nodes=nodes)
    with pytest.raises(StartError, match=f"at most {most} fit"):
        check_capacity(settings, num_replicas=most + 1, nodes=nodes)
