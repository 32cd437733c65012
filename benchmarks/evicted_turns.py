"""Second turns of sessions whose pages were evicted, served: computed tokens, copies, and gaps of another stream.

    python -m benchmarks.evicted_turns [--size small] [--sessions 16] [--repeats 5] [--out FILE.json]

One server finds the pages of second turns on the devices. The other has pages for a fifth of the sessions, and restores
them from host memory. Both compute the same tokens, in alternating runs, beside a stream that only decodes.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.conditions import RESULTS, checkpoint_of, load_before_start, machine_facts, note, save
from benchmarks.conversations import fewest_computed
from benchmarks.fleet_table import FOUND, RESTORED, evicted_turns
from benchmarks.serve_process import HOST, ServeProcess
from benchmarks.workloads import FIRST_PLAIN_ID
from rayserve_moe.checkpoints.synthetic import PRESETS

PAGE_SIZE, FIRST_TOKENS, ANSWER_TOKENS, NEW_TOKENS = 16, 480, 16, 48
TOGETHER = 4
"""Turns at a time."""
FIRST_EVENTS = 16
HOST_MIB = 512


def settings(size: str, *, side: str, num_sessions: int) -> dict[str, Any]:
    """Return the settings of a server."""
    pages_per_session = -(-(FIRST_TOKENS + NEW_TOKENS + 2 * ANSWER_TOKENS) // PAGE_SIZE)
    all_pages = 2 * (num_sessions + TOGETHER) * pages_per_session
    return {
        "model_path": str(checkpoint_of(size)),
        "num_pages": all_pages if side == FOUND else 2 * TOGETHER * pages_per_session,
        "host_cache_mib": 0 if side == FOUND else HOST_MIB,
        "page_size": PAGE_SIZE,
        "max_model_len": 2048,
        "max_running_requests": 2 * TOGETHER,
        "precompile_bs_paddings": [2 * TOGETHER],
        "structured_output": False,
    }


async def ask(client: httpx.AsyncClient, prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
    """Return the answers to prompts, TOGETHER at a time, in order."""
    limit = asyncio.Semaphore(TOGETHER)

    async def one(prompt: list[int]) -> dict[str, Any]:
        async with limit:
            sampling = {"max_new_tokens": ANSWER_TOKENS, "temperature": 0.0, "ignore_eos": True}
            answer = await client.post("/generate", json={"input_ids": prompt, "sampling_params": sampling})
            return answer.raise_for_status().json()

    return list(await asyncio.gather(*map(one, prompts)))


async def stream(client: httpx.AsyncClient, prompt: list[int], times: list[float], decodes: asyncio.Event) -> None:
    """Record when each event of a long answer arrives; it `decodes` after some."""
    sampling = {"max_new_tokens": 1500, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    async with client.stream("POST", "/generate", json=body) as answer:
        async for line in answer.aiter_lines():
            times += [time.perf_counter()] * line.startswith("data:")
            if len(times) > FIRST_EVENTS:
                decodes.set()


async def moved_pages(client: httpx.AsyncClient) -> float:
    """Return the pages that were copied to host memory and back so far."""
    lines = (await client.get("/metrics")).raise_for_status().text.splitlines()
    names = ("rayserve_moe_host_pages_offloaded_total", "rayserve_moe_host_pages_restored_total")
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(names))


async def run(port: int, *, vocab_size: int, num_sessions: int, seed: int) -> tuple[dict[str, float], list[list[int]]]:
    """Play two turns of all sessions, with other prompts between them; return figures, and the second answers."""
    draw = np.random.default_rng(seed)

    def tokens(count: int) -> list[int]:
        return draw.integers(FIRST_PLAIN_ID, vocab_size, count).tolist()

    async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=600) as client:
        (await client.post("/flush_cache")).raise_for_status()
        first = [tokens(FIRST_TOKENS) for _ in range(num_sessions)]
        answers = await ask(client, first)
        await ask(client, [tokens(FIRST_TOKENS) for _ in range(2 * TOGETHER)])
        known = [len(prompt) + ANSWER_TOKENS - 1 for prompt in first]
        second = [
            [*prompt, *answer["output_ids"], *tokens(NEW_TOKENS)] for prompt, answer in zip(first, answers, strict=True)
        ]
        times, decodes = list[float](), asyncio.Event()
        other = asyncio.create_task(stream(client, tokens(32), times, decodes))
        await decodes.wait()
        moved, began = await moved_pages(client), time.perf_counter()
        answers = await ask(client, second)
        ended = time.perf_counter()
        moved = await moved_pages(client) - moved
        other.cancel()
        with suppress(asyncio.CancelledError):
            await other
    gaps = np.diff([at for at in times if began <= at <= ended])
    pairs = list(zip(second, known, strict=True))
    figures = {
        "computed": float(sum(len(p) - a["meta_info"]["cached_tokens"] for p, a in zip(second, answers, strict=True))),
        "ideal": float(sum(fewest_computed(len(prompt), num, page_size=PAGE_SIZE) for prompt, num in pairs)),
        "given": float(sum(map(len, second))),
        "moved_pages": moved,
        "gap_s": float(np.median(gaps)),
        "seconds": ended - began,
    }
    return figures, [answer["output_ids"] for answer in answers]


def measure(size: str, *, num_sessions: int, repeats: int) -> dict[str, Any]:
    """Return the runs of both servers, alternating, after one of each that does not count.

    Raises: RuntimeError if their answers differ.
    """
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in (FOUND, RESTORED)}
    with ExitStack() as stack:
        servers = {
            side: stack.enter_context(ServeProcess(settings(size, side=side, num_sessions=num_sessions)))
            for side in (FOUND, RESTORED)
        }
        metrics = httpx.get(f"http://{HOST}:{servers[RESTORED].port}/metrics").text.splitlines()
        (total,) = (line for line in metrics if line.startswith("rayserve_moe_host_pages{"))
        page_bytes = (HOST_MIB << 20) / float(total.rpartition(" ")[2])
        for repeat in range(-1, repeats):
            answers = []
            for side, server in servers.items():
                how = {"vocab_size": PRESETS[size].vocab_size, "num_sessions": num_sessions}
                found, ids = asyncio.run(run(server.port, **how, seed=repeat + 1))
                answers.append(ids)
                note(f"{side} {repeat + 1}/{repeats}: {found}")
                if repeat >= 0:
                    runs[side].append(found)
            if answers[0] != answers[1]:
                raise RuntimeError("answers differ between pages on the devices and pages from host memory")
    return {"size": size, "sessions": num_sessions, "page_bytes": page_bytes, "runs": runs}


def main() -> None:
    """Measure, write the result file, print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=sorted(PRESETS), default="small")
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "evicted_turns.json")
    arguments = parser.parse_args()
    load_before = load_before_start()
    measured = measure(arguments.size, num_sessions=arguments.sessions, repeats=arguments.repeats)
    save({"evicted_machine": machine_facts(load_before), "evicted_turns": measured}, arguments.out)
    print(evicted_turns(measured))


if __name__ == "__main__":
    main()
