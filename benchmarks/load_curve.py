"""Decoding with 1 to 512 sequences at a time, tiny model: tokens per second, and the host's time per step.

    python -m benchmarks.load_curve [--sequences 1,16,256] [--repeats 5] [--devices 1] [--out FILE.json]

Counted are the steps in which all sequences decode: from the last one's first token to the first one's end.
"""

from __future__ import annotations

import argparse
import threading
import time
import uuid
from pathlib import Path

import numpy as np

from benchmarks.conditions import RESULTS, checkpoint_of, conditions, load_before_start, note, save
from benchmarks.engine_runs import CLOCK, in_turn
from benchmarks.figures import Run
from benchmarks.table import tables
from benchmarks.workloads import FIRST_PLAIN_ID
from rayserve_moe.engine.loop import EngineLoop
from rayserve_moe.inprocess.engine import Engine
from rayserve_moe.requests.records import GenerationRequest, SamplingParams
from rayserve_moe.requests.results import ChoiceResult

SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PROMPT_TOKENS, NEW_TOKENS, MAX_MODEL_LEN = 8, 96, 128
COUNTED = ("tokens_sampled", *CLOCK)


class DecodeWindow:
    """The updates of several requests, and the engine's totals when the last began and when the first ended.

    `receive` runs on the engine thread, between steps, where the totals are at rest.
    """

    def __init__(self, loop: EngineLoop, num_requests: int) -> None:
        self._loop, self._num_requests = loop, num_requests
        self._begun: set[str] = set()
        self._num_ended = 0
        self._edges: list[tuple[float, dict[str, float]]] = []
        self._all_ended = threading.Event()

    def receive(self, updates: list[ChoiceResult]) -> None:
        """Take the updates of one request."""
        ends = sum(update.finish is not None for update in updates)
        if self._num_ended == 0 and ends:
            self._note_totals()
        self._begun.add(updates[0].request_id)
        if len(self._begun) == self._num_requests and not self._edges:
            self._note_totals()
        self._num_ended += ends
        if self._num_ended == self._num_requests:
            self._all_ended.set()

    def result(self) -> Run:
        """Wait for all to end; returns what the window counted. RuntimeError where not all ran at once."""
        self._all_ended.wait()
        if len(self._begun) < self._num_requests or len(self._edges) != 2:
            raise RuntimeError(f"{self._num_requests} sequences never ran together: let them be longer")
        (started, before), (ended, after) = self._edges
        return {"seconds": ended - started, **{name: after[name] - before[name] for name in COUNTED}}

    def _note_totals(self) -> None:
        self._edges.append((time.perf_counter(), self._loop.statistics()))


def decode_together(loop: EngineLoop, num_sequences: int, *, num_new_tokens: int, seed: int) -> Run:
    """Run `num_sequences` greedy requests at once; returns the window in which all of them decoded."""
    window = DecodeWindow(loop, num_sequences)
    sampling = SamplingParams(max_new_tokens=num_new_tokens, temperature=0.0, ignore_eos=True)
    shape = (num_sequences, PROMPT_TOKENS)
    prompts = np.random.default_rng(seed).integers(FIRST_PLAIN_ID, loop.card.vocab_size, shape, np.int32)
    for prompt in prompts:
        loop.submit(GenerationRequest(uuid.uuid4().hex, prompt, sampling), window.receive)
    return window.result()


def measure(loop: EngineLoop, sequences: list[int], *, repeats: int, num_new_tokens: int) -> dict[str, list[Run]]:
    """Measure every number of sequences in turn, `repeats` times, after an uncounted turn."""
    points: dict[str, list[Run]] = {str(n): [] for n in sequences}
    for repeat in range(-1, repeats):
        for n in in_turn(list(points), repeat + 1):
            points[n].append(decode_together(loop, int(n), num_new_tokens=num_new_tokens, seed=repeat + 1))
        note(f"{repeat + 1}/{repeats}")
    return {n: runs[1:] for n, runs in points.items()}


def main() -> None:
    """Measure, write the result file, print its tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", default=",".join(map(str, SEQUENCES)), help="comma-separated")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--devices", type=int, default=1, help="devices of the engine; on a CPU, emulated ones")
    parser.add_argument("--out", type=Path, default=RESULTS / "curve.json")
    arguments = parser.parse_args()
    sequences = [int(n) for n in arguments.sequences.split(",")]
    load_before = load_before_start()
    path = checkpoint_of("tiny")
    settings = {"max_running_requests": max(sequences), "max_model_len": MAX_MODEL_LEN}
    with Engine(str(path), devices_per_host=arguments.devices, **settings) as engine:
        curve = measure(engine.loop, sequences, repeats=arguments.repeats, num_new_tokens=arguments.new_tokens)
        begun = conditions(engine, size="tiny", repeats=arguments.repeats, load_before=load_before)
        result = {**begun, "curve": curve}
    save(result, arguments.out)
    print(tables(result))


if __name__ == "__main__":
    main()
