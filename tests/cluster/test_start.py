"""`rayserve-moe serve` as its users meet it: what it opens, how it drains, and that nothing is left of it."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from rayserve_moe.rollouts import load
from rayserve_moe.serving.start.processes import Process, all_processes, read_process, send
from tests.cluster.conftest import SETTINGS
from tests.support.cluster.ports import free_port
from tests.support.cluster.start_command import StartedServer, listening_elsewhere, started
from tests.support.serving.certificates import write_certificate
from tests.support.serving.http_client import wait_until

NUM_EACH = 16
MAX_TOKENS = 200
LONG_S = 120.0
MOST_LINES = 25


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose name is short, as those of sockets have to be."""
    with tempfile.TemporaryDirectory(prefix="s-", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
def settings(checkpoint: Path) -> dict[str, Any]:
    rows = {"max_running_requests": 2 * NUM_EACH, "precompile_bs_paddings": [2 * NUM_EACH], "num_pages": 500}
    return {**SETTINGS, **rows, "model_path": str(checkpoint), "served_model_name": "tiny", "cpu_kernels": "off"}


def ask(url: str, *, stream: bool) -> tuple[int, list[dict[str, Any]]]:
    """Send a request; returns the status and the answer, or the events of it."""
    sampling = {"max_new_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": [5, 6, 7], "sampling_params": sampling, "stream": stream}
    with httpx.Client(timeout=LONG_S) as client, client.stream("POST", f"{url}/generate", json=body) as response:
        if not stream or response.status_code != 200:
            return response.status_code, [json.loads(response.read())]
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return response.status_code, [json.loads(line) for line in lines[:-1]]


def post(url: str, path: str, **body: Any) -> None:
    httpx.post(f"{url}{path}", json=body, timeout=LONG_S).raise_for_status()


def hold_requests(url: str, asking: ThreadPoolExecutor) -> list[Future]:
    """Have streams and whole requests wait in an engine that is told to go on later."""
    post(url, "/pause_generation", mode="in_place")
    futures = [asking.submit(ask, url, stream=bool(number % 2)) for number in range(2 * NUM_EACH)]
    wait_until(lambda: loads(url)["num_waiting_reqs"] == 2 * NUM_EACH, within_s=LONG_S)
    return futures


def loads(url: str) -> dict[str, Any]:
    return httpx.get(f"{url}/v1/loads", timeout=LONG_S).json()


def refusal(url: str) -> httpx.Response | None:
    answer = httpx.post(
        f"{url}/generate", json={"input_ids": [5], "sampling_params": {"max_new_tokens": 0}}, timeout=LONG_S
    )
    return answer if answer.status_code == 503 else None


def alive(process: Process) -> bool:
    found = all_processes().get(process.pid)
    return found is not None and found.started == process.started and not found.has_ended


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def kill_all_but_haproxy(server: StartedServer) -> list[Process]:
    """Kill a start at once; returns the HAProxy processes left. A worker of Ray that notices would end them itself."""
    stopped: set[Process] = set()
    while running := {p for p in family_with_itself(server) if not is_haproxy(p)} - stopped:
        send(running, signal.SIGSTOP)
        stopped |= running
    found = [process for process in server.family() if is_haproxy(process)]
    send(stopped, signal.SIGKILL)
    server.wait()
    wait_until(lambda: not any(map(alive, stopped)), within_s=LONG_S)
    return [process for process in found if alive(process)]


def family_with_itself(server: StartedServer) -> list[Process]:
    return [process for process in (read_process(server.process.pid), *server.family()) if process is not None]


def is_haproxy(process: Process) -> bool:
    return process.arguments[0].endswith("/haproxy")


def assert_nothing_is_left(server: StartedServer, family: list[Process], ports: list[int]) -> None:
    assert [process for process in family if alive(process)] == []
    assert [port for port in ports if listens(port)] == []
    assert not server.state.exists()


@pytest.mark.slow
def test_a_drain_completes_what_runs_and_refuses_what_comes(folder, settings):
    """16 streams and 16 whole requests run when the server is told to stop. Strangers reach none of its ports."""
    with ThreadPoolExecutor(2 * NUM_EACH) as asking, started(folder, settings, port=free_port()) as server:
        server.wait_until_said("serving at")
        assert server.token.stat().st_mode & 0o777 == 0o600 and len(server.token.read_text()) == 64
        family, ports = server.family(), server.ports
        assert [title for title in listening_elsewhere(family).values() if "ServeReplica" not in title] == []
        futures = hold_requests(server.url, asking)
        post(server.url, "/continue_generation")
        post(server.url, "/pause_generation", mode="in_place")  # in the middle of their answers, if it comes in time
        server.stop()
        server.wait_until_said("draining")
        wait_until(lambda: refusal(server.url), within_s=LONG_S)
        refused = refusal(server.url)
        assert refused is not None and int(refused.headers["Retry-After"]) > 0
        assert refused.json()["error"]["code"] == "draining"
        assert httpx.get(f"{server.url}/health", timeout=LONG_S).status_code == 503
        post(server.url, "/continue_generation")
        for number, future in enumerate(futures):
            status, answers = future.result(timeout=LONG_S)
            assert status == 200
            assert len(answers[-1]["output_ids"]) == MAX_TOKENS, number
            assert answers[-1]["meta_info"]["finish_reason"]["type"] == "length"
        assert server.wait() == 0
        assert_nothing_is_left(server, family, ports)


@pytest.mark.slow
def test_what_still_runs_at_the_drain_timeout_ends_with_an_error(folder, settings):
    held = {**settings, "drain_timeout_s": 1}
    with ThreadPoolExecutor(2 * NUM_EACH) as asking, started(folder, held, port=free_port()) as server:
        server.wait_until_said("serving at")
        futures = hold_requests(server.url, asking)
        family, ports = server.family(), server.ports
        server.stop(signal.SIGINT)
        for future in futures:
            _, answers = future.result(timeout=LONG_S)
            assert answers[-1]["error"]["type"] == "service_unavailable_error"
        assert server.wait() == 1
        assert_nothing_is_left(server, family, ports)


@pytest.mark.slow
def test_a_second_signal_ends_everything_at_once(folder, settings):
    with ThreadPoolExecutor(2 * NUM_EACH) as asking, started(folder, settings, port=free_port()) as server:
        server.wait_until_said("serving at")
        futures = hold_requests(server.url, asking)
        family, ports = server.family(), server.ports
        server.stop(signal.SIGINT)
        server.wait_until_said("draining")
        server.stop(signal.SIGINT)
        assert server.wait() == 128 + signal.SIGINT
        assert_nothing_is_left(server, family, ports)
        assert all(future.exception(timeout=LONG_S) or future.result()[0] != 200 for future in futures)


@pytest.mark.slow
def test_two_servers_share_nothing_and_an_orphan_is_ended_by_the_next_start(folder, settings):
    """A killed start leaves HAProxy behind, on the port of the next start. Another server is untouched."""
    port = free_port()
    with started(folder, {**settings, "served_model_name": "other"}, port=free_port()) as other:
        with started(folder, settings, port=port) as first:
            for server in (first, other):
                server.wait_until_said("serving at")
            assert [name_of(server) for server in (first, other)] == ["tiny", "other"]
            assert not set(first.ports) & set(other.ports)
            orphans = kill_all_but_haproxy(first)
        assert orphans and listens(port)
        with started(folder, settings, port=port) as again:
            again.wait_until_said("serving at")
            assert not any(map(alive, orphans))
            assert [name_of(server) for server in (again, other)] == ["tiny", "other"]


@pytest.mark.slow
def test_a_model_that_does_not_load_ends_the_command_with_its_sentence(folder, settings):
    """What can only be found out while loading is said once, not after several tries."""
    with started(folder, {**settings, "expert_backend": "local", "devices_per_host": 2}, port=free_port()) as server:
        assert server.wait() == 1
        assert "SettingsError: expert_backend local needs a single device" in server.sentences[-1], server.sentences
        assert "Traceback" not in server.sentences[-1]


@pytest.mark.slow
def test_the_console_of_a_start_is_short_and_our_own(folder, settings):
    """Ray, Serve and HAProxy write to files; the last lines say what to do, and that it has stopped."""
    with started(folder, settings, port=free_port()) as server:
        server.wait_until_said("serving at")
        wait_until(lambda: "stop     Ctrl-C" in server.output, within_s=LONG_S)
        lines = server.output.splitlines()
        assert len(lines) <= MOST_LINES, lines
        assert all(line.startswith(("rayserve-moe serve: ", "  ")) for line in lines), lines
        assert any("reading weights" in line for line in lines)
        assert f"{server.url}/experts" in server.output
        logs = server.state.with_name(f"logs-{server.port}")
        assert (logs / "ray.log").stat().st_size and any((logs / "ray").glob("worker*"))
        server.stop(signal.SIGINT)
        assert server.wait() == 0
        assert server.output.splitlines()[-1] == "rayserve-moe serve: stopped"


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["starting Ray", "starting Ray Serve", "loading"])
def test_a_signal_at_any_stage_of_a_start_ends_it_in_silence(folder, settings, stage):
    with started(folder, settings, port=free_port()) as server:
        server.wait_until_said(stage)
        family = server.family()
        server.stop(signal.SIGINT)
        assert server.wait() == 0
        assert server.output.splitlines()[-1] == "rayserve-moe serve: stopped"
        assert "Traceback" not in server.output and "***" not in server.output
        assert [process for process in family if alive(process)] == []


@pytest.mark.slow
def test_workers_are_replaced_after_the_process_that_forks_them_was_killed(folder, settings):
    with started(folder, settings, port=free_port()) as server:
        server.wait_until_said("serving at")
        family = server.family()
        forking = [process for process in family if "rayserve_moe.serving.start.fork_server" in process.arguments]
        replicas = [process for process in family if process.title.startswith("ray::ServeReplica")]
        send(forking + replicas, signal.SIGKILL)
        server.wait_until_said(f"fork_server has ended (signal {signal.SIGKILL:d})")
        wait_until(lambda: not any(map(alive, replicas)), within_s=LONG_S)
        wait_until(lambda: answers(server.url), within_s=LONG_S)


def answers(url: str) -> bool:
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}
    try:
        return httpx.post(f"{url}/generate", json=body, timeout=LONG_S).status_code == 200
    except httpx.HTTPError:
        return False


def name_of(server: StartedServer) -> str:
    return httpx.get(f"{server.url}/v1/models", timeout=LONG_S).json()["data"][0]["id"]


@pytest.mark.slow
def test_the_printed_line_for_jobs_works_as_it_is_pasted(folder, settings):
    """From a directory with prompts, without an active environment: only the token is where this test put it."""
    (folder / "work").mkdir()
    prompts = [{"input_ids": [5 + number, 6, 7], "sampling_params": {"max_new_tokens": 8}} for number in range(4)]
    (folder / "work" / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    with started(folder, {**settings, "enable_return_routed_experts": True}, port=free_port()) as server:
        server.wait_until_said("serving at")
        wait_until(lambda: "  stop " in server.output, within_s=LONG_S)
        (line,) = (line for line in server.output.splitlines() if line.startswith("  jobs "))
        dashboard = int(line.split("--address http://127.0.0.1:")[1].split()[0])
        wait_until(lambda: listens(dashboard), within_s=LONG_S)
        environment = {"PATH": os.defpath, "HOME": str(folder), "RAY_AUTH_TOKEN_PATH": str(server.token)}
        pasted = ["bash", "-c", line.split(maxsplit=1)[1]]
        done = subprocess.run(
            pasted,
            cwd=folder / "work",
            env=environment,
            capture_output=True,
            text=True,
            timeout=10 * LONG_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert len(load(folder / "rollouts")) == 8 * len(prompts)


@pytest.mark.slow
def test_clients_and_commands_reach_a_server_over_tls(folder, settings):
    """By a certificate that signs itself: the start's own checks do not need to trust it, everyone else does."""
    certificate, key = write_certificate(folder)
    with started(folder, settings, port=free_port(), tls=(certificate, key)) as server:
        server.wait_until_said(f"serving at https://127.0.0.1:{server.port}")
        trusted = ssl.create_default_context(cafile=certificate)
        with httpx.Client(base_url=server.url, verify=trusted, timeout=LONG_S) as http:
            assert http.get("/health").status_code == http.get("/ready").status_code == 200
            assert http.get("/", headers={"accept": "text/html"}).text.startswith("<!doctype html>")
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=http)
            (chunk, *_, last) = client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "a"}],
                max_tokens=8,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            assert chunk.choices[0].delta.role == "assistant" and last.choices[0].finish_reason == "length"
        (folder / "prompts.jsonl").write_text('{"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4}}\n')
        job = ["--prompts", str(folder / "prompts.jsonl"), "--out", str(folder / "rollouts"), "--n", "2"]
        lengths = ["--num-prompts", "4", "--random-input-len", "6", "--random-output-len", "4", "--disable-tqdm"]
        for arguments in (["chat", "--max-tokens", "4"], ["bench", *lengths], ["rollout", *job]):
            done = subprocess.run(
                [sys.executable, "-m", "rayserve_moe.cli", *arguments, "--url", server.url],
                env={**os.environ, "SSL_CERT_FILE": str(certificate)},
                input="a\n",
                capture_output=True,
                text=True,
                timeout=LONG_S,
                check=False,
            )
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        assert len(load(folder / "rollouts")) == 2
        server.stop()
        assert server.wait() == 0
