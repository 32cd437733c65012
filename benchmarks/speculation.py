"""Steps with drafts that are right with a known probability, against plain ones: tokens per second.

    python -m benchmarks.speculation [--size small] [--streams 1 16] [--shares 0.5 0.9] [--tokens 96] [--repeats 3]

One device, sides in turn over one runner. An oracle that knows the plain answers drafts; 1, 3, 5 and 7 are fixed
numbers of drafts, `chosen` is what the server does, from its start; fixed ones run once. `--tokens` are of each
sequence, one number or one for each of `--streams`. A step that took three times the median of its run counts as the
median: what else runs on the machine does not decide. Every side must give the same ids.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from dataclasses import replace
from statistics import median

import numpy as np

from benchmarks.conditions import checkpoint_of, load_before_start, note
from benchmarks.engine_runs import in_turn
from rayserve_moe.engine.speculation import Speculation
from rayserve_moe.inprocess.engine import Engine
from rayserve_moe.requests import GenerationRequest
from tests.support.drive import Way, choices_of, cycle_for
from tests.support.oracle import Oracle
from tests.support.outcomes import Outcome, Outcomes
from tests.support.workload import request_for

PROMPT_TOKENS, ROWS, MOST = 64, 16, 7
SIDES = ("plain", 1, 3, 5, 7, "chosen")


def run(engine: Engine, requests: list[GenerationRequest], speculation: Oracle | None, side: object) -> tuple:
    """Run all requests; returns ids by choice, seconds of all steps, their tokens, and the drafts' totals."""
    way = Way(num_rows=ROWS, step_tokens=1024, chunk_tokens=1024, num_pages=engine.loop.start_report.num_pages)
    cycle = cycle_for(engine.runner, engine.card, replace(way, with_capture=False, caches_prefixes=False))
    if speculation is not None:
        most = side if isinstance(side, int) else MOST
        table, is_fixed = cycle.scheduler.table, isinstance(side, int)
        cycle.speculation = Speculation(table, speculation, most_drafts=most, is_fixed=is_fixed)
    found, seconds, num_tokens = {}, [], 0
    for request in requests:
        cycle.scheduler.add(choices_of(request, engine.card))
    while cycle.has_work:
        started = time.perf_counter()
        rows, ended = cycle.run()
        seconds.append(time.perf_counter() - started)
        num_tokens += len(rows)
        found |= {s.request.request_id: s.token_ids[s.num_prompt_tokens : s.num_tokens].tolist() for s in ended}
    usual = median(seconds)
    total = sum(usual if each > 3 * usual else each for each in seconds)
    return found, total, num_tokens, cycle.speculation and cycle.speculation.totals


def main() -> None:
    """Measure, and print a line per side."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="small")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.9])
    parser.add_argument("--tokens", type=int, nargs="+", default=[96])
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    note(f"load before: {load_before_start():.2f}")
    settings = {"max_running_requests": ROWS, "precompile_bs_paddings": [1, 8, ROWS], "max_step_tokens": 1024}
    settings |= {"speculative_algorithm": "NGRAM", "dtype": "bfloat16", "cpu_kernels": "native", "page_size": 16}
    with Engine(str(checkpoint_of(asked.size)), **settings, max_model_len=1024) as engine:
        lengths = asked.tokens * (len(asked.streams) if len(asked.tokens) == 1 else 1)
        for streams, num_new in zip(asked.streams, lengths, strict=True):
            generator = np.random.default_rng(streams)
            prompts = generator.integers(10, 1000, (streams, PROMPT_TOKENS)).astype(np.int32)
            requests = [request_for(p, f"{i}", max_new_tokens=num_new) for i, p in enumerate(prompts)]
            requests = [replace(request, return_routed_experts=False) for request in requests]
            for share in asked.shares:
                report(engine, requests, share=share, repeats=asked.repeats)


def report(engine: Engine, requests: list[GenerationRequest], *, share: float, repeats: int) -> None:
    """Print one table. RuntimeError where ids differ."""
    plain = run(engine, requests, None, "plain")[0]
    known: Outcomes = {(name, 0): Outcome(ids=ids) for name, ids in plain.items()}
    rates: dict[object, list[float]] = defaultdict(list)
    totals: dict[object, object] = {}
    for repeat in range(repeats):
        for side in in_turn(list(SIDES), repeat):
            if repeat and isinstance(side, int):
                continue
            oracle = None if side == "plain" else Oracle(known, share=share, vocab_size=engine.card.vocab_size)
            found, seconds, num_tokens, totals[side] = run(engine, requests, oracle, side)
            if found != plain:
                raise RuntimeError(f"{side}: ids differ from the plain ones")
            rates[side].append(num_tokens / seconds)
    of_plain = median(rates["plain"])
    for side in SIDES:
        rate = median(rates[side])
        ratios = [a / b for a, b in zip(rates[side], rates["plain"], strict=False)]
        spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
        print(
            f"{len(requests)} streams, p {share}, {side}: {rate:.0f} tokens/s, {rate / of_plain:.2f} ({spread})",
            end=" ",
        )
        print(totals[side] or "", flush=True)


if __name__ == "__main__":
    main()
