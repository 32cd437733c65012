"""What being able to replace lost hosts costs while none is lost: tokens per second with and without, in turns.

    python -m benchmarks.loss_cost [--pairs 20] [--out FILE.json]

Two replicas of the embedded model run side by side, each with a worker of its own: one watches its worker, keeps a
standby and may replace both; of the other the heartbeat is closed and nothing is replaced. A pair is a batch on each,
in alternating order. The interval of the median is that of order statistics, at 95 % at least.
"""

from __future__ import annotations

import argparse
import math
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray

from benchmarks.conditions import RESULTS, load_before_start, machine_facts, note, save
from benchmarks.kill_table import SETTINGS
from benchmarks.markdown import markdown_table
from benchmarks.narrow import num_ended, submit_all
from rayserve_moe.checkpoints.model_path import resolve_model_path
from rayserve_moe.cluster.group_executor import DELAY_S
from rayserve_moe.cluster.replica_engine import ReplicaEngine, start_replica_engine
from rayserve_moe.config.load import default_cache_directory, settings_from
from rayserve_moe.requests.results import ChoiceResult

NUM_STREAMS, PROMPT_TOKENS, NUM_TOKENS = 32, 8, 300
SETTLE_S = 12.0
"""After the starts: the standby is there by then."""
LIMIT_S = 300.0


def replica(*, watches: bool) -> ReplicaEngine:
    """Return a replica whose worker is watched and can be replaced, or neither."""
    own = {"standby_workers": True} if watches else {"max_rebuilds_in_10_minutes": 0}
    model_path = resolve_model_path(SETTINGS["model_path"], cache_directory=default_cache_directory())
    engine = start_replica_engine(settings_from({**SETTINGS, "model_path": str(model_path), "num_hosts": 1, **own}))
    group = engine.executor._group
    if not watches and group is not None and group._watch is not None:
        group._watch.close()  # the heartbeat ends with its connection
    return engine


def tokens_per_s(engine: ReplicaEngine, *, seed: int) -> float:
    """Return the tokens per second of a batch that streams all of its tokens."""
    all_ended, num_open = threading.Event(), [NUM_STREAMS]

    def receive(updates: list[ChoiceResult]) -> None:
        num_open[0] -= num_ended(updates)
        if not num_open[0]:
            all_ended.set()

    prompts = np.random.default_rng(seed).integers(5, 15, (NUM_STREAMS, PROMPT_TOKENS), np.int32)
    begun = time.perf_counter()
    submit_all(engine.loop, list(prompts), num_new_tokens=NUM_TOKENS, sink=receive)
    if not all_ended.wait(LIMIT_S):
        raise TimeoutError("the batch has not ended")
    return NUM_STREAMS * NUM_TOKENS / (time.perf_counter() - begun)


def interval_of_median(values: list[float], *, at_least: float = 0.95) -> tuple[float, float]:
    """Return the narrowest pair of order statistics that holds the median with this probability."""
    ordered, count = sorted(values), len(values)
    outside, skipped = 2 * 0.5**count, 0
    while outside + 2 * math.comb(count, skipped + 1) * 0.5**count <= 1 - at_least:
        skipped += 1
        outside += 2 * math.comb(count, skipped) * 0.5**count
    return ordered[skipped], ordered[count - 1 - skipped]


def summary(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Return medians of both, and of the ratios with over without, of `pairs` of tokens per second."""
    ratios = [ours / theirs for ours, theirs in pairs]
    return {
        "pairs": len(pairs),
        "with": statistics.median(ours for ours, _ in pairs),
        "without": statistics.median(theirs for _, theirs in pairs),
        "ratio": statistics.median(ratios),
        "interval": interval_of_median(ratios),
        "ratios": ratios,
    }


def measure(num_pairs: int) -> list[tuple[float, float]]:
    """Measure tokens per second with and without, pair by pair."""
    engines = {watches: replica(watches=watches) for watches in (True, False)}
    try:
        for engine in engines.values():
            tokens_per_s(engine, seed=0)
        time.sleep(DELAY_S + SETTLE_S)
        pairs = []
        for number in range(num_pairs):
            order = (True, False) if number % 2 else (False, True)
            found = {watches: tokens_per_s(engines[watches], seed=number) for watches in order}
            pairs.append((found[True], found[False]))
            note(f"{number + 1}/{num_pairs}: {found[True]:.0f} with, {found[False]:.0f} without")
    finally:
        for engine in engines.values():
            engine.shutdown()
    return pairs


def main() -> None:
    """Measure, write the result file, print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS / "loss_cost.json")
    arguments = parser.parse_args()
    load_before = load_before_start()
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    found = summary(measure(arguments.pairs))
    save({"machine": machine_facts(load_before), "loss_cost": found}, arguments.out)
    print(table_of(found))


def table_of(found: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    low, high = found["interval"]
    headings = ["pairs", "tokens/s with", "without", "ratio", "interval"]
    said = [str(found["pairs"]), f"{found['with']:.0f}", f"{found['without']:.0f}", f"{found['ratio']:.3f}"]
    return markdown_table(headings, [[*said, f"{low:.3f} to {high:.3f}"]])


if __name__ == "__main__":
    main()
