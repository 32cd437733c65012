"""llama.cpp's server as a peer (see `process.py`): run by the Python of the folder that `install.py` made.

It is asked over the loop-back, and its own reuse of prompts is off.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gguf_file import write_gguf

HOST = "127.0.0.1"
NUM_SLOTS = 16
SIZES = ("--parallel", str(NUM_SLOTS), "--ctx-size", str(NUM_SLOTS * 1024), "--kv-unified", "--batch-size", "2048")
QUIET = ("--cache-ram", "0", "--ctx-checkpoints", "0", "--offline")
"""Nothing kept for later prompts: checkpoints of recurrent states would cut every prompt into three steps."""
WIDE = ("--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off")
"""Of a float32 checkpoint: the server's cache and its flash attention are in float16."""


def main() -> None:
    """Convert the model of the directory named first, serve it by the server of the folder named second.

    Its matrices are in Q8_0 where `int8` comes third. Runs until the input ends.
    """
    model, folder = map(Path, sys.argv[1:3])
    in_int8 = sys.argv[3:] == ["int8"]
    binary = folder / "build" / "bin" / "llama-server"
    cores, dtype = sorted(os.sched_getaffinity(0)), json.loads((model / "config.json").read_text())["dtype"]
    options = [*SIZES, *QUIET, "--threads", str(len(cores)), *(WIDE if dtype == "float32" else ())]
    with tempfile.TemporaryDirectory() as directory:
        file = write_gguf(model, Path(directory) / "model.gguf", in_int8=in_int8)
        log, port = Path(directory) / "log", free_port()
        command = [str(binary), "--model", str(file), "--host", HOST, "--port", str(port), *options]
        with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as server:
            try:
                wait(server, port, log)
                print(
                    json.dumps(facts(binary, options) | {"cores": cores, "dtype": "Q8_0" if in_int8 else dtype}),
                    flush=True,
                )
                for line in sys.stdin:
                    request = json.loads(line)
                    run = next_log_probs if "num_log_probs" in request else generate
                    print(json.dumps(run(port, request)), flush=True)
            finally:
                server.terminate()


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.create_server((HOST, 0)) as listener:
        return listener.getsockname()[1]


def wait(server: subprocess.Popen, port: int, log: Path) -> None:
    """Return when the server has loaded its model. RuntimeError with the end of its log where it has ended."""
    while server.poll() is None:
        time.sleep(0.1)
        connection = http.client.HTTPConnection(HOST, port, timeout=10)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == http.client.OK:
                return
        except OSError:
            continue
        finally:
            connection.close()
    raise RuntimeError(log.read_text()[-2000:])


def facts(binary: Path, options: list[str]) -> dict[str, Any]:
    """Return the running version and compiler as the server names them, and the instructions that it uses."""
    said = _output(binary, "--version")
    version, compiler = [line for line in said if line.startswith(("version", "built"))]
    # It says so only where it traces, which costs time: a second one does, and ends without a model.
    traced = _output(binary, "--log-verbosity", "4", "--model", "none")
    features = [line.partition("system_info: ")[2] for line in traced if "system_info: " in line]
    found = {"version": version.removeprefix("version: ").partition(" ")[0], "built": version, "compiler": compiler}
    return found | {"features": features, "options": options}


def _output(*command: object) -> list[str]:
    found = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    return (found.stdout + found.stderr).splitlines()


def generate(port: int, request: dict[str, Any]) -> dict[str, Any]:
    """Run one request: greedy, or sampled at temperature 1 where there are several choices."""
    sampling: dict[str, Any] = {"temperature": 0.0}
    if request["n"] > 1:
        rest = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": request["seed"]}
        sampling = {"temperature": 1.0, "n_cmpl": request["n"], **rest}
    always = {"ignore_eos": True, "cache_prompt": False, "return_tokens": True}
    body = {"n_predict": request["num_new_tokens"], **always, **sampling}
    started = time.perf_counter()
    with ThreadPoolExecutor(len(request["prompts"])) as pool:
        found = list(pool.map(lambda prompt: complete(port, {**body, "prompt": prompt}), request["prompts"]))
    return {"seconds": time.perf_counter() - started, "output_ids": [ids for choices in found for ids in choices]}


def next_log_probs(port: int, request: dict[str, Any]) -> dict[str, Any]:
    """Return log-probs of the token after each prompt: `num_log_probs` of them, by id."""
    count = request["num_log_probs"]
    body = {"n_predict": 1, "n_probs": count, "temperature": 0.0, "cache_prompt": False, "ignore_eos": False}
    rows = []
    for prompt in request["prompts"]:
        (choice,) = ask(port, {**body, "prompt": prompt})
        found = {each["id"]: each["logprob"] for each in choice["completion_probabilities"][0]["top_logprobs"]}
        rows.append([found[word] for word in range(count)])
    return {"log_probs": rows}


def complete(port: int, body: dict[str, Any]) -> list[list[int]]:
    """Complete one prompt; returns the output ids of every choice."""
    return [choice["tokens"] for choice in ask(port, body)]


def ask(port: int, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Complete one prompt; returns the answer of every choice."""
    connection = http.client.HTTPConnection(HOST, port, timeout=600)
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer if isinstance(answer, list) else [answer]


if __name__ == "__main__":
    main()
