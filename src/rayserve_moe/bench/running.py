"""Load generation: requests at scheduled times, with a maximum number in flight."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
from tqdm import tqdm

from rayserve_moe.bench.chart import chart
from rayserve_moe.bench.client import BenchClient, Outcome, ServerUnusable
from rayserve_moe.bench.command import RANDOM
from rayserve_moe.bench.prompts import Prompt, RandomLengths, body_of, prompts_of_file, random_prompts
from rayserve_moe.bench.report import Reported, result_of, table_lines

FAILED, INTERRUPTED = 1, 130
TERMINAL_INTERVAL_S, LOG_INTERVAL_S = 0.2, 10.0


@dataclass(frozen=True)
class Load:
    """Requests of a run."""

    path: str
    bodies: Sequence[bytes]
    starts: np.ndarray
    """Seconds from the start at which they are sent."""
    max_concurrency: int


def run(options: argparse.Namespace) -> int:
    """Send the load and report; return 1 if a request failed, 130 after Ctrl-C with what had ended by then.

    Raises: ValueError for a dataset that does not fit the route.
    """
    outcomes: list[Outcome] = []
    try:
        prompts, seconds, is_whole = asyncio.run(_run(options, outcomes))
    except ServerUnusable as error:
        sys.stderr.write(f"rayserve-moe bench: {error}\n")
        return FAILED
    reported = Reported(options.percentile_metrics, options.metric_percentiles, options.goodput)
    result = _about(options) | result_of(outcomes, prompts=prompts, seconds=seconds, reported=reported)
    text = json.dumps(result) if options.json else "\n".join(table_lines(result, reported))
    sys.stdout.write(text + "\n")
    _write_files(options, result, outcomes)
    return INTERRUPTED if not is_whole else FAILED if result["failed"] else 0


def _about(options: argparse.Namespace) -> dict[str, object]:
    """Return the facts of a run."""
    rate = options.request_rate
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "backend": options.backend,
        "endpoint": options.endpoint,
        "model_id": options.model,
        "num_prompts": options.num_prompts,
        "request_rate": rate if math.isfinite(rate) else "inf",
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "seed": options.seed,
    }


def _write_files(options: argparse.Namespace, result: dict, outcomes: Sequence[Outcome]) -> None:
    if options.save_result or options.save_detailed:
        details = {}
        if options.save_detailed:
            done = [one for one in outcomes if one.is_ok]
            details = {
                "input_lens": [one.num_prompt_tokens for one in done],
                "output_lens": [one.num_output_tokens for one in done],
                "ttfts": [one.ttft for one in done],
                "itls": [one.itls for one in done],
                "start_times": [one.started for one in done],
                "errors": [one.message for one in outcomes if not one.is_ok],
            }
        name = options.result_filename or _file_name(options)
        path = options.result_dir / name
        path.write_text(json.dumps(result | details) + "\n", encoding="utf-8")
        sys.stderr.write(f"result: {path}\n")
    if options.plot:
        options.plot.write_text(chart(outcomes, title=f"{options.model}, {_load(options)}"), encoding="utf-8")
        sys.stderr.write(f"chart: {options.plot}\n")


def _file_name(options: argparse.Namespace) -> str:
    concurrency = f"-concurrency{options.max_concurrency}" if options.max_concurrency else ""
    moment = datetime.now().strftime("%Y%m%d-%H%M%S")
    return f"{options.backend}-{options.request_rate:g}qps{concurrency}-{Path(options.model).name}-{moment}.json"


def _load(options: argparse.Namespace) -> str:
    rate = f"{options.request_rate:g} requests per second" if math.isfinite(options.request_rate) else "all at once"
    return f"{rate}, at most {options.max_concurrency} in flight" if options.max_concurrency else rate


async def _run(options: argparse.Namespace, outcomes: list[Outcome]) -> tuple[list[Prompt], float, bool]:
    """Send all requests, filling `outcomes`; return prompts, seconds, and False if Ctrl-C ended it.

    Raises: ServerUnusable before the first request.
    """
    async with BenchClient(options.base_url, api_key=options.api_key, timeout_s=options.timeout) as client:
        options.model = options.model or await client.model()
        prompts = await _prompts(options, client)
        is_random = options.dataset_name == RANDOM
        bodies = [
            json.dumps(
                body_of(
                    prompt,
                    model=options.model,
                    is_chat="chat" in options.endpoint,
                    ignores_eos=options.ignore_eos or is_random,
                    temperature=options.temperature or 0.0,
                )
            ).encode()
            for prompt in prompts
        ]
        sys.stderr.write(f"{len(bodies)} requests to {options.base_url}{options.endpoint}, {_load(options)}\n")
        for number in range(options.num_warmups):
            warmup = await client.send(options.endpoint, bodies[number % len(bodies)])
            if not warmup.is_ok:
                raise ServerUnusable(f"the first request failed: {warmup.error}: {warmup.message}")
        interval_s = TERMINAL_INTERVAL_S if sys.stderr.isatty() else LOG_INTERVAL_S
        bar = tqdm(total=len(bodies), unit="request", mininterval=interval_s, disable=options.disable_tqdm)
        load = Load(options.endpoint, bodies, starts_of(options), options.max_concurrency or len(bodies))
        started, is_whole = time.perf_counter(), True
        with bar:
            try:
                await send_all(client, load, outcomes=outcomes, bar=bar)
            except asyncio.CancelledError:
                is_whole = False
        return prompts, time.perf_counter() - started, is_whole


async def _prompts(options: argparse.Namespace, client: BenchClient) -> list[Prompt]:
    """Return the prompts of a file, or random ones; those of chats are texts."""
    if options.dataset_name != RANDOM:
        path, most = options.dataset_path, options.custom_output_len
        return prompts_of_file(path, num_prompts=options.num_prompts, max_tokens=most)
    vocab_size = options.vocab_size or await client.vocab_size()
    lengths = RandomLengths(
        options.random_input_len, options.random_output_len, options.random_prefix_len, options.random_range_ratio
    )
    drawn = random_prompts(lengths, num_prompts=options.num_prompts, vocab_size=vocab_size, seed=options.seed)
    if "chat" not in options.endpoint:
        return [Prompt(one.ids, one.max_tokens) for one in drawn]
    texts = await client.texts([one.ids for one in drawn], model=options.model)
    return [Prompt(text, one.max_tokens) for text, one in zip(texts, drawn, strict=True)]


def starts_of(options: argparse.Namespace) -> np.ndarray:
    """Return the seconds from the start at which requests are sent: gamma intervals, Poisson for burstiness 1."""
    if not math.isfinite(options.request_rate):
        return np.zeros(options.num_prompts)
    source, shape = np.random.default_rng(options.seed), options.burstiness
    intervals = source.gamma(shape, 1.0 / (options.request_rate * shape), options.num_prompts)
    starts = np.cumsum(intervals) - intervals[0]
    wanted = (options.num_prompts - 1) / options.request_rate
    # The drawn intervals of few requests can be far from the rate: scale them to it.
    return starts * (wanted / starts[-1]) if starts[-1] > 0 else starts


async def send_all(client: BenchClient, load: Load, *, outcomes: list[Outcome], bar: tqdm) -> None:
    """Send every request of a load at its time; add outcomes in the order of their ends."""
    slots = asyncio.Semaphore(load.max_concurrency)
    begun = time.perf_counter()

    async def send(raw: bytes) -> None:
        async with slots:
            outcomes.append(await client.send(load.path, raw))
        bar.update()

    async with asyncio.TaskGroup() as group:
        for raw, start in zip(load.bodies, load.starts.tolist(), strict=True):
            if (wait_s := begun + start - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            group.create_task(send(raw))
