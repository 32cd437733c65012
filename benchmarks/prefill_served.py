"""Seconds per token of streams beside long prompts, served by two replicas: both mixed, or one for prompts.

    python -m benchmarks.prefill_served [--size small] [--repeats 3] [--kills 0] [--out FILE.json]

Each replica and its worker have a core, which they share with the clients. Each repeat runs the same streams without
long prompts, then beside up to four of them, one after another. With `--kills` the replica for prompts and the one for
tokens are then killed in turn, at random moments under requests with long prompts. Their answers are compared with an
undisturbed run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

from benchmarks.conditions import RESULTS, checkpoint_of, load_before_start, machine_facts, note, save
from benchmarks.fleet_table import prefill_served
from benchmarks.fleet_validation import allow
from benchmarks.kill_repeats import WORKER, cpu_ticks
from benchmarks.resuming_client import CutOffError, ResumingClient
from benchmarks.serve_process import HOST, ServeProcess
from rayserve_moe.checkpoints.synthetic import PRESETS

NUM_STREAMS, STREAM_TOKENS, LONG, LONG_ANSWER, NUM_LONG = 6, 1024, 3000, 8, 4
NUM_ASKED, ANSWER_TOKENS = 12, 200
"""Requests of a kill."""
PROBE = 600
"""Number of tokens in a probe prompt: more than a step takes, so that the prefill replica computes it."""
SETTINGS: dict[str, Any] = {
    "num_replicas": 2,
    "max_model_len": 4096,
    "num_pages": 2048,
    "max_running_requests": 16,
    "precompile_bs_paddings": [16],
    "max_step_tokens": 256,
    "enable_return_routed_experts": True,
    "structured_output": False,
    "host_cache_mib": 512,
    "prefix_routing": "on",
}
REPLICA = "ray::ServeReplica:bench:moe-server"
ROLES = {"mixed": 0, "apart": 1}
"""Number of replicas for prompts."""
LIMIT_S = 300.0


class StreamTimes(NamedTuple):
    """Times of a stream, in seconds."""

    tokens: list[float]
    """Seconds per token after the first event. The time between two events is divided by the tokens of the second."""
    events: list[float]
    """Seconds between two events. The server sends the tokens of 10 ms in one event, so events hide single steps."""


async def stream(client: httpx.AsyncClient, prompt: Sequence[int], *, num_new: int, seed: int) -> StreamTimes:
    """Read a sampled stream."""
    sampling = {"max_new_tokens": num_new, "temperature": 1, "ignore_eos": True, "sampling_seed": seed}
    body = {"input_ids": list(prompt), "sampling_params": sampling, "stream": True}
    async with client.stream("POST", "/generate", json=body) as answer:
        answer.raise_for_status()
        arrived = [(time.perf_counter(), line) async for line in answer.aiter_lines() if line.startswith("data: {")]
    counts = [json.loads(line[len("data: ") :])["meta_info"]["completion_tokens"] for _, line in arrived]
    gaps, num_tokens = np.diff([when for when, _ in arrived]), np.diff(counts)
    return StreamTimes(np.repeat(gaps / np.maximum(num_tokens, 1), num_tokens).tolist(), gaps.tolist())


async def long_prompt(client: httpx.AsyncClient, prompt: Sequence[int]) -> float:
    """Return the seconds of a long prompt with a short answer."""
    began = time.perf_counter()
    sampling = {"max_new_tokens": LONG_ANSWER, "temperature": 0, "ignore_eos": True}
    answer = await client.post("/generate", json={"input_ids": list(prompt), "sampling_params": sampling})
    answer.raise_for_status()
    return time.perf_counter() - began


async def play(port: int, *, num_long: int, draw: np.random.Generator, vocab_size: int) -> dict[str, float]:
    """Return times of streams beside long prompts, which come one after the other, and their mean time."""

    def prompt(length: int) -> list[int]:
        return draw.integers(16, vocab_size, length).tolist()

    async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=LIMIT_S) as client:
        streams = [
            asyncio.create_task(stream(client, prompt(40), num_new=STREAM_TOKENS, seed=seed))
            for seed in range(NUM_STREAMS)
        ]
        await asyncio.sleep(0.5)
        seconds = []
        while len(seconds) < num_long and not all(one.done() for one in streams):
            seconds.append(await long_prompt(client, prompt(LONG)))
        ended = await asyncio.gather(*streams)
    tokens, events = ([gap for one in ended for gap in one[place]] for place in range(2))
    return {
        "token_p50_s": float(np.quantile(tokens, 0.5)),
        "token_p99_s": float(np.quantile(tokens, 0.99)),
        "event_p99_s": float(np.quantile(events, 0.99)),
        "long_s": float(np.mean(seconds)) if seconds else 0.0,
    }


def measure(serve: ServeProcess, *, repeats: int, vocab_size: int) -> list[dict[str, Any]]:
    """Return times without and with long prompts, by repeat; a first run is not counted."""
    draw, rows = np.random.default_rng(0), []
    for repeat in range(repeats + 1):
        for num_long in (0, NUM_LONG):
            figures = asyncio.run(play(serve.port, num_long=num_long, draw=draw, vocab_size=vocab_size))
            if repeat:
                rows.append({"repeat": repeat, "num_long": num_long, **figures})
                note(json.dumps(rows[-1]))
    return rows


def hold_pairs(serve: ServeProcess, cores: Sequence[int]) -> None:
    """Pin each replica and its worker to one core; match them by the CPU time that they spend on one request."""
    for pid in serve.pids_of(""):
        allow(pid, cores)
    pids = {title: serve.pids_of(title) for title in (REPLICA, WORKER)}
    before = {pid: cpu_ticks(pid) for of_title in pids.values() for pid in of_title}
    sampling = {"max_new_tokens": STREAM_TOKENS, "ignore_eos": True}
    body = {"input_ids": [16] * 40, "sampling_params": sampling}
    httpx.post(f"http://{HOST}:{serve.port}/generate", json=body, timeout=LIMIT_S).raise_for_status()
    for of_title in pids.values():
        in_order = sorted(of_title, key=lambda pid: cpu_ticks(pid) - before[pid])
        for pid, core in zip(in_order, cores, strict=True):
            allow(pid, [core])


def started(settings: dict[str, Any]) -> ServeProcess:
    """Start a server on one core, so that its kernels use one thread."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])
    try:
        return ServeProcess(settings)
    finally:
        os.sched_setaffinity(0, cores)


def body_of(number: int, *, run: int, vocab_size: int) -> dict[str, Any]:
    """Return a sampled request with rows; every second one is a stream."""
    prompt = np.random.default_rng(number).integers(16, vocab_size, 1200 + 16 * number).tolist()
    sampling = {"max_new_tokens": ANSWER_TOKENS, "temperature": 1, "ignore_eos": True, "sampling_seed": number}
    return {
        "input_ids": [*prompt, 16 + run % (vocab_size - 16)],
        "sampling_params": sampling,
        "rid": f"{run} {number}",
        "stream": number % 2 == 0,
        "return_routed_experts": True,
    }


def answers(client: ResumingClient, *, run: int, vocab_size: int, act: Any = None, after_s: float = 0) -> list[Any]:
    """Return ids and rows of all answers, an error's name where there is none."""

    def ask(number: int) -> Any:
        body = body_of(number, run=0, vocab_size=vocab_size) | {"rid": f"{run} {number}"}
        try:
            answer = client.ask(body)
        except (CutOffError, httpx.HTTPError, AssertionError) as error:
            return f"{type(error).__name__}: {error}"[:200]
        return answer["output_ids"], answer["meta_info"]["routed_experts"]

    with ThreadPoolExecutor(NUM_ASKED) as threads:
        asked = [threads.submit(ask, number) for number in range(NUM_ASKED)]
        if act is not None:
            time.sleep(after_s)
            act()
        return [one.result() for one in asked]


def roles(serve: ServeProcess) -> dict[str, list[str]]:
    """Return the names of the replicas by role."""
    info = httpx.get(f"http://{HOST}:{serve.port}/server_info", timeout=LIMIT_S).json()
    prefill = info.get("prefill", [])
    return {"prefill": prefill, "decode": [name for name in info.get("replicas", {}) if name not in prefill]}


def pid_of(serve: ServeProcess, replica: str) -> int:
    """Return the process of a replica, by the name of the log file that it has open."""
    for pid in serve.pids_of(REPLICA):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if replica in os.readlink(file):
                    return pid
    raise LookupError(replica)


def wait_until_whole(serve: ServeProcess) -> None:
    """Wait until a replica of each role serves and routers know both. Raises: TimeoutError."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        with suppress(httpx.HTTPError, ValueError):
            if all(len(names) == 1 for names in roles(serve).values()) and takes_pages(serve):
                return
        time.sleep(0.5)
    raise TimeoutError("the fleet is not whole again")


def takes_pages(serve: ServeProcess) -> bool:
    """Return True if the prefill replica computes a random prompt."""
    before = transfers(serve)
    body = {"input_ids": random.choices(range(16, 256), k=PROBE), "sampling_params": {"max_new_tokens": 1}}
    httpx.post(f"http://{HOST}:{serve.port}/generate", json=body, timeout=LIMIT_S).raise_for_status()
    received = "rayserve_moe_pushed_pages_received_total"
    return transfers(serve).get(received, 0.0) > before.get(received, 0.0)


def kill_each(serve: ServeProcess, *, kills: int, vocab_size: int) -> dict[str, dict[str, int]]:
    """Kill each role at random moments; return lost and different answers."""
    client = ResumingClient(f"http://{HOST}:{serve.port}", within_s=LIMIT_S)
    answers(client, run=1, vocab_size=vocab_size)
    httpx.post(f"http://{HOST}:{serve.port}/flush_cache", timeout=LIMIT_S)
    began = time.monotonic()
    expected = answers(client, run=2, vocab_size=vocab_size)
    run_s = time.monotonic() - began
    counts = {role: {"kills": 0, "requests": 0, "lost": 0, "ids": 0, "rows": 0} for role in ("prefill", "decode")}
    for number in range(2 * kills):
        role = ("prefill", "decode")[number % 2]
        wait_until_whole(serve)
        httpx.post(f"http://{HOST}:{serve.port}/flush_cache", timeout=LIMIT_S)
        victim = pid_of(serve, roles(serve)[role][0])
        found = answers(
            client,
            run=3 + number,
            vocab_size=vocab_size,
            act=lambda victim=victim: os.kill(victim, signal.SIGKILL),
            after_s=random.uniform(0, 0.8 * run_s),
        )
        seen = counts[role]
        lost = [one for one in found if isinstance(one, str)]
        pairs = [(a, b) for a, b in zip(found, expected, strict=True) if not isinstance(a, str)]
        seen["kills"] += 1
        seen["requests"] += len(found)
        seen["lost"] += len(lost)
        seen["ids"] += sum(a[0] != b[0] for a, b in pairs)
        seen["rows"] += sum(a[1] != b[1] for a, b in pairs)
        note(f"{role}: {seen} {lost[:1]}")
    return counts


def transfers(serve: ServeProcess) -> dict[str, float]:
    """Return the metrics of pushed pages, summed over the replicas."""
    found: dict[str, float] = {}
    for line in httpx.get(f"http://{HOST}:{serve.port}/metrics", timeout=LIMIT_S).text.splitlines():
        if line.startswith("rayserve_moe_push"):
            name = line.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
    return found


def main() -> None:
    """Measure, write the result file, print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=sorted(PRESETS), default="small")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kills", type=int, default=0, help="of each role")
    parser.add_argument("--roles", nargs="+", choices=list(ROLES), default=list(ROLES))
    parser.add_argument("--out", type=Path, default=RESULTS / "prefill_served.json")
    arguments = parser.parse_args()
    load_before, vocab_size = load_before_start(), PRESETS[arguments.size].vocab_size
    settings = {**SETTINGS, "model_path": str(checkpoint_of(arguments.size)), "dtype": "bfloat16"}
    measured: dict[str, Any] = {"size": arguments.size, "runs": {}, "kills": {}}
    for name in arguments.roles:
        with started({**settings, "num_prefill_replicas": ROLES[name]}) as serve:
            if ROLES[name]:
                wait_until_whole(serve)
            hold_pairs(serve, sorted(os.sched_getaffinity(0))[:2])
            measured["runs"][name] = measure(serve, repeats=arguments.repeats, vocab_size=vocab_size)
            note(f"{name}: {transfers(serve)}")
            if arguments.kills and ROLES[name]:
                measured["kills"] = kill_each(serve, kills=arguments.kills, vocab_size=vocab_size)
    save({"machine": machine_facts(load_before), "prefill_served": measured}, arguments.out)
    print(prefill_served(measured))


if __name__ == "__main__":
    main()
