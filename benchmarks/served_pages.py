"""Evicted pages in host memory, over HTTP: computed tokens of second turns, bytes of traffic, and steps of others.

    python -m benchmarks.served_pages [--size small] [--sessions 16] [--repeats 5] [--out FILE.json]

The pool holds a third of the sessions. Their second turns find their pages in host memory. Then streams run beside
prompts of one new token, whose pages are on the devices in one run and in host memory in the next, in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.conditions import RESULTS, checkpoint_of, conditions, load_before_start, note, save
from benchmarks.fleet_table import served_pages
from benchmarks.prefill_served import stream
from rayserve_moe.checkpoints.synthetic import PRESETS
from rayserve_moe.inprocess.engine import Engine
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.http import create_api
from tests.support.serving.http_server import running

PAGE_SIZE, FIRST, ANSWER, MORE = 16, 512, 16, 48
"""Tokens of a page, a first prompt, an answer, and what a second turn adds."""
NUM_STREAMS, STREAM_TOKENS, NUM_BESIDE = 4, 240, 40


def settings(num_sessions: int) -> dict[str, Any]:
    """Return settings whose pool holds a third of the sessions, beside the streams."""
    session_pages = -(-(FIRST + 2 * ANSWER + MORE) // PAGE_SIZE)
    stream_pages = -(-(STREAM_TOKENS + PAGE_SIZE) // PAGE_SIZE)
    return {
        "dtype": "bfloat16",
        "page_size": PAGE_SIZE,
        "num_pages": 1 + session_pages * max(2, num_sessions // 3) + NUM_STREAMS * stream_pages,
        "max_model_len": FIRST + 2 * ANSWER + MORE + PAGE_SIZE,
        "max_running_requests": 8,
        "precompile_bs_paddings": [8],
        "max_step_tokens": 256,
        "enable_return_routed_experts": True,
        "structured_output": False,
        "host_cache_mib": 512,
    }


def second_turns(client: httpx.Client, prompts: list[list[int]], draw: np.random.Generator) -> dict[str, float]:
    """Play two turns of each session, all first turns before; return computed tokens beside the ideal."""
    vocab_size, nexts = max(map(max, prompts)), []
    for prompt in prompts:
        answer = ask(client, prompt, ANSWER)
        nexts.append([*prompt, *answer["output_ids"], *draw.integers(16, vocab_size, MORE).tolist()])
    computed = ideal = 0
    for prompt in nexts:
        meta = ask(client, prompt, 1)["meta_info"]
        computed += meta["prompt_tokens"] - meta["cached_tokens"]
        ideal += len(prompt) - (FIRST + ANSWER - 1) // PAGE_SIZE * PAGE_SIZE
    return {"computed": computed, "ideal": ideal}


def ask(client: httpx.Client, prompt: list[int], num_new: int) -> dict[str, Any]:
    """Return the greedy answer to a prompt."""
    sampling = {"max_new_tokens": num_new, "temperature": 0, "ignore_eos": True}
    answer = client.post("/generate", json={"input_ids": prompt, "sampling_params": sampling})
    answer.raise_for_status()
    return answer.json()


async def beside(url: str, prompts: list[list[int]], draw: np.random.Generator, *, vocab_size: int) -> float:
    """Return the median seconds per token of streams while prompts of one new token come and go."""
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        beginnings = draw.integers(16, vocab_size, (NUM_STREAMS, PAGE_SIZE)).tolist()
        streams = [
            asyncio.create_task(stream(client, prompt, num_new=STREAM_TOKENS, seed=seed))
            for seed, prompt in enumerate(beginnings)
        ]
        await asyncio.sleep(0.2)
        for number in range(NUM_BESIDE):
            if all(each.done() for each in streams):
                break
            sampling = {"max_new_tokens": 1, "temperature": 0}
            body = {"input_ids": prompts[number % len(prompts)], "sampling_params": sampling}
            (await client.post("/generate", json=body)).raise_for_status()
        return statistics.median(gap for one in await asyncio.gather(*streams) for gap in one.tokens)


def measure(engine: Engine, *, num_sessions: int, vocab_size: int, repeats: int) -> dict[str, Any]:
    """Return computed tokens, traffic, and ratios of the streams' seconds per token."""
    draw = np.random.default_rng(0)
    prompts = [draw.integers(16, vocab_size, FIRST).tolist() for _ in range(num_sessions)]
    with running(create_api(ApiState(engine.loop, engine.tokenizer))) as url:
        with httpx.Client(base_url=url, timeout=600) as client:
            turns = second_turns(client, prompts, draw)
        before, rows = engine.loop.statistics(), []
        for repeat in range(repeats + 1):
            of_side = {}
            for side, some in (("devices", prompts[:1]), ("host memory", prompts)):
                of_side[side] = asyncio.run(beside(url, some, draw, vocab_size=vocab_size))
            if repeat:
                rows.append(of_side["host memory"] / of_side["devices"])
                note(f"{rows[-1]:.3f}")
    after, store = engine.loop.statistics(), engine.runner.pages
    assert store is not None
    moved = sum(after[f"host_pages_{name}"] for name in ("offloaded", "restored"))
    return {
        **turns,
        "bytes_per_token": store.page_bytes / PAGE_SIZE,
        "pages_moved": moved,
        "restored_beside": after["host_pages_restored"] - before["host_pages_restored"],
        "token_ratios": rows,
    }


def main() -> None:
    """Measure, write the result file, print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=sorted(PRESETS), default="small")
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "served_pages.json")
    arguments = parser.parse_args()
    load_before, vocab_size = load_before_start(), PRESETS[arguments.size].vocab_size
    with Engine(str(checkpoint_of(arguments.size)), **settings(arguments.sessions)) as engine:
        measured = measure(engine, num_sessions=arguments.sessions, vocab_size=vocab_size, repeats=arguments.repeats)
        facts = conditions(engine, size=arguments.size, repeats=arguments.repeats, load_before=load_before)
    save({**facts, "served_pages": {"sessions": arguments.sessions, **measured}}, arguments.out)
    print(served_pages({"sessions": arguments.sessions, **measured}))


if __name__ == "__main__":
    main()
