"""Kill or stop a worker at random moments, over and over, under streams and plain requests that must not notice.

    python -m benchmarks.kill_repeats [--hosts 1 2] [--signals SIGKILL] [--repeats 20] [--max-tokens 1000] [--standbys]
                                      [--out FILE.json]

Every answer is compared with that of an undisturbed run: text, log-probs of its tokens, and routing rows. The longest
time in which no stream got anything is the outage. A signal after which no worker was replaced came too late to disturb
anything; it is sent again in a further repeat. Rows that the result file has already, of other faults, stay.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.conditions import RESULTS, load_before_start, machine_facts, note, save
from benchmarks.kill_table import MAX_TOKENS, NUM_PLAIN, NUM_STREAMS, SETTINGS
from benchmarks.markdown import markdown_table
from benchmarks.serve_process import HOST, ServeProcess

LIMIT_S, POLL_S = 300.0, 0.2
WORKER = "ray::HostWorker"
SECONDS_BETWEEN = 6.0
"""From the end of a repeat to the next: a standby takes a few seconds to be there."""
Answer = tuple[str, list[float], Any]
"""Text, log-probs and routing rows of a request."""


async def ask(
    client: httpx.AsyncClient, number: int, *, max_tokens: int, streams: bool, arrivals: list[float]
) -> Answer:
    """Ask for a sampled completion with rows; notes when anything arrives."""
    body = {
        "prompt": f"{number}+45=",
        "max_tokens": max_tokens,
        "temperature": 1,
        "seed": number,
        "ignore_eos": True,
        "stream": streams,
        "logprobs": 0,
        "return_routed_experts": True,
        "routed_experts_format": "packed",
    }
    texts, logprobs, rows = [], [], None
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise ValueError(f"status {answer.status_code}")
        async for line in answer.aiter_lines():
            text = line.removeprefix("data: ") if streams else line
            if not text or text == "[DONE]" or text.startswith(":"):
                continue
            (choice,) = json.loads(text)["choices"]
            if streams:
                arrivals.append(time.monotonic())
            texts.append(choice["text"])
            logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
            rows = choice.get("routed_experts") or rows
    return "".join(texts), logprobs, rows and rows["data"]


async def answers(
    port: int, *, max_tokens: int, fault: Callable[[], object] | None = None, after_s: float = 0.0
) -> tuple[list[Answer | str], float]:
    """All answers, an error's name where there is none, and the longest time in which no stream got anything."""
    arrivals: list[float] = []
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=LIMIT_S) as client:
        asked = [
            asyncio.create_task(
                ask(client, number, max_tokens=max_tokens, streams=number < NUM_STREAMS, arrivals=arrivals)
            )
            for number in range(NUM_STREAMS + NUM_PLAIN)
        ]
        if fault is not None:
            await asyncio.sleep(after_s)
            fault()
        found = await asyncio.gather(*asked, return_exceptions=True)
    gap_s = float(np.diff(sorted(arrivals)).max()) if len(arrivals) > 1 else LIMIT_S
    return [type(each).__name__ if isinstance(each, BaseException) else each for each in found], gap_s


def differing(found: list[Answer | str], expected: list[Answer | str]) -> dict[str, int | float]:
    """How many requests were lost, of the others in how many tokens, log-probs or rows differ, and by how much
    log-probs do where tokens are the same.
    """
    pairs = [(ours, theirs) for ours, theirs in zip(found, expected, strict=True) if not isinstance(ours, str)]
    return {
        "lost": len(found) - len(pairs),
        "tokens": sum(ours[0] != theirs[0] for ours, theirs in pairs),
        "logprobs": sum(ours[1] != theirs[1] for ours, theirs in pairs),
        "rows": sum(ours[2] != theirs[2] or ours[2] is None for ours, theirs in pairs),
        "logprob_gap": max((_gap(ours[1], theirs[1]) for ours, theirs in pairs if ours[0] == theirs[0]), default=0.0),
    }


def _gap(ours: list[float], theirs: list[float]) -> float:
    return max((abs(a - b) for a, b in zip(ours, theirs, strict=False)), default=0.0)


def repeat(
    serve: ServeProcess, sent: signal.Signals, *, repeats: int, num_hosts: int, max_tokens: int
) -> dict[str, Any]:
    """Deliver the signal to a random worker at random moments; returns sums, the largest gap and the outages."""
    ask_all = partial(answers, serve.port, max_tokens=max_tokens)
    asyncio.run(ask_all())
    begun = time.monotonic()
    expected, _ = asyncio.run(ask_all())
    run_s = time.monotonic() - begun
    sums, largest, gaps = dict.fromkeys(("lost", "tokens", "logprobs", "rows"), 0), 0.0, []
    while len(gaps) < repeats:
        time.sleep(SECONDS_BETWEEN)
        wait_until_ready(serve.port)
        before = num_rebuilds(serve.port)
        victim = random.choice(busiest(serve, num_hosts))
        after_s = random.uniform(0, 0.8 * run_s)
        fault = partial(os.kill, victim, sent)
        found, gap_s = asyncio.run(ask_all(fault=fault, after_s=after_s))
        counts = differing(found, expected)
        if num_rebuilds(serve.port) == before and not counts["lost"]:
            note("the signal came after the last token")
            continue
        note(f"{sent.name} after {after_s:.2f} s of {run_s:.2f}: {gap_s:.2f} s without tokens, {counts}")
        sums = {name: total + int(counts[name]) for name, total in sums.items()}
        largest = max(largest, counts["logprob_gap"])
        gaps.append(gap_s)
    requests = repeats * (NUM_STREAMS + NUM_PLAIN)
    times = {"p50_s": float(np.median(gaps)), "worst_s": max(gaps)}
    return {"repeats": repeats, "requests": requests, **sums, **times, "logprob_gap": largest}


def wait_until_ready(port: int) -> None:
    """Wait for the workers of a server. TimeoutError after LIMIT_S."""
    deadline = time.monotonic() + LIMIT_S
    while httpx.get(f"http://{HOST}:{port}/ready", timeout=LIMIT_S).status_code != 200:
        if time.monotonic() > deadline:
            raise TimeoutError("the server is not ready")
        time.sleep(POLL_S)


def num_rebuilds(port: int) -> float:
    """How often the workers of a server were replaced."""
    lines = httpx.get(f"http://{HOST}:{port}/metrics", timeout=LIMIT_S).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("rayserve_moe_rebuilds_total"))


def busiest(serve: ServeProcess, num_hosts: int) -> list[int]:
    """Workers that serve: a standby has used less CPU time."""
    pids = serve.pids_of(WORKER)
    return sorted(pids, key=_cpu_ticks)[-num_hosts:]


def _cpu_ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(fields[11]) + int(fields[12])


def main() -> None:
    """Measure, write the result file, print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--signals", nargs="+", choices=["SIGKILL", "SIGSTOP"], default=["SIGKILL", "SIGSTOP"])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    parser.add_argument("--standbys", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "kill_repeats.json")
    arguments = parser.parse_args()
    saved = saved_result(arguments.out)
    load_before, rows, loads = load_before_start(), saved["rows"], saved["loads"]
    bounds = {"most_rebuilds_in_10_minutes": 1000, "most_rebuilds_in_hour": 1000}
    settings = {**SETTINGS, **bounds, "standby_workers": arguments.standbys, "enable_return_routed_experts": True}
    for num_hosts in arguments.hosts:
        with ServeProcess({**settings, "num_hosts": num_hosts}) as serve:
            for name in arguments.signals:
                key = f"{name}, {num_hosts} host{'s'[: num_hosts - 1]}{', standbys' * arguments.standbys}"
                rows[key] = repeat(
                    serve,
                    signal.Signals[name],
                    repeats=arguments.repeats,
                    num_hosts=num_hosts,
                    max_tokens=arguments.max_tokens,
                )
                loads[key] = load_before
                save({"machine": machine_facts(load_before), "loads": loads, "rows": rows}, arguments.out)
    print(table_of(rows))


def saved_result(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of a result file, and the load of the machine before each; empty where there is no such file."""
    saved = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    rows = saved.get("rows", {})
    return {
        "rows": rows,
        "loads": saved.get("loads") or dict.fromkeys(rows, saved.get("machine", {}).get("load_before")),
    }


def table_of(rows: dict[str, dict[str, Any]]) -> str:
    """The repeats as Markdown."""
    headings = [
        "fault",
        "repeats",
        "requests",
        "lost",
        "tokens",
        "log-probs",
        "rows",
        "outage p50, s",
        "worst, s",
        "largest log-prob gap",
    ]
    said = (
        [
            f"{value:.1e}" if name == "logprob_gap" else f"{value:.1f}" if isinstance(value, float) else str(value)
            for name, value in ({**row, "logprob_gap": row.get("logprob_gap", 0.0)}).items()
        ]
        for row in rows.values()
    )
    return markdown_table(headings, [[key, *values] for key, values in zip(rows, said, strict=True)])


if __name__ == "__main__":
    main()
