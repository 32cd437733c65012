"""llama.cpp's server as a peer (see `process.py`): run by the Python of an environment with xllamacpp and gguf.

It is asked over the loop-back, and its own reuse of prompts is off.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import xllamacpp
from gguf_file import write_gguf

NUM_THREADS = 2
NUM_SLOTS = 16


def main() -> None:
    """Convert and load the model of the directory named on the command line; serve runs until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as directory:
        file = write_gguf(Path(sys.argv[1]), Path(directory) / "model.gguf")
        server = start(file)
        host = urlsplit(server.listening_address)
        facts = {"version": xllamacpp.__version__, "dtype": "bfloat16", "threads": NUM_THREADS}
        print(json.dumps(facts), file=answers)
        for line in sys.stdin:
            print(json.dumps(generate(host, json.loads(line))), file=answers)


def start(file: Path) -> xllamacpp.Server:
    """Start a server of 16 slots over one pool of keys and values."""
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_parallel = NUM_SLOTS
    params.n_ctx = NUM_SLOTS * 1024
    params.kv_unified = True
    params.n_batch = 2048
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = NUM_THREADS
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.verbosity = -1
    params.cache_ram_mib = 0
    return xllamacpp.Server(params)


def generate(host: SplitResult, request: dict[str, Any]) -> dict[str, float]:
    """Run one request: greedy, or sampled at temperature 1 where there are several choices."""
    sampling: dict[str, Any] = {"temperature": 0.0}
    if request["n"] > 1:
        rest = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": request["seed"]}
        sampling = {"temperature": 1.0, "n_cmpl": request["n"], **rest}
    body = {"n_predict": request["num_new_tokens"], "ignore_eos": True, "cache_prompt": False, **sampling}
    started = time.perf_counter()
    with ThreadPoolExecutor(len(request["prompts"])) as pool:
        counts = list(pool.map(lambda prompt: complete(host, {**body, "prompt": prompt}), request["prompts"]))
    return {"seconds": time.perf_counter() - started, "num_new_tokens": sum(counts)}


def complete(host: SplitResult, body: dict[str, Any]) -> int:
    """Complete one prompt; returns how many tokens came out, over all choices."""
    connection = http.client.HTTPConnection(host.hostname, host.port, timeout=600)
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return sum(choice["tokens_predicted"] for choice in (answer if isinstance(answer, list) else [answer]))


if __name__ == "__main__":
    main()
