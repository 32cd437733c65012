"""Ten times the requests that a fleet can answer: what is answered, what is refused, `/health`, and memory meanwhile.

    python -m benchmarks.fleet_overload [--minutes 10] [--factor 10] [--max-tokens 2600] [--leave-core] [--out FILE]

The peak is what as many clients as there are places get, each asking again once it is answered: the mean of before and
after, since the speed of a machine drifts. Between, requests come at `--factor` times the first, at random moments,
whatever comes of those before them; every other one is a stream. The journal keeps all of them. The clients are one
process beside the server, whose CPU seconds are stated, and how late it was itself when it asked `/health`. With
`--leave-core` the last core is theirs alone, also while the peak is measured; the server has the others.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.conditions import RESULTS, load_before_start, machine_facts, note, save
from benchmarks.fleet_table import fleet_overload as as_table
from benchmarks.kill_clients import Seen, completion, health
from benchmarks.kill_fleet import REPLICA, ROUTER
from benchmarks.serve_process import ServeProcess

ROWS, WAITING, PROMPT_TOKENS = 16, 16, 64
LIMIT_S, HEALTH_EVERY_S, MEMORY_EVERY_S = 600.0, 0.25, 5.0
HEALTH_S = 0.1
"""What a call of `/health` may take."""
WARM_S, PEAK_S = 30.0, 120.0
PARTS = {
    "replica": REPLICA,
    "router": ROUTER,
    "worker": "ray::HostWorker",
    "journal": "rayserve_moe.serving.start.journal",
    "HAProxy": "haproxy",
}
"""Whose memory is looked at: the titles of its processes."""


def settings(num_replicas: int, *, max_tokens: int) -> dict[str, Any]:
    """Return the settings of the served fleet: the embedded model, and few rows."""
    return {
        "model_path": "trained:calculator",
        "num_replicas": num_replicas,
        "max_model_len": max_tokens * 3 // 2 + PROMPT_TOKENS,
        "max_running_requests": ROWS,
        "max_waiting_requests": WAITING,
        "precompile_bs_paddings": [ROWS],
        "structured_output": False,
    }


@dataclass
class Watched:
    """What was seen: requests and calls of `/health` as they ended, and resident bytes of parts by time.

    `late_s` are seconds by which the clients' process was late when one of its own times had come.
    """

    requests: list[Seen] = field(default_factory=list)
    health: list[Seen] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    resident: list[tuple[float, dict[str, int]]] = field(default_factory=list)


def resident_bytes(pids: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return resident bytes of the largest process of each part."""
    return {part: max(map(_resident, of_part), default=0) for part, of_part in pids.items()}


def _resident(pid: int) -> int:
    try:
        pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


async def closed_loop(port: int, *, num_clients: int, max_tokens: int, seconds: float) -> float:
    """Return the answers per second of clients that ask again at once; the first `WARM_S` do not count."""
    over, seen, numbers = time.monotonic() + WARM_S + seconds, list[Seen](), count(-1, -1)

    async def ask() -> None:
        while time.monotonic() < over:
            seen.append(await answer(port, next(numbers), max_tokens=max_tokens))

    await asyncio.gather(*(ask() for _ in range(num_clients)))
    return rate_of(seen, over - seconds, over)


async def answer(port: int, number: int, *, max_tokens: int) -> Seen:
    """Ask, by a name, for 0.5 to 1.5 times as many tokens: answers do not end together. Even numbers are streams."""
    length = max_tokens // 2 + int(max_tokens * (0.618034 * number % 1.0))
    name = f"{max_tokens} {number}"
    return await completion(port, max_tokens=length, streams=number % 2 == 0, limit_s=LIMIT_S, rid=name)


def rate_of(seen: list[Seen], since: float, until: float) -> float:
    """Return whole answers a second that came within a time."""
    return sum(one.is_served and since <= one.ended_at < until for one in seen) / (until - since)


async def open_loop(serve: ServeProcess, *, rate: float, max_tokens: int, seconds: float) -> Watched:
    """Ask at random moments, `rate` times a second on average, for so long; waits for all answers."""
    pids = {part: serve.pids_of(title) for part, title in PARTS.items()}  # a slow search that would delay the clients
    watched, over, draw = Watched(), time.monotonic() + seconds, random.Random(0)

    async def every(period_s: float, look: Callable[[], Awaitable[None]]) -> None:
        while time.monotonic() < over:
            await look()
            due = time.monotonic() + period_s
            await asyncio.sleep(period_s)
            watched.late_s.append(time.monotonic() - due)

    async def look_at_health() -> None:
        watched.health.append(await health(serve.port, limit_s=LIMIT_S))

    async def look_at_memory() -> None:
        watched.resident.append((time.monotonic(), resident_bytes(pids)))

    async def ask(number: int) -> None:
        watched.requests.append(await answer(serve.port, number, max_tokens=max_tokens))

    watching = [every(HEALTH_EVERY_S, look_at_health), every(MEMORY_EVERY_S, look_at_memory)]
    async with asyncio.TaskGroup() as tasks:
        for each in watching:
            tasks.create_task(each)
        asks_at = time.monotonic()
        for number in count():
            asks_at += draw.expovariate(rate)  # also where this process is late
            if asks_at >= over:
                break
            await asyncio.sleep(asks_at - time.monotonic())
            tasks.create_task(ask(number))
    return watched


def figures(watched: Watched, *, seconds: float, over: float, peaks: Sequence[float]) -> dict[str, Any]:
    """Return the outcomes of requests, and memory by part at the start and the end with its slope in the second half.

    Goodput, as the peaks, does not count the first `WARM_S`, nor answers that came after the arrivals' end.
    """
    kinds = Counter("429 without Retry-After" if _is_bare(one) else one.kind for one in watched.requests)
    refused = [one.ended_at - one.asked_at for one in watched.requests if one.kind == "429"]
    times = np.array([one.ended_at - one.asked_at for one in watched.health])
    goodput = rate_of(watched.requests, over - seconds + WARM_S, over)
    return {
        "peaks_s": list(peaks),
        "arrivals_s": len(watched.requests) / seconds,
        "goodput_s": goodput,
        "goodput_of_peak": goodput / float(np.mean(peaks)),
        "answers": dict(kinds),
        "refused_p50_ms": 1e3 * float(np.median(refused)) if refused else None,
        "refused_worst_ms": 1e3 * max(refused, default=0.0),
        "health_calls": len(times),
        "health_failed": sum(not one.is_served for one in watched.health),
        **{f"health_{name}_ms": 1e3 * float(np.quantile(times, q)) for name, q in (("p50", 0.5), ("p99", 0.99))},
        "health_worst_ms": 1e3 * float(times.max()),
        "clients_late_p99_ms": 1e3 * float(np.quantile(watched.late_s, 0.99)),
        "clients_late_worst_ms": 1e3 * max(watched.late_s),
        "health_slow": int((times > HEALTH_S).sum()),
        "resident": {part: _growth(watched.resident, part) for part in PARTS},
    }


def _is_bare(one: Seen) -> bool:
    return one.kind == "429" and not one.retry_after


def _growth(resident: list[tuple[float, dict[str, int]]], part: str) -> dict[str, float]:
    at = np.array([when for when, _ in resident])
    mib = np.array([parts[part] for _, parts in resident]) / 2**20
    half = len(at) // 2
    slope = float(np.polyfit(at[half:], mib[half:], 1)[0]) * 60 if len(at) - half > 1 else 0.0
    return {"start_mib": float(mib[0]), "end_mib": float(mib[-1]), "second_half_mib_per_min": slope}


@contextmanager
def other_cores(is_wanted: bool) -> Iterator[None]:
    """Within the context, start processes on all cores but the last, and keep this process on the last one."""
    cores = sorted(os.sched_getaffinity(0))
    if is_wanted:
        os.sched_setaffinity(0, cores[:-1])
    try:
        yield
    finally:
        if is_wanted:
            for thread in os.listdir("/proc/self/task"):
                os.sched_setaffinity(int(thread), cores[-1:])


def measure(
    *, num_replicas: int, minutes: float, factor: float, max_tokens: int, leaves_core: bool = False
) -> dict[str, Any]:
    """Serve, find the peak, then send `factor` times as much."""
    gc.freeze()  # a collection of what is imported stops the clients for half a second
    with ExitStack() as stack:
        with other_cores(leaves_core):
            serve = stack.enter_context(ServeProcess(settings(num_replicas, max_tokens=max_tokens)))
        places = num_replicas * ROWS
        how = {"num_clients": places, "max_tokens": max_tokens, "seconds": PEAK_S}
        peaks = [asyncio.run(closed_loop(serve.port, **how))]
        note(f"peak: {peaks[0]:.2f} answers/s of {max_tokens} tokens by {places} clients")
        seconds, server_cpu, cpu = 60 * minutes, serve.cpu_seconds(), time.process_time()
        began = time.monotonic()
        watched = asyncio.run(open_loop(serve, rate=factor * peaks[0], max_tokens=max_tokens, seconds=seconds))
        wall_s, cpu_s = time.monotonic() - began, time.process_time() - cpu
        used = {part: after - server_cpu[part] for part, after in serve.cpu_seconds().items()}
        peaks.append(asyncio.run(closed_loop(serve.port, **how)))
    found = figures(watched, seconds=seconds, over=began + seconds, peaks=peaks)
    asked = {"num_replicas": num_replicas, "factor": factor, "max_tokens": max_tokens, "seconds": seconds}
    asked["leaves_core"] = leaves_core
    return {**asked, **found, "wall_s": wall_s, "client_cpu_s": cpu_s, "server_cpu_s": used}


def main() -> None:
    """Measure, write the result file, print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--factor", type=float, default=10.0)
    parser.add_argument("--max-tokens", type=int, default=2600, help="of an answer, on average")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--leave-core", action="store_true", help="to the clients")
    parser.add_argument("--out", type=Path, default=RESULTS / "fleet_overload.json")
    arguments = parser.parse_args()
    load_before = load_before_start()
    how = {"minutes": arguments.minutes, "factor": arguments.factor, "max_tokens": arguments.max_tokens}
    found = measure(num_replicas=arguments.replicas, **how, leaves_core=arguments.leave_core)
    save({"overload_machine": machine_facts(load_before), "fleet_overload": found}, arguments.out)
    print(as_table(found))


if __name__ == "__main__":
    main()
