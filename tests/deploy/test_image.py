"""The image has what the manifests run, from files that exist, and nothing that should stay outside."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from rayserve_moe.config.load import settings_from
from rayserve_moe.config.settings import ClusterSettings
from rayserve_moe.serving.start.options import add_arguments, config_of
from rayserve_moe.tools import build_kernels
from tests.deploy.manifests import JOBS, ROOT, SERVED, Manifest, container_of

DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()
LINES = [
    line.split(maxsplit=1) for line in DOCKERFILE.replace("\\\n", "").splitlines() if line and not line.startswith("#")
]
IGNORED = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
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
    assert user == ["1000"]
    after = [word for word, _ in LINES[[word for word, _ in LINES].index("USER") :]]
    assert "COPY" not in after and "RUN" not in after
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


def instruction(name):
    (rest,) = (rest for word, rest in LINES if word == name)
    return rest


def test_kernels_are_built_where_the_installed_package_searches_them():
    """Not in the folder of the sources: Python would find those first."""
    runs = [(word, rest) for word, rest in LINES if word in ("WORKDIR", "RUN")]
    (at,) = (place for place, (word, rest) in enumerate(runs) if "build_kernels" in rest)
    assert runs[at][1] == f"python -m {build_kernels.__name__} --all" and runs[at - 1] == ("WORKDIR", "/")


def test_the_build_is_sent_what_is_copied_and_nothing_else():
    """`.dockerignore` refuses everything first; what it takes back is what COPY names."""
    assert IGNORED[0] == "*"
    assert {line.removeprefix("!") for line in IGNORED if line.startswith("!")} == set(COPIED)
    assert all(
        line in {"**/__pycache__", build_kernels.SHIPPED.relative_to(ROOT).as_posix()}
        for line in IGNORED[1:]
        if line[0] != "!"
    )


def test_the_image_serves_by_itself_at_the_port_that_it_exposes_and_asks():
    command = json.loads(instruction("ENTRYPOINT")) + json.loads(instruction("CMD"))
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert command[0] in scripts and command[1] == "serve"
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    config = config_of(parser.parse_args(command[2:]))
    assert isinstance(config, dict), "a model is served, not a config file"
    assert config["http_options"]["host"] == "0.0.0.0", "127.0.0.1 in a container is reached by nobody"
    assert str(config["http_options"]["port"]) == instruction("EXPOSE")
    settings = settings_from(config["applications"][0]["args"])
    assert settings.model.path == "trained:calculator" and settings.replay.enabled
    published = re.search(r"docker run .*-p (\d+):(\d+)", DOCKERFILE)
    assert published and published[2] == instruction("EXPOSE")


@pytest.mark.parametrize("status", [200, 503])
def test_the_health_check_succeeds_while_health_is_200(status):
    """Its program runs here, against a server of this test in place of the image's."""
    options, _, check = instruction("HEALTHCHECK").partition("CMD ")
    start_s = {"m": 60, "s": 1}[re.search(r"--start-period=(\d+)([ms])", options)[2]] * int(
        re.search(r"--start-period=(\d+)", options)[1]
    )
    assert start_s >= ClusterSettings().start_timeout_s
    _, option, program = json.loads(check)
    asked = []

    class Health(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_):
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Health) as server:
        answering = Thread(target=server.handle_request)
        answering.start()
        done = subprocess.run([sys.executable, option, program.replace(":8000", f":{server.server_port}")], check=False)
        answering.join()
    assert asked == ["/health"] and (done.returncode == 0) == (status == 200)
