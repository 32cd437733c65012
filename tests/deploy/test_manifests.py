"""The manifests are what the operator's schemas accept, and agree with configs, topology, start command and image."""

from __future__ import annotations

import argparse
import copy
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve import Application

from rayserve_moe.config.load import settings_from_yaml
from rayserve_moe.config.model_names import hub_model
from rayserve_moe.rollouts import batch_job
from rayserve_moe.serving.app import build
from tests.deploy import crds
from tests.deploy.manifests import (
    FILES,
    FOLDER,
    JOBS,
    ROOT,
    SERVED,
    Document,
    Manifest,
    complaints,
    container_of,
    environment_of,
    read_all,
    shared,
)

ALL = (*SERVED, *JOBS)
V6E, V5P, JOB = "rayservice-v6e-16.yaml", "rayservice-v5p-64.yaml", "rayjob-rollouts-v6e-16.yaml"

HEAD = "rayClusterConfig.headGroupSpec.template.spec"
WORKERS = "rayClusterConfig.workerGroupSpecs.0"
POD = f"{WORKERS}.template.spec"


def place(document: Document, path: str) -> tuple[Any, Any]:
    """The parent of a dotted path below `spec`, and the last key."""
    *steps, last = [int(step) if step.isdigit() else step for step in path.split(".")]
    parent = document["spec"]
    for step in steps:
        parent = parent[step]
    return parent, last


def put(path: str, value: Any) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        parent, key = place(document, path)
        parent[key] = value

    return change


def rename(path: str, name: str) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        parent, key = place(document, path)
        parent[name] = parent.pop(key)

    return change


def without(path: str) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        parent, key = place(document, path)
        del parent[key]

    return change


def twice(path: str) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        parent, key = place(document, path)
        parent[key].append(parent[key][0])

    return change


def chips(kind: str, amount: str | None) -> Callable[[Document], None]:
    return put(f"{POD}.containers.0.resources.{kind}", {"google.com/tpu": amount})


def served(old: str, new: str) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        text = document["spec"]["serveConfigV2"]
        assert old in text
        document["spec"]["serveConfigV2"] = text.replace(old, new)

    return change


def changed(name: str, change: Callable[[Document], None]) -> Document:
    """A manifest with one change. YAML's aliases become copies, so that the change is in one place."""
    (document,) = read_all(FILES[name])
    document = unshared(document)
    change(document)
    return document


def unshared(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: unshared(part) for key, part in value.items()}
    return [unshared(part) for part in value] if isinstance(value, list) else copy.copy(value)


REFUSED = [
    (V6E, rename(f"{WORKERS}.numOfHosts", "numOfHost"), "unknown field numOfHost, did you mean numOfHosts?"),
    (V5P, rename(f"{POD}.nodeSelector", "nodeSelectors"), "unknown field nodeSelectors, did you mean nodeSelector?"),
    (V6E, rename(f"{HEAD}.containers.0.readinessProbe.httpGet", "httpget"), "unknown field httpget, did you mean"),
    (V6E, rename("rayClusterConfig", "rayClusterSpec"), "unknown field rayClusterSpec, did you mean rayClusterConfig?"),
    (JOB, rename("backoffLimit", "backOffLimit"), "unknown field backOffLimit, did you mean backoffLimit?"),
    (V6E, put(f"{WORKERS}.numOfHosts", "4"), "numOfHosts: '4' is not of type 'integer'"),
    (V6E, put(f"{HEAD}.containers.0.env.0.value", 1), "env[0].value: 1 is not of type 'string'"),
    (V6E, put(f"{POD}.containers.0.resources.limits.memory", "320 GB"), "memory: '320 GB'"),
    (V6E, put("rayClusterConfig.authOptions.mode", "tokens"), "authOptions.mode: 'tokens' is not one of"),
    (V6E, without("rayClusterConfig.headGroupSpec"), "'headGroupSpec' is a required property"),
    (V6E, without(f"{POD}.containers"), "'containers' is a required property"),
    (V6E, twice(f"{POD}.containers"), "containers: twice ray-worker"),
    (V6E, lambda document: document.update(apiVersion="ray.io/v2"), "apiVersion: 'ray.io/v1' was expected"),
    (V6E, lambda document: document["metadata"].update(name="qwen3_30b"), "metadata.name: 'qwen3_30b' does not match"),
]


@pytest.mark.parametrize("name", ALL)
def test_the_operator_accepts_every_manifest(name, schemas):
    (document,) = read_all(FILES[name])
    assert crds.complaints(document, schemas[document["kind"]]) == []


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_what_the_operator_would_refuse_is_named_with_its_place(name, change, message, schemas):
    kind = Manifest.read(name).document["kind"]
    found = crds.complaints(changed(name, change), schemas[kind])
    assert any(message in line for line in found), found


def test_there_are_manifests():
    assert {V6E, V5P, JOB} <= set(ALL)


@pytest.mark.parametrize("name", ALL)
def test_every_manifest_agrees_with_its_config_and_the_package(name):
    assert complaints(Manifest.read(name)) == []


AT_ODDS = [
    (
        V6E,
        put(f"{WORKERS}.numOfHosts", 3),
        "numOfHosts is 3, but qwen3_30b_a3b_v6e16.yaml asks for v6e 4x4, which is 4 ",
    ),
    (V6E, without(f"{WORKERS}.numOfHosts"), "numOfHosts is 1, but qwen3_30b_a3b_v6e16.yaml asks for v6e 4x4"),
    (
        V5P,
        put(f"{WORKERS}.numOfHosts", 16),
        "numOfHosts is 16, but qwen3_235b_a22b_v5p64.yaml asks for v5p 2x4x4, which",
    ),
    (V5P, put(f"{WORKERS}.replicas", 2), "replicas, minReplicas and maxReplicas must be num_slices 1"),
    (
        V6E,
        chips("limits", "8"),
        "limits of google.com/tpu is 8, but qwen3_30b_a3b_v6e16.yaml asks for v6e 4x4, which is 4",
    ),
    (V5P, chips("requests", None), "requests of google.com/tpu is None, but qwen3_235b_a22b_v5p64.yaml asks"),
    (V5P, put(f"{POD}.nodeSelector", {}), "gke-tpu-accelerator is None, but qwen3_235b_a22b_v5p64.yaml asks for v5p"),
    (V6E, served("tpu_topology: 4x4", "tpu_topology: 2x4"), "serveConfigV2: args.tpu_topology is '2x4', but '4x4' in"),
    (V6E, served("port: 8000", "port: 80"), "serveConfigV2: http_options is {'host': '0.0.0.0', 'port': 80}, but"),
    (V6E, served("num_redundant_experts", "num_redundant_expert"), "args.num_redundant_expert is 16, but None in"),
    (V6E, put(f"{HEAD}.containers.0.envFrom", []), "head: RAY_SERVE_ENABLE_HA_PROXY is None, not '1'"),
    (V6E, put(f"{POD}.containers.0.env.0.value", "cpu"), "slice: JAX_PLATFORMS is 'cpu', not 'tpu,cpu'"),
    (V6E, without("rayClusterConfig.authOptions"), "authOptions: mode must be token, with secretName"),
    (
        V6E,
        put("rayClusterConfig.authOptions.secretName", "other"),
        "head: RAY_AUTH_TOKEN must come from the secret other",
    ),
    (
        V6E,
        put(f"{HEAD}.containers.0.env.2", {"name": "RAY_AUTH_TOKEN", "value": "abc"}),
        "RAY_AUTH_TOKEN must come from",
    ),
    (V6E, put(f"{HEAD}.volumes.1.persistentVolumeClaim.claimName", "cache"), "head: /cache is on no claim of volumes"),
    (
        V6E,
        put(f"{POD}.containers.0.volumeMounts.0.mountPath", "/model"),
        "model_path /models/Qwen3-30B-A3B is on no vol",
    ),
    (V6E, put(f"{POD}.containers.0.volumeMounts.1.readOnly", True), "slice: /cache must not be read only"),
    (V6E, without(f"{POD}.containers.0.readinessProbe"), "slice: readinessProbe must ask /-/healthz at port serve"),
    (V6E, put(f"{HEAD}.containers.0.ports.3.containerPort", 8001), "head: port serve is 8001, but http_options.port"),
    (
        V5P,
        without(f"{POD}.terminationGracePeriodSeconds"),
        "terminationGracePeriodSeconds is 30, but drain_timeout_s and R",
    ),
    (
        V5P,
        put("rayClusterDeletionDelaySeconds", 60),
        "rayClusterDeletionDelaySeconds is 60, shorter than drain_timeout",
    ),
    (V5P, put(f"{HEAD}.containers.0.envFrom", []), "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S is 120, shorter than drain"),
    (V5P, without(f"{POD}.containers.0.lifecycle"), "slice: preStop must wait until idle, for drain_timeout_s 600 at"),
    (V6E, put("rayClusterConfig.rayVersion", "2.9.0"), "rayVersion is 2.9.0, but pyproject.toml asks for 2.60"),
    (JOB, put("rayClusterSpec.workerGroupSpecs.0.numOfHosts", 2), "numOfHosts is 2, but qwen3_30b_a3b_v6e16.yaml asks"),
    (JOB, put("entrypoint", "python x.py --config /app/configs/a.yaml"), "entrypoint: --config is /app/configs/a.yaml"),
    (
        JOB,
        put("entrypoint", "python x.py --config /app/configs/a.yaml --out /rollouts2/x"),
        "--out /rollouts2/x is on no",
    ),
]


@pytest.mark.parametrize(("name", "change", "message"), AT_ODDS)
def test_what_does_not_agree_is_named_with_the_number_to_write(name, change, message):
    found = complaints(Manifest(changed(name, change)))
    assert any(message in line for line in found), found


@pytest.mark.parametrize("name", SERVED)
def test_what_is_served_is_an_application_of_this_package(name):
    (application,) = yaml.safe_load(Manifest.read(name).spec["serveConfigV2"])["applications"]
    assert application["import_path"] == f"{build.__module__}:{build.__name__}"
    assert isinstance(build(application["args"]), Application)


@pytest.mark.parametrize("name", JOBS)
def test_a_job_runs_a_command_line_that_the_rollout_job_takes(name):
    manifest = Manifest.read(name)
    python, option, module, *arguments = shlex.split(manifest.spec["entrypoint"])
    assert (python, option, module) == ("python", "-m", batch_job.__name__)
    parser = argparse.ArgumentParser()
    batch_job.add_arguments(parser)
    options = parser.parse_args(arguments)
    assert options.config.name == manifest.config_path.name and options.url is None


def test_one_image_is_named_everywhere():
    images = {
        container["image"]
        for name in ALL
        for pod in Manifest.read(name).pods.values()
        for container in pod["spec"]["containers"]
    }
    assert len(images) == 1


def test_nothing_in_the_folder_is_a_secret():
    paths = list(FOLDER.parent.rglob("*.yaml"))
    assert {path.name for path in paths} >= {*ALL, "environment.yaml", "volumes.yaml"}
    for path in paths:
        assert all(document.get("kind") != "Secret" for document in read_all(path))


def test_every_host_can_read_what_is_shared():
    claims, config_maps = shared("PersistentVolumeClaim"), shared("ConfigMap")
    assert claims and config_maps
    for claim in claims.values():
        assert claim["apiVersion"] == "v1" and claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for config_map in config_maps.values():
        assert all(isinstance(value, str) for value in config_map["data"].values())


def test_the_download_fills_the_directory_that_is_served():
    """By the image of the manifests, as their user, on their claim, with a token that may be missing."""
    (job,) = read_all(FILES["job-download.yaml"])
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    served = Manifest.read(V6E)
    head = container_of(served.pods["head"])
    assert container["image"] == head["image"]
    assert pod["securityContext"] == served.pods["head"]["spec"]["securityContext"]
    ((mount,), (volume,)) = container["volumeMounts"], pod["volumes"]
    assert volume["persistentVolumeClaim"] == {"claimName": "rayserve-moe-models"} and not mount.get("readOnly")
    program, verb, model, option, target = container["command"]
    assert (program, verb, option) == ("hf", "download", "--local-dir")
    assert target == served.settings.model.path and target.startswith(f"{mount['mountPath']}/")
    assert hub_model(model) is not None and model.partition("/")[2] == Path(target).name
    given = environment_of(container)
    assert given["HF_HUB_OFFLINE"] == "0" and given["HF_TOKEN"]["secretKeyRef"]["optional"] is True


def test_a_bucket_stands_in_for_the_claim_of_the_models():
    """Under the name that the manifests mount, bound to the volume beside it, and read only."""
    volume, claim = read_all(FILES["weights-bucket.yaml"])
    assert claim["metadata"] == {"name": "rayserve-moe-models"} == {"name": claim["spec"]["volumeName"]}
    assert volume["metadata"]["name"] == claim["spec"]["volumeName"]
    assert volume["spec"]["csi"]["driver"] == "gcsfuse.csi.storage.gke.io" and volume["spec"]["csi"]["readOnly"] is True
    for same in ("accessModes", "storageClassName"):
        assert volume["spec"][same] == claim["spec"][same]
    assert claim["spec"]["resources"]["requests"] == volume["spec"]["capacity"]


def test_every_tpu_config_names_a_slice_that_exists():
    paths = set((ROOT / "configs").glob("*_v*.yaml"))
    assert paths >= {Manifest.read(name).config_path for name in ALL}
    for path in paths:
        assert settings_from_yaml(path).cluster.tpu_topology, path.name
