"""W2 as 16 streaming HTTP clients of a Serve application, in turn with the same streams on the in-process engine.

    python -m benchmarks.http_streams [--size small] [--devices 1] [--workload W2] [--repeats 5] [--out FILE.json]

Before its turn the application answers a few requests, so that its step transport runs as it does under load; after it
there is a pause in which it falls asleep again, for the two share the processor. The clients are one lean process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import numpy as np

from benchmarks.conditions import RESULTS, checkpoint_of, conditions, load_before_start, note, save
from benchmarks.engine_runs import check_complete, in_turn
from benchmarks.serve_process import HOST, ServeProcess
from benchmarks.table import tables
from benchmarks.workloads import WORKLOADS, Workload, prompts_of
from rayserve_moe.answers.streams import GenerationStream
from rayserve_moe.inprocess.engine import Engine
from rayserve_moe.requests.records import GenerationRequest, SamplingParams

WARM_S, IDLE_RELEASE_S, PAUSE_S = 3.0, 1.0, 2.5
WARM_PROMPT, WARM_TOKENS = [5, 6, 7], 64
SETTINGS = {"max_running_requests": 16, "max_model_len": 2048}


class StreamClients:
    """The client process; a context manager."""

    def __init__(self, port: int) -> None:
        command = [sys.executable, "-m", "benchmarks.stream_client", HOST, str(port)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, prompts: list[list[int]], num_new_tokens: int, *, name: str = "") -> dict[str, Any]:
        """Stream all prompts at once, as requests that a journal keeps under a name. RuntimeError when the client has
        failed."""
        assert self._child.stdin is not None and self._child.stdout is not None, "both are pipes"
        self._child.stdin.write(json.dumps({"prompts": prompts, "num_new_tokens": num_new_tokens, "name": name}) + "\n")
        self._child.stdin.flush()
        if not (line := self._child.stdout.readline()):
            raise RuntimeError("the client process has ended; its last words are above")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.__exit__(None, None, None)


def run_http(serve: ServeProcess, clients: StreamClients, *, workload: Workload, prompts: list[list[int]]) -> dict:
    """Warm the application up, let the clients run, then wait until it sleeps. `cpu_s` says who used how much."""
    warm_until = time.monotonic() + WARM_S
    while time.monotonic() < warm_until:
        clients.run([WARM_PROMPT], WARM_TOKENS)
    before = serve.cpu_seconds()
    run = clients.run(prompts, workload.num_new_tokens)
    after = serve.cpu_seconds()
    check_complete(run["num_new_tokens"], workload)
    run["cpu_s"] = {part: after[part] - before[part] for part in after} | {"client": run.pop("client_cpu_s")}
    time.sleep(PAUSE_S)
    return run


async def run_streams(engine: Engine, workload: Workload, *, prompts: list[list[int]]) -> dict[str, Any]:
    """Run the streams without HTTP: text in this process's event loop, counted as the clients count."""
    sampling = SamplingParams(max_new_tokens=workload.num_new_tokens, temperature=0.0, ignore_eos=True)
    requests = [GenerationRequest(uuid.uuid4().hex, np.asarray(ids, np.int32), sampling) for ids in prompts]
    started, cpu_before = time.perf_counter(), time.process_time()
    streams = [GenerationStream(engine.loop, engine.tokenizer, request=request) for request in requests]
    read = await asyncio.gather(*(_read(stream) for stream in streams))
    seconds = time.perf_counter() - started
    check_complete(sum(num_tokens for _, num_tokens in read), workload)
    return {
        "seconds": seconds,
        "first_token_s": [first_at - started for first_at, _ in read],
        "cpu_s": {"engine": time.process_time() - cpu_before},
    }


async def _read(stream: GenerationStream) -> tuple[float, int]:
    """Return the time of the first delta, and the tokens of all."""
    first_at, num_tokens = 0.0, 0
    async for delta in stream:
        first_at = first_at or time.perf_counter()
        num_tokens += len(delta.token_ids)
    return first_at, num_tokens


def measure(
    name: str, engine: Engine, *, serve: ServeProcess, clients: StreamClients, repeats: int
) -> dict[str, list[dict]]:
    """Measure both sides in turn, `repeats` times, after an uncounted turn."""
    workload = WORKLOADS[name]
    runs: dict[str, list[dict]] = {"engine": [], "http": []}
    for repeat in range(-1, repeats):
        prompts = prompts_of(name, repeat, vocab_size=engine.card.vocab_size)
        for side in in_turn(list(runs), repeat + 1):
            if side == "engine":
                runs[side].append(asyncio.run(run_streams(engine, workload, prompts=prompts)))
            else:
                runs[side].append(run_http(serve, clients, workload=workload, prompts=prompts))
        rates = " against ".join(
            f"{side} {workload.total_new_tokens / each[-1]['seconds']:.1f} tokens/s, "
            f"first after {1e3 * statistics.median(each[-1]['first_token_s']):.0f} ms"
            for side, each in runs.items()
        )
        note(f"{name} {repeat + 1}/{repeats}: {rates}")
    return {side: each[1:] for side, each in runs.items()}


def main() -> None:
    """Measure, write the result file, print its tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=["tiny", "small", "mid"], default="small")
    parser.add_argument("--workload", choices=["W1", "W2", "W3"], default="W2")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--devices", type=int, default=1, help="devices of both engines; on a CPU, emulated ones")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/http-SIZE.json")
    arguments = parser.parse_args()
    load_before = load_before_start()
    settings = {"model_path": str(checkpoint_of(arguments.size)), "devices_per_host": arguments.devices, **SETTINGS}
    with (
        ServeProcess({**settings, "idle_release_s": IDLE_RELEASE_S}) as serve,
        StreamClients(serve.port) as clients,
        Engine(**settings) as engine,
    ):
        runs = measure(arguments.workload, engine, serve=serve, clients=clients, repeats=arguments.repeats)
        result = conditions(engine, size=arguments.size, repeats=arguments.repeats, load_before=load_before)
    workload = asdict(WORKLOADS[arguments.workload])
    result["http"] = {"name": arguments.workload, "workload": workload, "runs": runs}
    save(result, arguments.out or RESULTS / f"http-{arguments.size}.json")
    print(tables(result))


if __name__ == "__main__":
    main()
