"""The manifests of `deploy/kuberay`, and what must hold between them, the configs they name and the package.

Each check takes one manifest and yields what is wrong with it, in words that name the place and the number to write.
"""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from ray._private import ray_constants

from rayserve_moe.config.load import settings_from_yaml
from rayserve_moe.config.settings import Settings
from rayserve_moe.config.topology import TpuSlice, slice_for
from rayserve_moe.serving.start.command import DEFAULTS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kuberay"
FILES = {path.name: path for path in FOLDER.rglob("*.yaml") if path.name != "kustomization.yaml"}
"""Manifests by name; each lies in the folder of its kustomization."""
SERVED = tuple(sorted(name for name in FILES if name.startswith("rayservice-")))
JOBS = tuple(sorted(name for name in FILES if name.startswith("rayjob-")))

ACCELERATORS = {
    "v4": "tpu-v4-podslice",
    "v5e": "tpu-v5-lite-podslice",
    "v5p": "tpu-v5p-slice",
    "v6e": "tpu-v6e-slice",
    "v7x": "tpu7x",
}
"""What GKE calls a generation in the label `cloud.google.com/gke-tpu-accelerator`."""

ON_A_SLICE = {"RAY_AUTH_MODE": "token", "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": None}
"""Variables of the start command that a slice needs otherwise: Serve's own draining period, in
which a load balancer notices. `JAX_PLATFORMS` depends on the pod."""

SLOWEST_STEP_S = 0.05
"""A decode step of either manifest is 15 ms by its roofline; a prompt may share it."""

RAY_DRAINS_S = ray_constants.RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S
"""How long Ray itself goes on after the signal to stop, which comes after `preStop`."""

Document = dict[str, Any]


def read_all(path: Path) -> list[Document]:
    """All documents of a YAML file."""
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


@functools.cache
def shared(kind: str) -> dict[str, Document]:
    """The documents of one kind that manifests refer to, by name."""
    documents = [each for name in ("environment.yaml", "volumes.yaml", "claim.yaml") for each in read_all(FILES[name])]
    return {document["metadata"]["name"]: document for document in documents if document["kind"] == kind}


@dataclass(frozen=True)
class Manifest:
    """A RayService or RayJob with everything it refers to."""

    document: Document

    @classmethod
    def read(cls, name: str) -> Manifest:
        (document,) = read_all(FILES[name])
        return cls(document)

    @property
    def is_service(self) -> bool:
        return self.document["kind"] == "RayService"

    @property
    def spec(self) -> Document:
        return self.document["spec"]

    @property
    def cluster(self) -> Document:
        return self.spec["rayClusterConfig" if self.is_service else "rayClusterSpec"]

    @property
    def groups(self) -> list[Document]:
        return self.cluster["workerGroupSpecs"]

    @property
    def pods(self) -> dict[str, Document]:
        """Pod templates: `head`, and each group of workers by its name."""
        return {"head": self.cluster["headGroupSpec"]["template"]} | {
            group["groupName"]: group["template"] for group in self.groups
        }

    @property
    def config_path(self) -> Path:
        """The Serve config that the manifest says it serves."""
        return ROOT / self.document["metadata"]["annotations"]["rayserve-moe/config"]

    @cached_property
    def settings(self) -> Settings:
        return settings_from_yaml(self.config_path)

    @cached_property
    def tpu(self) -> TpuSlice:
        parallel = self.settings.parallel
        return slice_for(self.settings.cluster, num_hosts=parallel.num_hosts, num_slices=parallel.num_slices)


def container_of(pod: Document) -> Document:
    """The Ray container: the operator takes the first one."""
    return pod["spec"]["containers"][0]


def environment_of(container: Document) -> dict[str, Any]:
    """Variables of a container, those of its config maps included; a value from elsewhere stays a mapping."""
    values: dict[str, Any] = {}
    for source in container.get("envFrom", ()):
        values |= shared("ConfigMap")[source["configMapRef"]["name"]]["data"]
    return values | {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container.get("env", ())}


def check_slice(manifest: Manifest) -> Iterator[str]:
    """Hosts, chips and node labels are those of the slice that the config asks for."""
    tpu, parallel = manifest.tpu, manifest.settings.parallel
    asked = f"{manifest.config_path.name} asks for {tpu.version} {tpu.topology}, which is {tpu}"
    for group in manifest.groups:
        name, pod = f"worker group {group['groupName']}", group["template"]
        if (hosts := group.get("numOfHosts", 1)) != tpu.num_hosts:
            yield f"{name}: numOfHosts is {hosts}, but {asked}: write {tpu.num_hosts}"
        replicas = {group.get(key) for key in ("replicas", "minReplicas", "maxReplicas")}
        if replicas != {parallel.num_slices}:
            yield f"{name}: replicas, minReplicas and maxReplicas must be num_slices {parallel.num_slices}"
        for kind, amounts in container_of(pod)["resources"].items():
            if (chips := amounts.get("google.com/tpu")) != str(tpu.chips_per_host):
                yield f"{name}: {kind} of google.com/tpu is {chips}, but {asked}: write {tpu.chips_per_host}"
        labels = {
            "cloud.google.com/gke-tpu-accelerator": ACCELERATORS[tpu.version],
            "cloud.google.com/gke-tpu-topology": tpu.topology,
        }
        for label, value in labels.items():
            if (selected := pod["spec"].get("nodeSelector", {}).get(label)) != value:
                yield f"{name}: nodeSelector {label} is {selected}, but {asked}: write {value}"


def check_config(manifest: Manifest) -> Iterator[str]:
    """What is served, or rolled out, is what the named file says."""
    name = manifest.config_path.name
    if not manifest.is_service:
        words = shlex.split(manifest.spec["entrypoint"])
        if (given := words[words.index("--config") + 1]) != f"/app/configs/{name}":
            yield f"entrypoint: --config is {given}, but the manifest names {name}: write /app/configs/{name}"
        return
    inline, file = yaml.safe_load(manifest.spec["serveConfigV2"]), yaml.safe_load(manifest.config_path.read_text())
    arguments = [document["applications"][0].pop("args") for document in (inline, file)]
    for place, (ours, theirs) in {"": (inline, file), "args.": arguments}.items():
        for key in sorted({*ours, *theirs}):
            if ours.get(key) != theirs.get(key):
                yield f"serveConfigV2: {place}{key} is {ours.get(key)!r}, but {theirs.get(key)!r} in {name}"


def check_environment(manifest: Manifest) -> Iterator[str]:
    """Every container has the variables that the start command sets, with its values except where a slice differs."""
    for name, pod in manifest.pods.items():
        wanted = DEFAULTS | ON_A_SLICE | {"JAX_PLATFORMS": "cpu" if name == "head" else "tpu,cpu"}
        given = environment_of(container_of(pod))
        for variable, value in wanted.items():
            if given.get(variable) != value:
                yield f"{name}: {variable} is {given.get(variable)!r}, not {value!r}"


def check_secrets(manifest: Manifest) -> Iterator[str]:
    """The token that the operator uses is the one that Ray asks for, and no secret is written down."""
    options = manifest.cluster.get("authOptions", {})
    if options.get("mode") != "token" or not options.get("secretName"):
        yield "authOptions: mode must be token, with secretName: the operator must know the token to deploy anything"
    keys = {"RAY_AUTH_TOKEN": "auth_token"} | ({"RAYSERVE_MOE_API_KEY": "api_key"} if manifest.is_service else {})
    for name, pod in manifest.pods.items():
        given = environment_of(container_of(pod))
        for variable, key in keys.items():
            wanted = {"secretKeyRef": {"name": options.get("secretName"), "key": key}}
            if given.get(variable) != wanted:
                yield f"{name}: {variable} must come from the secret {options.get('secretName')}, key {key}"


def check_volumes(manifest: Manifest) -> Iterator[str]:
    """Weights, compiled programs and rollouts lie on claims that exist and are mounted."""
    read_only = {"/models"}
    for name, pod in manifest.pods.items():
        claims = {volume["name"]: volume["persistentVolumeClaim"]["claimName"] for volume in pod["spec"]["volumes"]}
        container = container_of(pod)
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        for path, mount in mounts.items():
            if claims.get(mount["name"]) not in shared("PersistentVolumeClaim"):
                yield f"{name}: {path} is on no claim of volumes.yaml"
            if mount.get("readOnly", False) != (path in read_only):
                yield f"{name}: {path} must {'' if path in read_only else 'not '}be read only"
        needed = {"model_path": manifest.settings.model.path}
        needed["XDG_CACHE_HOME"] = str(environment_of(container).get("XDG_CACHE_HOME"))
        if not manifest.is_service:
            words = shlex.split(manifest.spec["entrypoint"])
            needed |= {option: words[words.index(option) + 1] for option in ("--prompts", "--out") if option in words}
        for what, path in needed.items():
            if not any(Path(path).is_relative_to(mount) for mount in mounts):
                yield f"{name}: {what} {path} is on no volume"


def check_ports_and_probes(manifest: Manifest) -> Iterator[str]:
    """Each pod has both probes and the port of the config; a worker that serves is Ready by its proxy alone."""
    port = yaml.safe_load(manifest.config_path.read_text())["http_options"]["port"]
    for name, pod in manifest.pods.items():
        container = container_of(pod)
        ports = {entry["name"]: entry["containerPort"] for entry in container["ports"]}
        if manifest.is_service and ports.get("serve") != port:
            yield f"{name}: port serve is {ports.get('serve')}, but http_options.port of the config is {port}"
        if name != "head" and "mxla" not in ports:
            yield f"{name}: port mxla is missing: libtpu of other hosts asks for it"
        ready = ("/-/healthz", "serve") if manifest.is_service and name != "head" else ("/api/healthz", 52365)
        for probe, wanted in {"livenessProbe": ("/api/healthz", 52365), "readinessProbe": ready}.items():
            asked = container.get(probe, {}).get("httpGet", {})
            if (asked.get("path"), asked.get("port")) != wanted:
                yield f"{name}: {probe} must ask {wanted[0]} at port {wanted[1]}"


def check_drain(manifest: Manifest) -> Iterator[str]:
    """An answer that has begun can end: the config's drain time is kept at every place that could cut it short."""
    if not manifest.is_service:
        return
    drain_s = manifest.settings.server.drain_timeout_s
    longest_s = manifest.settings.model.max_model_len * SLOWEST_STEP_S
    if drain_s < longest_s:
        yield f"drain_timeout_s {drain_s:g} is shorter than the longest answer, {longest_s:g} s"
    delay_s = manifest.spec.get("rayClusterDeletionDelaySeconds", 60)
    if delay_s < drain_s:
        yield f"rayClusterDeletionDelaySeconds is {delay_s}, shorter than drain_timeout_s {drain_s:g}"
    for name, pod in manifest.pods.items():
        grace_s, needed_s = pod["spec"].get("terminationGracePeriodSeconds", 30), drain_s + RAY_DRAINS_S
        if grace_s <= needed_s:
            yield f"{name}: terminationGracePeriodSeconds is {grace_s}, but drain_timeout_s and Ray need {needed_s:g}"
        stop_s = int(environment_of(container_of(pod)).get("RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S", 120))
        if stop_s < drain_s:
            yield f"{name}: RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S is {stop_s}, shorter than drain_timeout_s {drain_s:g}"
        command = container_of(pod).get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
        if command != ["python", "/app/wait_until_idle.py", "--limit-s", f"{drain_s:g}"]:
            yield f"{name}: preStop must wait until idle, for drain_timeout_s {drain_s:g} at most"


def check_ray_version(manifest: Manifest) -> Iterator[str]:
    """The operator decides by this version which probes and tokens there are."""
    (pinned,) = re.findall(r'"ray\[serve\]==(\d+\.\d+)\.\*"', (ROOT / "pyproject.toml").read_text())
    if (version := manifest.cluster.get("rayVersion", "")).rpartition(".")[0] != pinned:
        yield f"rayVersion is {version}, but pyproject.toml asks for {pinned}"


CHECKS = (
    check_slice,
    check_config,
    check_environment,
    check_secrets,
    check_volumes,
    check_ports_and_probes,
    check_drain,
    check_ray_version,
)


def complaints(manifest: Manifest) -> list[str]:
    """All that is wrong with a manifest."""
    return [line for check in CHECKS for line in check(manifest)]
