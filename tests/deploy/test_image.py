"""The image has what the manifests run, from files that exist, and nothing that should stay outside."""

from __future__ import annotations

import shlex
import tomllib

import pytest

from tests.deploy.manifests import JOBS, ROOT, SERVED, Manifest, container_of

LINES = [
    line.split(maxsplit=1)
    for line in (ROOT / "deploy/Dockerfile").read_text().splitlines()
    if line and not line.startswith("#")
]
COPIED = {
    source: target
    for word, rest in LINES
    if word == "COPY" and not rest.startswith("--from")
    for *sources, target in [rest.split()]
    for source in sources
}
BUILT_FROM = {"pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "src"}
SHIPPED = {"configs", "deploy/wait_until_idle.py"}


def in_image(path: str) -> str:
    """The file of the repository that lies at a path of the image."""
    relative = path.removeprefix("/app/")
    assert relative != path
    return relative if relative.startswith("configs/") else f"deploy/{relative}"


def test_what_is_copied_is_there_and_is_no_more_than_needed():
    assert set(COPIED) == BUILT_FROM | SHIPPED
    assert all((ROOT / source).exists() for source in COPIED)


def test_the_package_is_built_from_what_is_copied():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    hatch = project["tool"]["hatch"]
    needed = [hatch["version"]["path"], *hatch["build"]["targets"]["wheel"]["packages"]]
    needed += [project["project"][key] for key in ("readme",) if key in project["project"]]
    needed += [*project["project"]["license-files"], *hatch["build"]["targets"]["wheel"]["artifacts"]]
    needed += ["hatch_build.py"] * ("custom" in hatch["build"]["targets"]["wheel"]["hooks"])
    assert all(path.split("/")[0] in BUILT_FROM for path in needed)
    (install,) = (rest for word, rest in LINES if word == "RUN" and "pip install" in rest)
    (extras,) = (word.strip(".[]").split(",") for word in shlex.split(install) if word.startswith("."))
    assert extras == ["tpu", "gcs"] and set(extras) <= set(project["project"]["optional-dependencies"])


def test_the_python_of_the_image_is_one_the_package_runs_on():
    bases = {rest.split(" AS ")[0] for word, rest in LINES if word == "FROM"}
    assert bases == {"python:3.11-slim"}


def test_nobody_is_root():
    user = [rest for word, rest in LINES if word == "USER"]
    assert user[-1:] == ["1000"] and LINES[-1][0] == "USER"
    for name in (*SERVED, *JOBS):
        for pod in Manifest.read(name).pods.values():
            assert (
                pod["spec"]["securityContext"]["runAsNonRoot"] and pod["spec"]["securityContext"]["runAsUser"] == 1000
            )
            assert not container_of(pod)["securityContext"]["allowPrivilegeEscalation"]


def test_the_image_holds_no_secret():
    for word, rest in LINES:
        assert word != "ARG"
        assert not any(part in rest.lower() for part in ("token", "key", "password", "secret")), rest


@pytest.mark.parametrize("name", [*SERVED, *JOBS])
def test_what_pods_run_is_in_the_image(name):
    manifest = Manifest.read(name)
    if manifest.is_service:
        commands = [container_of(pod)["lifecycle"]["preStop"]["exec"]["command"] for pod in manifest.pods.values()]
    else:
        commands = [shlex.split(manifest.spec["entrypoint"])]
    paths = [word for command in commands for word in command if word.startswith("/app/")]
    assert paths
    for path in paths:
        assert (ROOT / in_image(path)).is_file()
        assert any(in_image(path).startswith(source) for source in COPIED)
