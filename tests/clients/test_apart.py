"""Clients whose packages do not go with those of this one: each from an environment of its own, as a process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from rayserve_moe import Engine
from rayserve_moe.config.settings import ServerSettings
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.http import create_api
from tests.support.checkpoints.adapters import make_adapter
from tests.support.serving.http_server import running

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "apart"
LONGEST_S = 600
NUM_REQUESTS, NUM_TOKENS = 4, 8
CACHED = "models--local--tiny"
TINKER = ("tinker", "tinker_0.24")
"""The newest client, which takes protobuf alone, and the last one that trainers pin."""


def program_of(name: str, program: str) -> Path:
    """Where a program of a client's environment is, once it is installed."""
    return ROOT / f".venv-clients-{name}" / "bin" / program


# Before any fixture: a server takes its time to start.
pytestmark = pytest.mark.skipif(
    not any(program_of(name, "python").exists() for name in ("litellm", "instructor", "guidellm", "aiperf", *TINKER)),
    reason="`make clients` installs them",
)


def run(name: str, program: str, *arguments: str, **environment: str) -> str:
    """Run a program of a client's environment; returns what it writes."""
    path = program_of(name, program)
    if not path.exists():
        pytest.skip("`make clients` installs it")
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "TERM": "dumb", "HF_HUB_OFFLINE": "1"}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | quiet | environment
    asked = {"capture_output": True, "text": True, "timeout": LONGEST_S, "env": environment}
    done = subprocess.run([path, *arguments], check=False, **asked)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", ["litellm", "instructor"])
def test_a_client_gets_what_it_asks_for(url: str, tool_url: str, name: str) -> None:
    run(name, "python", str(SCRIPTS / f"ask_{name}.py"), url, tool_url)


@pytest.mark.parametrize("name", TINKER)
def test_tinker_samples_and_scores(url: str, engine: Engine, name: str) -> None:
    environment = {"TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0"}
    told = json.loads(run(name, "python", str(SCRIPTS / "ask_tinker.py"), url, "m", **environment))
    wanted = engine.generate(
        input_ids=told["prompt_ids"],
        max_new_tokens=5,
        sampling_seed=3,
        n=2,
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
    )
    assert told["model"] == "m" and told["reasons"] == ["length"] * 2
    assert told["tokens"] == [answer["output_ids"] for answer in wanted]
    assert told["many"] == [wanted[0]["output_ids"]] * 32
    first = wanted[0]["meta_info"]
    for logprobs, answer in zip(told["logprobs"], wanted, strict=True):
        own = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        assert logprobs == pytest.approx(own, rel=1e-5)
    for scored in (told["prompt"], told["scored"]):
        assert scored[0] is None
        assert scored[1:] == pytest.approx([entry[0] for entry in first["input_token_logprobs"][1:]], rel=1e-5)
    assert told["top"][0] is None
    top = [[entry[1] for entry in each] for each in first["input_top_logprobs"][1:]]
    assert [[pair[0] for pair in each] for each in told["top"][1:]] == top


@pytest.mark.parametrize("name", TINKER)
def test_tinker_samples_by_saved_weights(engine: Engine, checkpoint: Path, tmp_path: Path, name: str) -> None:
    """The adapter is merged, so the engine's own answers come from it too."""
    saved = "run-1/sampler_weights/step-1"
    make_adapter(checkpoint, "shared_outer").write(tmp_path / saved)
    state = ApiState(engine.loop, engine.tokenizer, ServerSettings(), weight_roots=(str(tmp_path),))
    environment = {"TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0"}
    assert engine.update_weights_from_disk(checkpoint).success
    sampling = {"input_ids": [10, 11, 12, 13], "max_new_tokens": 5, "temperature": 0.0}
    base = engine.generate(**sampling)
    with running(create_api(state)) as url:
        script = str(SCRIPTS / "ask_tinker_saved.py")
        told = json.loads(run(name, "python", script, url, f"tinker://{saved}", **environment))
    wanted = engine.generate(**sampling)
    assert engine.update_weights_from_disk(checkpoint).success
    assert told["tokens"] == wanted["output_ids"] != base["output_ids"]
    assert "no such weights" in told["refused"]


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm_counts_the_tokens_that_it_asked_for(url: str, checkpoint: Path, tmp_path: Path, route: str) -> None:
    out = tmp_path / "out.json"
    extras = {"body": {"min_tokens": NUM_TOKENS}}
    backend = {"kind": "openai_http", "target": url, "model": "m", "request_format": route, "extras": extras}
    run(
        "guidellm",
        "guidellm",
        "run",
        *("--backend", json.dumps(backend), "--tokenizer", f"kind=hf_auto,model={checkpoint}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=16,output_tokens={NUM_TOKENS}"),
        *("--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--output", f"kind=json,path={out}", "--disable-console"),
    )
    (measured,) = json.loads(out.read_text())["benchmarks"]
    requests = measured["requests"]
    assert not requests["errored"] and len(requests["successful"]) == NUM_REQUESTS
    assert {request["output_tokens"] for request in requests["successful"]} == {NUM_TOKENS}


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_aiperf_counts_the_tokens_that_it_asked_for(url: str, checkpoint: Path, tmp_path: Path, kind: str) -> None:
    """It takes a tokenizer from the hub's cache alone: this one has the tokenizer of the server."""
    snapshot = tmp_path / "hub" / CACHED / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for file in checkpoint.glob("*.json"):
        shutil.copy(file, snapshot)
    (tmp_path / "hub" / CACHED / "refs").mkdir()
    (tmp_path / "hub" / CACHED / "refs" / "main").write_text(snapshot.name)
    run(
        "aiperf",
        "aiperf",
        "profile",
        *("--url", url, "--model", "m", "--endpoint-type", kind, "--streaming", "--tokenizer", "local/tiny"),
        *("--request-count", str(NUM_REQUESTS), "--concurrency", "2", "--isl", "16", "--osl", str(NUM_TOKENS)),
        *("--extra-inputs", f"min_tokens:{NUM_TOKENS}", "--use-server-token-count"),
        *("--ui", "none", "--output-artifact-dir", str(tmp_path / "out")),
        HF_HUB_CACHE=str(tmp_path / "hub"),
    )
    measured = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert measured["request_count"]["avg"] == NUM_REQUESTS
    lengths = measured["output_sequence_length"]
    assert lengths["min"] == lengths["max"] == NUM_TOKENS
