"""What cannot be served is refused in one line by the command itself, before anything is started."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from ray.serve.schema import (
    DeploymentSchema,
    HTTPOptionsSchema,
    ServeApplicationSchema,
    ServeDeploySchema,
    gRPCOptionsSchema,
)

from rayserve_moe import cli
from rayserve_moe.checkpoints.model_path import TRAINED
from rayserve_moe.checkpoints.synthetic import FAMILY_PRESETS, PRESETS
from rayserve_moe.config.model_names import SYNTHETIC_NAMES
from rayserve_moe.serving.start.deployment import cause_of
from rayserve_moe.serving.start.model_check import check_models
from rayserve_moe.serving.start.validation import (
    APPLICATION_KEYS,
    DEPLOYMENT_KEYS,
    GRPC_OPTIONS_KEYS,
    HTTP_OPTIONS_KEYS,
    TOP_KEYS,
    as_deployed,
    check_config,
)
from tests.support.checkpoints.broken_checkpoints import WAYS, broken_copy

ARGS = {"model_path": "trained:calculator", "max_model_len": 256}


def config(**changes: object) -> dict:
    application = {"name": "moe", "route_prefix": "/", "import_path": "rayserve_moe.serving.app:build", "args": ARGS}
    document = {"http_options": {"host": "127.0.0.1", "port": 8000}, "applications": [application]}
    for place, value in changes.items():
        *parents, last = place.split("__")
        target = document
        for name in parents:
            target = target[int(name) if name.isdigit() else name]
        if value is None:
            del target[last]
        else:
            target[last] = value
    return document


@pytest.fixture
def root():
    """A folder whose name is short, as those of sockets have to be."""
    with tempfile.TemporaryDirectory(prefix="s-", dir="/tmp") as path:
        yield path


@pytest.fixture
def refused(tmp_path, root, capsys, monkeypatch):
    """Call the command; returns the one line it ends with. Starting anything fails the test."""

    def never(*_: object) -> None:
        raise AssertionError("the command has started something")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "made for this test alone")
    monkeypatch.setenv("RAY_TMPDIR", str(root))
    monkeypatch.setattr(os, "execve", never)
    monkeypatch.setattr(subprocess, "Popen", never)

    def call(document: object) -> str:
        path = tmp_path / "serve.yaml"
        path.write_text(document if isinstance(document, str) else yaml.safe_dump(document))
        assert cli.main(["serve", str(path)]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("rayserve-moe serve: ")
        return line

    return call


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"applications__0__args": {**ARGS, "max_model_length": 5}}, "did you mean 'max_model_len'?"),
        ({"applications__0__args": {"model_path": "/no/such/model"}}, "/no/such/model"),
        ({"applications__0__import_path": "some.other:app"}, "no application has import_path"),
        ({"http_option": {"port": 1}}, "http_option: unknown key; did you mean 'http_options'?"),
        ({"http_options__prt": 1}, "http_options.prt: unknown key; did you mean 'port'?"),
        ({"applications__0__arg": {}}, "applications.0.arg: unknown key; did you mean 'args'?"),
        ({"applications__0__deployments": [{"nme": "moe-server"}]}, "deployments.0.nme: unknown key; did you mean"),
        ({"http_options__port": "many"}, "http_options.port must be an integer, found 'many'"),
        ({"http_options__port": 10**6}, "http_options.port must lie in [1, 65535], found 1000000"),
        ({"http_options__host": "192.0.2.1"}, "http_options 192.0.2.1, port 8000: Cannot assign requested address"),
        ({"http_options__host": "no.such.host.invalid"}, "http_options no.such.host.invalid, port 8000: "),
        ({"applications": None}, "applications must be a list"),
        ({"applications__0__import_path": None}, "import_path"),
        ({"applications": [5]}, "applications.0"),
        ({"applications": "moe"}, "applications must be a list"),
        ({"applications__0__args": 5}, "applications.0.args: must be a mapping"),
        ({"applications__0__deployments": [5]}, "applications.0.deployments.0"),
    ],
)
def test_a_wrong_config_is_one_line(refused, changes, message):
    assert message in refused(config(**changes))


@pytest.mark.parametrize(
    ("keys", "schema"),
    [
        (TOP_KEYS, ServeDeploySchema),
        (HTTP_OPTIONS_KEYS, HTTPOptionsSchema),
        (GRPC_OPTIONS_KEYS, gRPCOptionsSchema),
        (APPLICATION_KEYS, ServeApplicationSchema),
        (DEPLOYMENT_KEYS, DeploymentSchema),
    ],
)
def test_known_keys_are_those_of_serve(keys, schema):
    assert set(keys) == set(schema.model_fields)


HEAVY = ("ray", "jax", "transformers", "pydantic", "fastapi", "aiohttp")


SAID_AT_ONCE = (
    *(["--help"], [], ["serve", "--help"], ["serve", "/no/such.yaml"], ["serve", "synthetic:tiny", "--no-key=1"]),
    *(["chat", "--url", "http://127.0.0.1:9"], ["bench", "--dataset-path", "/no"], ["doctor"]),
    *(["compile-check", "--config", "/no.yaml"], ["plan-slice", "--config", "/no.yaml", "--traffic", "1/1/1"]),
    *(["rollout", "--prompts", "/no", "--out", "/no", "--url", "http://x"], ["scale", "nothing", "2"]),
    ["completion", "bash"],
)


def test_what_is_said_at_once_loads_no_heavy_library():
    """Neither help nor a refusal waits for seconds of imports: one process says all of it."""
    code = (
        "import sys\n"
        "from rayserve_moe import cli\n"
        "loaded = {}\n"
        f"for arguments in {SAID_AT_ONCE!r}:\n"
        "    sys.argv = ['rayserve-moe', *arguments]\n"
        "    try:\n        cli.main()\n    except SystemExit:\n        pass\n"
        f"    loaded |= {{name: arguments for name in {HEAVY!r} if name in sys.modules and name not in loaded}}\n"
        "print(loaded)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "{}"


@pytest.mark.parametrize("text", ["", "- 1\n", "applications: &a [*a]\n", "\0", "[" * 600])
def test_what_is_no_config_at_all_is_one_line(refused, text):
    refused(text)


@pytest.mark.parametrize(
    ("text", "line"),
    [("a: 1\n b: 2\n", 2), ("applications:\n  - name: x\n    args: {a: 1, b 2: [}\n", 3), ("a: [", 1)],
)
def test_wrong_yaml_is_shown_with_a_caret(tmp_path, capsys, text, line):
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    assert cli.main(["serve", str(path)]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(f"rayserve-moe serve: {path}, line {line}: ")
    assert said[1].strip() == text.splitlines()[line - 1].strip() and said[2].strip() == "^"


def test_a_name_that_is_no_model_lists_what_is_possible(capsys):
    assert cli.main(["serve", "qwen3-30b-a3b"]) == 1
    said = capsys.readouterr().err
    for possible in ("config.json", "organisation/name", "gs://", "trained:", "synthetic:", "calculator", "tiny"):
        assert possible in said
    assert "only compile-check and plan-slice take it" in said


def test_packaged_names_are_those_that_can_be_made():
    assert set(SYNTHETIC_NAMES) == {*PRESETS, *FAMILY_PRESETS}


def test_a_missing_file_is_one_line(capsys):
    assert cli.main(["serve", "/no/such/config.yaml"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "/no/such/config.yaml" in line


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "config.json"),
        ("config.json", "{", "config.json"),
        ("config.json", json.dumps({"architectures": ["LlamaForCausalLM"]}), "['LlamaForCausalLM']; supported: "),
        (
            "config.json",
            json.dumps({"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64}),
            "a dense model, and this server is for Mixture-of-Experts models; supported: ",
        ),
        ("tokenizer.json", None, "tokenizer.json"),
        ("tokenizer.json", "{}", "tokenizer"),
        ("model.safetensors", None, "safetensors"),
        ("model.safetensors", "broken", "safetensors"),
    ],
)
def test_an_unusable_checkpoint_is_one_sentence(tmp_path, file, content, message):
    model = tmp_path / "model"
    shutil.copytree(TRAINED["calculator"], model)
    (model / file).unlink()
    if content is not None:
        (model / file).write_text(content)
    assert message in fault_of({"model_path": str(model)})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({**ARGS, "max_model_len": 10**6}, "exceeds the checkpoint's"),
        ({"model_path": "trained:poet"}, "no trained checkpoint 'poet'"),
    ],
)
def test_settings_that_the_checkpoint_does_not_allow_are_one_sentence(arguments, message):
    assert message in fault_of(arguments)


def test_a_value_that_serve_refuses_is_one_sentence():
    with pytest.raises(ValueError, match="proxy_location: "):
        check_models(config(proxy_location="Nowhere"))


def fault_of(arguments: dict) -> str:
    """Return the error of the check of models for these settings."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011  checkpoints and settings have errors of their own
        check_models(config(applications__0__args=arguments))
    (line,) = str(caught.value).splitlines()
    return line


@pytest.mark.parametrize("way", ["tensor missing", "tensor too many", "wrong shape", "wrong dtype"])
def test_tensors_that_do_not_fit_the_config_are_one_sentence(tmp_path, way):
    """Before anything is deployed: a slice is not to be reserved for them."""
    model = broken_copy(TRAINED["calculator"], way, tmp_path / "model")
    line = fault_of({"model_path": str(model)})
    assert WAYS[way][1] in line and "the checkpoint does not fit its config" in line


def test_what_no_library_is_needed_for_is_refused_at_once(refused, tmp_path):
    elsewhere = "avx2" if platform.machine() == "aarch64" else "neon"
    assert f"has no level {elsewhere}: choose from" in refused(
        config(applications__0__args={**ARGS, "cpu_level": elsewhere})
    )
    assert "no such model; trained: takes calculator" in refused(
        config(applications__0__args={"model_path": "trained:poet"})
    )
    assert "no config.json in this directory" in refused(config(applications__0__args={"model_path": str(tmp_path)}))


def test_a_port_that_is_taken_is_named_with_its_owner(refused):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert f"port {port} of http_options is taken by process {os.getpid()}" in refused(
            config(http_options__port=port)
        )


def test_a_cluster_that_runs_already_is_not_for_this_command(refused, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert "RAY_ADDRESS is set" in refused(config())


def test_tokens_cannot_be_switched_off(refused, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert "RAY_AUTH_MODE is disabled" in refused(config())


def test_serve_gets_a_loopback_host_and_tries_a_constructor_once(tmp_path):
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(config(http_options__host="0.0.0.0")))
    checked = check_config(path)
    assert (checked.host, checked.port) == ("0.0.0.0", 8000)
    deployed = as_deployed(checked)
    assert deployed["http_options"] == {"host": "127.0.0.1", "port": 8000}
    (application,) = deployed["applications"]
    assert application["deployments"] == [{"name": "moe-server", "max_constructor_retry_count": 1}]
    assert application["args"] == ARGS


@pytest.mark.parametrize("path", sorted(Path("configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_of_ours_has_only_known_keys(path):
    document = yaml.safe_load(path.read_text())
    document["applications"][0]["args"] = ARGS
    assert check_config_of(document)


def check_config_of(document: dict) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "serve.yaml"
        path.write_text(yaml.safe_dump(document))
        return bool(check_config(path).settings)


def test_the_cause_of_a_traceback_is_its_last_sentence():
    message = """The deployment failed to start 1 times in a row. Error:
\x1b[36mray::ServeReplica:moe:moe-server.initialize_and_get_metadata()\x1b[39m (pid=1, ip=127.0.0.1)
  File "app.py", line 39, in __init__
    raise MemoryError
rayserve_moe.execution.memory.OutOfMemoryError: 5 GB of weights do not fit into 4 GB

The above exception was the direct cause of the following exception:

RuntimeError: Traceback (most recent call last):
  File "replica.py", line 1, in call
rayserve_moe.config.settings.SettingsError: num_pages 3 hold no sequence"""
    assert cause_of(message) == "SettingsError: num_pages 3 hold no sequence"
    assert cause_of("nothing of the kind") == "nothing of the kind"
