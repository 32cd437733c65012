"""What Prometheus asks for is there, and the board shows metrics that the server has, each by its kind."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.fleet_metrics import metrics_of_a_fleet
from tests.deploy.manifests import FOLDER, JOBS, ROOT, SERVED, Manifest, container_of, read_all
from tests.http.conftest import served
from tests.support.serving.http_server import KEY

BOARD = json.loads((ROOT / "deploy" / "grafana.json").read_text())
(SCRAPE,) = yaml.safe_load((ROOT / "deploy" / "prometheus.yaml").read_text())["scrape_configs"]
(ALERTS,) = yaml.safe_load((ROOT / "deploy" / "alerts.yaml").read_text())["groups"]
QUERIES = [
    pytest.param(target, id=f"{panel['title']}: {target['legendFormat']}")
    for panel in BOARD["panels"]
    for target in panel["targets"]
]
UNDERSCORES = str.maketrans("./-", "___")
RULES = [pytest.param({"expr": rule["expr"]}, id=rule["alert"]) for rule in ALERTS["rules"]]


@pytest.fixture(scope="module")
def kinds(url):
    """What it is, by the name of the sample; counters by labels and unknown gauges have no samples yet."""
    families = [*text_string_to_metric_families(httpx.get(f"{url}/metrics").text), *metrics_of_a_fleet()]
    return {sample.name: family.type for family in families for sample in family.samples} | {
        f"{family.name}_total" if family.type == "counter" else family.name: family.type
        for family in families
        if family.type in ("counter", "gauge")
    }


def targets_of(manifest):
    """What Prometheus is told of a manifest's pods, a target for each port, as far as the scrape config looks."""
    for name, pod in manifest.pods.items():
        labels = pod["metadata"]["labels"] | {
            "ray.io/node-type": "head" if name == "head" else "worker",
            "ray.io/cluster": "qwen-abcde",
        }
        told = {f"__meta_kubernetes_pod_label_{re.sub(r'[^a-zA-Z0-9_]', '_', key)}": labels[key] for key in labels}
        for port in container_of(pod)["ports"]:
            yield told | {
                "__meta_kubernetes_namespace": "models",
                "__meta_kubernetes_pod_container_port_name": port["name"],
            }


def relabelled(target):
    """The labels that a target is left with, or None where a rule drops it."""
    kept = {}
    for rule in SCRAPE["relabel_configs"]:
        value = ";".join(target.get(label, "") for label in rule["source_labels"])
        if rule.get("action", "replace") == "keep":
            if not re.fullmatch(rule["regex"], value):
                return None
        else:
            kept[rule["target_label"]] = value
    return kept


@pytest.mark.parametrize("name", SERVED)
def test_each_engine_is_asked_once_through_its_head(name):
    asked = [labels for target in targets_of(Manifest.read(name)) if (labels := relabelled(target)) is not None]
    assert asked == [{"namespace": "models", "cluster": "qwen-abcde"}]


@pytest.mark.parametrize("name", JOBS)
def test_a_job_has_nothing_to_ask(name):
    assert not any(relabelled(target) for target in targets_of(Manifest.read(name)))


@pytest.mark.parametrize("target", QUERIES + RULES)
def test_board_and_alerts_ask_for_metrics_that_the_server_has(target, kinds):
    query = target["expr"]
    names = re.findall(r"\brayserve_moe_\w+", query)
    assert names or re.match(r"up\b", query)
    for name in names:
        assert name in kinds, f"{name} is not on /metrics; nearest: {sorted(kinds)}"
        is_rate = re.search(rf"\b(rate|increase)\({name}\b", query) is not None
        assert is_rate == (kinds[name] != "gauge"), f"{name} is a {kinds[name]}"


def test_the_board_filters_and_names_by_labels_that_samples_have():
    labels = {rule["target_label"] for rule in SCRAPE["relabel_configs"] if "target_label" in rule}
    labels |= {"job", "instance", "placement", "reason", "status", "le", "replica", "weight_version"}
    for target in (param.values[0] for param in QUERIES + RULES):
        assert set(re.findall(r"[{,]\s*(\w+)\s*=", target["expr"])) <= labels
        for names in re.findall(r"\bby \(([^)]*)\)", target["expr"]):
            assert set(names.split(", ")) <= labels
        assert set(re.findall(r"{{(\w+)}}", target.get("legendFormat", ""))) <= labels
    variables = {variable["name"]: variable for variable in BOARD["templating"]["list"]}
    assert variables["cluster"]["query"]["query"] == "label_values(rayserve_moe_steps_total, cluster)"
    of_cluster = 'label_values(rayserve_moe_steps_total{cluster=~"$cluster"}, replica)'
    assert variables["replica"]["query"]["query"] == of_cluster
    assert variables["replica"]["allValue"] == ".*", "a single replica has no such label"


@pytest.mark.parametrize("target", QUERIES)
def test_replicas_are_chosen_summed_or_told_apart(target):
    """A series per replica has it in its legend; the journal is one for all."""
    query, legend = target["expr"], target["legendFormat"]
    if "rayserve_moe" not in query:
        return
    is_shared = re.search(r"journal_(entries|bytes|requests_dropped)", query) is not None
    assert query.count('replica=~"$replica"') == (0 if is_shared else query.count("rayserve_moe_"))
    grouped = re.search(r"\bby \(([^)]*)\)", query)
    is_by_replica = not is_shared and ("replica" in grouped[1] if grouped else True)
    assert ("{{replica}}" in legend) == is_by_replica


def test_the_board_begins_with_the_replicas():
    first = {panel["title"] for panel in BOARD["panels"] if panel["gridPos"]["y"] < 16}
    assert first == {
        "Replicas", "Replicas by weight version", "All replicas: requests", "All replicas: tokens per second",
        "Refused: 429 per second", "Journal",
    }  # fmt: skip


def test_the_operator_and_one_machine_are_asked_as_the_cluster_is():
    """By the same path, interval and key, with the label by which the board chooses."""
    (machine,) = yaml.safe_load((ROOT / "deploy" / "prometheus-machine.yaml").read_text())["scrape_configs"]
    service, monitor = read_all(FOLDER / "monitoring" / "service-monitor.yaml")
    (endpoint,) = monitor["spec"]["endpoints"]
    assert (machine["metrics_path"], machine["scrape_interval"]) == (endpoint["path"], endpoint["interval"])
    assert (endpoint["path"], endpoint["interval"]) == (SCRAPE["metrics_path"], SCRAPE["scrape_interval"])
    assert machine["job_name"] == SCRAPE["job_name"]
    assert [set(one["labels"]) for one in machine["static_configs"]] == [{"cluster"}]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    wanted = {
        f"__meta_kubernetes_pod_label_{key.translate(UNDERSCORES)}": value
        for key, value in service["spec"]["selector"].items()
    } | {"__meta_kubernetes_pod_container_port_name": endpoint["port"]}
    targets = [target for name in SERVED for target in targets_of(Manifest.read(name))]
    selected = [target for target in targets if wanted.items() <= target.items()]
    assert len(selected) == len(SERVED)
    assert endpoint["authorization"]["credentials"] == {"name": "rayserve-moe", "key": "api_key"}
    cluster, job = endpoint["relabelings"]
    assert (
        cluster["sourceLabels"] == ["__meta_kubernetes_pod_label_ray_io_cluster"]
        and cluster["targetLabel"] == "cluster"
    )
    assert (job["targetLabel"], job["replacement"]) == ("job", SCRAPE["job_name"])


def test_panels_do_not_overlap():
    cells = [
        (x, y)
        for panel in BOARD["panels"]
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])


def test_the_scrape_asks_the_route_that_needs_the_key_with_the_key(engine, tmp_path):
    file = tmp_path / Path(SCRAPE["authorization"]["credentials_file"]).name
    (tmp_path / "api_key").write_text(KEY)
    with served(engine, api_key=KEY) as url:
        asked = f"{url}{SCRAPE['metrics_path']}"
        assert httpx.get(asked).status_code == 401
        key = f"{SCRAPE['authorization']['type']} {file.read_text()}"
        assert httpx.get(asked, headers={"authorization": key}).status_code == 200
