"""Weights over the wire against weights from disk, while sequences decode: how long, and the longest without a step.

    python -m benchmarks.weight_sending [--size small] [--sequences 8] [--repeats 5] [--out FILE.json]

One model's weights change to and fro between two versions: read from disk, sent whole, and sent as deltas in which some
of the values differ. The sender is a process of its own, which rounds, compares and adds up as trainers do; its call of
`update_weights_from` is timed as a whole. Bytes are those of the bodies.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from safetensors.numpy import load_file

from benchmarks.conditions import RESULTS, checkpoint_of, conditions, load_before_start, note, save
from benchmarks.engine_runs import StepStarts
from benchmarks.markdown import markdown_table
from benchmarks.serve_process import HOST, free_port
from benchmarks.weight_updates import BETWEEN_S, MAX_MODEL_LEN, QUIET_S, decoding
from rayserve_moe.checkpoints.synthetic import ensure_checkpoint
from rayserve_moe.config.settings import ServerSettings
from rayserve_moe.inprocess.engine import Engine
from rayserve_moe.rollouts.client import BlockingRolloutClient
from rayserve_moe.rollouts.weights import HeldDtypes, WeightSending, rounded, sent_tensors
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.http import create_api

SHARES = {"wire, delta 1 %": 0.01, "wire, delta 15 %": 0.15, "wire, delta 40 %": 0.40}
WHOLE, DISK = "wire, whole", "disk"
Params = dict[str, np.ndarray]


@lru_cache(maxsize=1)
def versions_of(path: Path, share: float) -> tuple[Params, Params]:
    """Return the weights of a checkpoint, and the same with a `share` of all values changed in the last bit."""
    params, generator = load_file(path / "model.safetensors"), np.random.default_rng(0)
    return params, {name: _changed(values, share, generator) for name, values in params.items()}


def _changed(values: np.ndarray, share: float, generator: np.random.Generator) -> np.ndarray:
    changed = values.copy()
    bits = changed.reshape(-1).view(f"u{values.itemsize}")
    bits ^= (generator.random(bits.size) < share).astype(bits.dtype)
    return changed


def send(url: str, path: Path, share: float, turn: int) -> float:
    """Send one of the two versions, a delta where `share` is below 1; returns the seconds. Runs in the sender."""
    versions = versions_of(path, share)
    new, old = versions[turn % 2], versions[1 - turn % 2]
    with BlockingRolloutClient(url) as client:
        begun = time.perf_counter()
        client.update_weights_from(new, base=old if share < 1 else None, weight_version=f"{share} {turn}")
        return time.perf_counter() - begun


def bytes_sent(path: Path, share: float, held: HeldDtypes) -> int:
    """Return the bytes of the bodies of an update."""
    old, new = (rounded(params, held) for params in versions_of(path, share))
    tensors = sent_tensors(new, old if share < 1 else None)
    bodies = WeightSending("1", "0").buckets(tensors, is_delta=share < 1)
    return sum(len(part) for _, body in bodies for part in body)


@contextmanager
def serving(engine: Engine) -> Iterator[str]:
    """Serve an engine over HTTP from a thread of this process; yields the address."""
    app = create_api(ApiState(engine.loop, engine.tokenizer, ServerSettings()))
    server = uvicorn.Server(uvicorn.Config(app, host=HOST, port=(port := free_port()), log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    try:
        yield f"http://{HOST}:{port}"
    finally:
        server.should_exit = True
        thread.join()


def timed(starts: StepStarts, update: Callable[[], float]) -> dict[str, float]:
    """Return seconds of an update, and of the steps before and around it."""
    begun = time.perf_counter()
    time.sleep(QUIET_S)
    asked = time.perf_counter()
    seconds = update()
    ended = time.perf_counter()
    time.sleep(BETWEEN_S)
    quiet, around = starts.gaps(begun, asked), starts.gaps(asked, ended + BETWEEN_S)
    return {"update_s": seconds, "step_s": statistics.median(quiet), "longest_s": max(around)}


def measure(engine: Engine, path: Path, *, num_sequences: int, repeats: int) -> dict[str, list[dict[str, float]]]:
    """Measure all ways in turn, `repeats` of each after an uncounted one."""
    ways = {DISK: 0.0, WHOLE: 1.0, **SHARES}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    starts, other = StepStarts(engine), path.with_name(f"{path.name}-other")

    def from_disk(turn: int) -> float:
        begun = time.perf_counter()
        outcome = engine.update_weights_from_disk((other, path)[turn % 2])
        if not outcome.success:
            raise RuntimeError(outcome.message)
        return time.perf_counter() - begun

    with (
        serving(engine) as url,
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as sender,
        decoding(engine, num_sequences),
    ):
        for name, share in ways.items():
            for turn in range(repeats + 1):
                if name == DISK:
                    run = timed(starts, lambda turn=turn: from_disk(turn))
                else:
                    run = timed(starts, lambda s=share, t=turn: sender.submit(send, url, path, s, t).result())
                runs[name].append(run)
            note(name)
    return {name: of_way[1:] for name, of_way in runs.items()}


def main() -> None:
    """Measure, write the result file, print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="small", help="preset of the synthetic checkpoint")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "weight_sending.json")
    arguments = parser.parse_args()
    load_before, path = load_before_start(), checkpoint_of(arguments.size)
    ensure_checkpoint(path.with_name(f"{path.name}-other"), arguments.size, seed=1)
    settings = {"max_running_requests": arguments.sequences, "max_model_len": MAX_MODEL_LEN}
    with Engine(str(path), **settings) as engine:
        begun = conditions(engine, size=arguments.size, repeats=arguments.repeats, load_before=load_before)
        report = engine.loop.start_report
        runs = measure(engine, path, num_sequences=arguments.sequences, repeats=arguments.repeats)
    held = HeldDtypes(report.dtype, report.float32_tensors)
    sent = {name: bytes_sent(path, share, held) for name, share in {WHOLE: 1.0, **SHARES}.items()}
    result = {**begun, "weight_sending": {"bytes": sent, "runs": runs}}
    save(result, arguments.out)
    print(table(result["weight_sending"]))


def table(measured: dict[str, Any]) -> str:
    """Render medians of each way; the longest gap in steps is the one without a step over a step before it."""
    rows = []
    for name, runs in measured["runs"].items():
        gaps = sorted(run["longest_s"] / run["step_s"] for run in runs)
        seconds = statistics.median(run["update_s"] for run in runs)
        step_ms = 1000 * statistics.median(run["step_s"] for run in runs)
        in_steps = f"{statistics.median(gaps):.1f} ({gaps[0]:.1f}-{gaps[-1]:.1f})"
        rows.append([name, measured["bytes"].get(name, ""), f"{seconds:.2f}", f"{step_ms:.1f}", in_steps])
    return markdown_table(["way", "bytes", "seconds", "step, ms", "longest gap in steps"], rows)


if __name__ == "__main__":
    main()
