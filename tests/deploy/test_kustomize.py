"""The overlays of deploy/kuberay: one place names the image, and what they send is what the manifests say."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml

from tests.deploy import crds
from tests.deploy.kustomize import FILE, KustomizeError, containers_in, read, rendered
from tests.deploy.manifests import FILES, FOLDER, JOBS, ROOT, SERVED, read_all

OVERLAYS = sorted(path.parent.name for path in FOLDER.rglob(FILE) if path.parent.name != "image")
PLACEHOLDER = "registry.example.com/rayserve-moe"
YOURS = "europe-docker.pkg.dev/team/models/rayserve-moe"
OPERATE = (ROOT / "docs" / "operate" / "start.md").read_text(encoding="utf-8")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the folder, to change."""
    return Path(shutil.copytree(FOLDER, tmp_path / "kuberay"))


def change(folder: Path, **fields: object) -> None:
    file = folder / FILE
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), **fields}))


def images_of(folder: Path) -> set[str]:
    return {container["image"] for container in containers_in(rendered(folder))}


@pytest.mark.parametrize("name", OVERLAYS)
def test_no_manifest_keeps_the_placeholder_once_the_image_is_named(tree, name):
    (image,) = read(tree / "image", "Component")["images"]
    assert image["name"] == PLACEHOLDER
    change(tree / "image", images=[{**image, "newName": YOURS, "newTag": "7"}])
    assert images_of(tree / name) <= {f"{YOURS}:7"}


def test_every_manifest_with_a_container_is_in_an_overlay():
    sent = {document["metadata"]["name"] for name in OVERLAYS for document in rendered(FOLDER / name)}
    of_files = {document["metadata"]["name"] for path in FILES.values() for document in read_all(path)}
    others = {document["metadata"]["name"] for document in read_all(FOLDER / "ingress" / "gateway.yaml")}
    assert sent == of_files | others
    assert all(images_of(FOLDER / Path(FILES[name]).parent.name) for name in (*SERVED, *JOBS, "job-download.yaml"))


@pytest.mark.parametrize("name", [*SERVED, *JOBS])
def test_an_overlay_sends_what_the_operator_accepts(name, schemas):
    folder = FILES[name].parent
    (document,) = (each for each in rendered(folder) if each["kind"] in schemas)
    assert crds.complaints(document, schemas[document["kind"]]) == []


@pytest.mark.parametrize("name", [*SERVED, *JOBS, "job-download.yaml"])
def test_what_a_pod_mounts_and_reads_is_sent_with_it(name):
    """Secrets aside, which are made by hand."""
    documents = rendered(FILES[name].parent)
    sent = {(document["kind"], document["metadata"]["name"]) for document in documents}
    text = yaml.safe_dump(documents)
    claims = re.findall(r"claimName: (\S+)", text)
    maps = re.findall(r"configMapRef:\n\s+name: (\S+)", text)
    assert claims and {("PersistentVolumeClaim", claim) for claim in claims} <= sent
    assert {("ConfigMap", name) for name in maps} <= sent


def test_a_bucket_takes_the_place_of_the_claim(tree):
    resources = read(tree / "v6e-16", "Kustomization")["resources"]
    change(tree / "v6e-16", resources=[{"../models": "../bucket"}.get(name, name) for name in resources])
    claims = [each for each in rendered(tree / "v6e-16") if each["metadata"]["name"] == "rayserve-moe-models"]
    assert sorted(each["kind"] for each in claims) == ["PersistentVolume", "PersistentVolumeClaim"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"resources": ["../base", "../base"]}, "twice"),
        ({"resources": ["../base/environment.yaml"]}, "lies outside of the folder"),
        ({"resources": ["../image"]}, "not a Kustomization"),
        ({"components": ["../base"]}, "not a Component"),
        ({"ressources": []}, "unknown field ressources"),
        ({"images": [{"name": PLACEHOLDER, "newname": YOURS}]}, "unknown field of an image"),
    ],
)
def test_what_kustomize_would_refuse_is_refused(tree, fields, message):
    change(tree / "v6e-16", **fields)
    with pytest.raises(KustomizeError, match=message):
        rendered(tree / "v6e-16")


def test_the_page_applies_overlays_that_exist_and_waits_for_what_they_send():
    section = OPERATE.split("## First deployment")[1].split("\n## ")[0]
    folders = re.findall(r"kubectl apply -k (deploy/kuberay/\S+?)[\s`]", section)
    assert {"deploy/kuberay/download", "deploy/kuberay/v6e-16"} <= set(folders)
    sent = {
        (document["kind"].lower(), document["metadata"]["name"])
        for folder in folders
        for document in rendered(ROOT / folder)
    }
    waited = re.findall(r"kubectl wait .* (\w+)/([\w-]+)", section)
    assert len(waited) == 2 and set(waited) <= sent
    assert not re.findall(r"kubectl apply -f deploy/kuberay", section)


def test_tls_goes_to_the_service_of_a_deployment():
    """The operator names it after the RayService."""
    (name,) = {document["metadata"]["name"] for document in read_all(FILES["rayservice-v6e-16.yaml"])}
    service, port = f"{name}-serve-svc", 8000
    (ingress,) = rendered(FOLDER / "ingress")
    (rule,) = ingress["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    assert path["backend"]["service"] == {"name": service, "port": {"number": port}}
    gateway, route = read_all(FOLDER / "ingress" / "gateway.yaml")
    (listener,) = gateway["spec"]["listeners"]
    assert route["spec"]["rules"][0]["backendRefs"] == [{"name": service, "port": port}]
    (tls,) = ingress["spec"]["tls"]
    assert tls["hosts"] == [rule["host"]] == [listener["hostname"]] == route["spec"]["hostnames"]
    assert listener["tls"]["certificateRefs"] == [{"name": tls["secretName"]}]
