"""Kill a part of a fleet at random moments, over and over, under streams and plain requests that must not notice.

    python -m benchmarks.kill_fleet [--faults replica router ...] [--repeats 20] [--max-tokens 1900] [--out FILE.json]

Two replicas of the embedded model behind one endpoint, 32 streams and 32 plain requests over connections of their own.
A client that is cut off resumes, or asks again what was refused before its first byte; each answer is compared with
that of an undisturbed run: ids, text, log-probs, routing rows and end. Where raylets are killed, the cluster has three
beside the head's, each with the CPUs of one replica, and a new one comes after each kill. Rows of other faults stay in
the result file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.conditions import RESULTS, load_before_start, machine_facts, note, save
from benchmarks.kill_repeats import saved_result
from benchmarks.markdown import markdown_table
from benchmarks.resuming_client import CutOffError, ResumingClient
from benchmarks.serve_process import HOST, ServeProcess

NUM_REPLICAS = 2
NUM_STREAMS = NUM_PLAIN = 32
LIMIT_S, POLL_S = 300.0, 0.1
MAX_TOKENS = 1900
SETTINGS: dict[str, Any] = {
    "model_path": "trained:calculator",
    "num_replicas": NUM_REPLICAS,
    "max_model_len": 2048,
    "max_running_requests": 48,
    "precompile_bs_paddings": [48],
    "max_step_tokens": 256,
    "enable_return_routed_experts": True,
    "structured_output": False,
}
REPLICA = "ray::ServeReplica:bench:moe-server"
ROUTER = "ray::ServeReplica:bench:moe-router"
FAULTS: dict[str, tuple[str, int]] = {
    "replica": (REPLICA, 1),
    "router": (ROUTER, 1),
    "both routers": (ROUTER, 2),
    "HAProxy": ("haproxy", 1),
    "HAProxy's manager": ("ray::HAProxyManager", 1),
    "controller": ("ray::ServeController", 1),
    "journal": ("rayserve_moe.serving.start.journal", 1),
}
"""What is killed: the titles of its processes, and how many of them at once."""
RAYLET = "raylet"
"""Killed too: one that has a replica or its worker, and is not the head's."""
WORKER = "ray::HostWorker"
NUM_SPARE = 1


def body_of(number: int, *, run: int, max_tokens: int) -> dict[str, Any]:
    """Return a sampled request with rows; the first ones are streams."""
    sampling = {"max_new_tokens": max_tokens, "temperature": 1, "ignore_eos": True, "sampling_seed": number}
    return {
        "text": f"{number}+45=",
        "sampling_params": sampling,
        "rid": f"{run} {number}",
        "stream": number < NUM_STREAMS,
        "return_logprob": True,
        "return_routed_experts": True,
    }


def answers(
    client: ResumingClient, *, run: int, max_tokens: int, fault: Callable[[], object] = lambda: None, after_s: float = 0
) -> list[dict[str, Any] | str]:
    """Return all answers, an error's name where there is none."""

    def ask(number: int) -> dict[str, Any] | str:
        try:
            return client.ask(body_of(number, run=run, max_tokens=max_tokens))
        except (CutOffError, httpx.HTTPError, AssertionError) as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(NUM_STREAMS + NUM_PLAIN) as threads:
        asked = [threads.submit(ask, number) for number in range(NUM_STREAMS + NUM_PLAIN)]
        time.sleep(after_s)
        fault()
        return [one.result() for one in asked]


def differing(found: list[dict[str, Any] | str], expected: list[dict[str, Any] | str]) -> dict[str, int | float]:
    """Return how many requests were lost, how many others differ in tokens, ends or rows, and the largest gap."""
    lost = [one for one in found if isinstance(one, str)]
    for one in lost:
        note(f"lost: {one[:300]}")
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if not isinstance(a, str) and not isinstance(b, str)]
    same = [(a, b) for a, b in pairs if a["output_ids"] == b["output_ids"]]
    return {
        "lost": len(lost),
        "tokens": sum(_told(a) != _told(b) for a, b in pairs),
        "rows": sum(a["meta_info"]["routed_experts"] != b["meta_info"]["routed_experts"] for a, b in pairs),
        "logprob_gap": max((float(np.abs(_logprobs(a) - _logprobs(b)).max()) for a, b in same), default=0.0),
    }


def _told(answer: dict[str, Any]) -> tuple[Any, ...]:
    return answer["output_ids"], answer["text"], answer["meta_info"]["finish_reason"]


def _logprobs(answer: dict[str, Any]) -> np.ndarray:
    return np.array([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])


class Watch(threading.Thread):
    """Asks for a token every `POLL_S` from the fault on: `seconds` is the longest time for which none was answered."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._port, self._over, self.seconds = port, threading.Event(), 0.0

    def run(self) -> None:
        answered = time.monotonic()
        body = {"text": "1+2=", "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        while not self._over.is_set():
            try:
                is_served = httpx.post(f"http://{HOST}:{self._port}/generate", json=body, timeout=LIMIT_S).is_success
            except httpx.HTTPError:
                is_served = False
            if is_served:
                self.seconds = max(self.seconds, time.monotonic() - answered)
                answered = time.monotonic()
            self._over.wait(POLL_S)

    def end(self) -> float:
        """Stop; returns `seconds`."""
        self._over.set()
        self.join()
        return self.seconds


def wait_until_whole(serve: ServeProcess) -> float:
    """Wait until all parts are there, and all replicas and routers serve; returns the seconds. TimeoutError."""
    began = time.monotonic()
    while not _is_whole(serve):
        if time.monotonic() - began > LIMIT_S:
            raise TimeoutError("the fleet is not whole again")
        time.sleep(POLL_S)
    return time.monotonic() - began


@contextmanager
def several_nodes(settings: dict[str, Any]) -> Iterator[ServeProcess]:
    """Serve, with a raylet for each replica and a spare one."""
    os.environ["RAY_OVERRIDE_RESOURCES"] = json.dumps({"CPU": 0})  # of the head
    try:
        with ServeProcess(settings, nodes=[1] * (NUM_REPLICAS + NUM_SPARE)) as serve:
            yield serve
    finally:
        del os.environ["RAY_OVERRIDE_RESOURCES"]


def _is_whole(serve: ServeProcess) -> bool:
    if any(len(serve.pids_of(title)) < number for title, number in FAULTS.values()):
        return False
    if len(serve.pids_of(REPLICA)) < NUM_REPLICAS:
        return False
    try:
        info = httpx.get(f"http://{HOST}:{serve.port}/server_info", timeout=LIMIT_S)
        health = httpx.get(f"http://{HOST}:{serve.port}/health", timeout=LIMIT_S).json()
    except (httpx.HTTPError, ValueError):
        return False
    return (
        info.is_success and len(info.json().get("replicas", ())) == NUM_REPLICAS and health.get("journal", "up") == "up"
    )


def victims_of(serve: ServeProcess, name: str) -> list[int]:
    """Choose the processes that a fault kills."""
    if name == RAYLET:
        raylets, *held = map(serve.pids_by_node, (RAYLET, REPLICA, WORKER))
        return random.choice([pids for pids, *used in zip(raylets, *held, strict=True) if any(used)])
    title, number = FAULTS[name]
    return random.sample(serve.pids_of(title), number)


def kill(serve: ServeProcess, name: str, *, watch: Watch, killed_at: list[float]) -> None:
    """Kill what a fault kills, and note when."""
    victims = victims_of(serve, name)
    watch.start()
    killed_at.append(time.monotonic())
    for pid in victims:
        os.kill(pid, signal.SIGKILL)


def repeat(serve: ServeProcess, name: str, *, repeats: int, max_tokens: int) -> dict[str, Any]:
    """Kill a part at random moments; returns sums, and for how long requests were not answered, or it was missing."""
    client = ResumingClient(f"http://{HOST}:{serve.port}", within_s=LIMIT_S)
    run = random.getrandbits(32)
    answers(client, run=run, max_tokens=max_tokens)
    began = time.monotonic()
    expected = answers(client, run=run + 1, max_tokens=max_tokens)
    run_s = time.monotonic() - began
    sums, largest, outages, returns = dict.fromkeys(("cut", "lost", "tokens", "rows"), 0), 0.0, [], []
    cut = client.num_cut
    for count in range(repeats):
        wait_until_whole(serve)
        watch, killed_at = Watch(serve.port), list[float]()
        fault = partial(kill, serve, name, watch=watch, killed_at=killed_at)
        after_s = random.uniform(0, 0.8 * run_s)
        found = answers(client, run=run + 2 + count, max_tokens=max_tokens, fault=fault, after_s=after_s)
        if name == RAYLET:
            serve.add_node(num_cpus=1)
        time.sleep(POLL_S)
        wait_until_whole(serve)
        returns.append(time.monotonic() - killed_at[0])
        outages.append(watch.end())
        counts = {"cut": client.num_cut - cut, **differing(found, expected)}
        said = f"{outages[-1]:.1f} s unanswered, whole after {returns[-1]:.1f} s, {counts}"
        note(f"{name} after {after_s:.2f} s of {run_s:.2f}: {said}")
        cut = client.num_cut
        sums = {key: total + int(counts[key]) for key, total in sums.items()}
        largest = max(largest, counts["logprob_gap"])
    times = {"outage_p50_s": float(np.median(outages)), "outage_worst_s": max(outages)}
    times |= {"back_p50_s": float(np.median(returns)), "back_worst_s": max(returns)}
    requests = repeats * (NUM_STREAMS + NUM_PLAIN)
    return {"repeats": repeats, "requests": requests, **sums, "logprob_gap": largest, **times}


def table_of(rows: dict[str, dict[str, Any]]) -> str:
    """Return the repeats as Markdown."""
    headings = ["killed", "times", "requests", "cut off", "lost", "other tokens", "other rows", "largest log-prob gap"]
    headings += ["unanswered p50, s", "worst, s", "whole again p50, s", "worst, s"]
    said = (
        [
            f"{value:.1e}" if name == "logprob_gap" else f"{value:.1f}" if isinstance(value, float) else str(value)
            for name, value in row.items()
        ]
        for row in rows.values()
    )
    return markdown_table(headings, [[key, *values] for key, values in zip(rows, said, strict=True)])


def main() -> None:
    """Measure, write the result file, print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", nargs="+", choices=[*FAULTS, RAYLET], default=[*FAULTS, RAYLET])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    parser.add_argument("--out", type=Path, default=RESULTS / "kill_fleet.json")
    arguments = parser.parse_args()
    saved = saved_result(arguments.out)
    load_before, rows, loads = load_before_start(), saved["rows"], saved["loads"]
    for serves, faults in ((ServeProcess, FAULTS), (several_nodes, (RAYLET,))):
        if not (asked := [name for name in arguments.faults if name in faults]):
            continue
        with serves(SETTINGS) as serve:
            for name in asked:
                rows[name] = repeat(serve, name, repeats=arguments.repeats, max_tokens=arguments.max_tokens)
                loads[name] = load_before
                save({"machine": machine_facts(load_before), "loads": loads, "rows": rows}, arguments.out)
                note(json.dumps(rows[name]))
    print(table_of(rows))


if __name__ == "__main__":
    main()
