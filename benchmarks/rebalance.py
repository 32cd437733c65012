"""What serving notices of a migration: 32 sequences decode on emulated devices while experts move, and while none do.

    python -m benchmarks.rebalance [--devices 8] [--repeats 5] [--out FILE.json]

The model has the 48 layers and 128 experts of Qwen3-30B-A3B and is narrow, with 32 redundant experts. Each repeat has a
quiet window, a rebalance, another quiet window, a rebalance that moves nearly every slot, and a last quiet window. The
longest step gap is the longest time from the end of a step to the end of the next one.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.conditions import RESULTS, load_before_start, machine_facts, note, save
from benchmarks.device_wait import StepWatch
from benchmarks.figures import Run
from benchmarks.narrow import NARROW, NUM_REDUNDANT, eplb_of, narrow_engine, num_ended, submit_all
from benchmarks.planner_loads import drift
from benchmarks.table import tables
from benchmarks.workloads import FIRST_PLAIN_ID
from rayserve_moe.balancing.placement import ExpertPlacement
from rayserve_moe.balancing.planner import plan
from rayserve_moe.config.settings import BalancingSettings
from rayserve_moe.inprocess.engine import Engine
from rayserve_moe.requests.results import ChoiceResult

NUM_SEQUENCES, PROMPT_TOKENS, WARM_STEPS, QUIET_STEPS = 32, 8, 20, 40
MAX_NEW_TOKENS = 500
POLL_S = 0.002


class Decoding:
    """A batch of sequences that all decode, step by step, watched from outside the engine thread."""

    def __init__(self, engine: Engine, watch: StepWatch, *, seed: int) -> None:
        self._engine, self._watch = engine, watch
        self._num_ended, self._all_ended = 0, threading.Event()
        shape = (NUM_SEQUENCES, PROMPT_TOKENS)
        prompts = np.random.default_rng(seed).integers(FIRST_PLAIN_ID, NARROW.vocab_size, shape, np.int32)
        submit_all(engine.loop, list(prompts), num_new_tokens=MAX_NEW_TOKENS, sink=self._receive)

    def run_steps(self, count: int) -> list[float]:
        """Let `count` steps go by; returns the seconds from each step's end to the next one's."""
        first = len(self._watch.spans)
        return self._until(lambda: len(self._watch.spans) > first + count, first)[:count]

    def run_rebalance(self, placement: ExpertPlacement) -> list[float]:
        """Head for `placement`; returns the seconds of the steps until it is reached."""
        eplb, first = eplb_of(self._engine), len(self._watch.spans)
        version = eplb.migration.progress.version + 1
        eplb.set_target(placement)

        def is_done() -> bool:
            progress = eplb.migration.progress
            return progress.version == version and progress.is_done

        return self._until(is_done, first)

    def end(self) -> None:
        """Abort what still decodes and wait until it has."""
        self._engine.loop.abort_all()
        self._all_ended.wait()

    def _receive(self, updates: list[ChoiceResult]) -> None:
        self._num_ended += num_ended(updates)
        if self._num_ended == NUM_SEQUENCES:
            self._all_ended.set()

    def _until(self, is_over: Callable[[], bool], first: int) -> list[float]:
        while not is_over():
            if self._num_ended:
                raise RuntimeError("a sequence ended within a window: let them be longer")
            time.sleep(POLL_S)
        ends = [span.ready for span in self._watch.spans[first:]]
        return [after - before for before, after in itertools.pairwise(ends)]


def measure_repeat(engine: Engine, loads: list[np.ndarray], *, seed: int) -> dict[str, Run]:
    """Measure rebalances from the current placement and without regard to it, each between quiet windows."""
    migration = eplb_of(engine).migration
    ranks, redundant = migration.placement.ep_size, migration.placement.num_redundant
    with StepWatch(engine.runner.programs) as watch:
        decoding = Decoding(engine, watch, seed=seed)
        decoding.run_steps(WARM_STEPS)
        quiet, measured = [decoding.run_steps(QUIET_STEPS)], {}
        for name, previous in (("some", migration.placement), ("all", None)):
            placement = plan(loads.pop(0), ep_size=ranks, num_redundant=redundant, previous=previous)
            decoding.run_steps(2)
            busy = decoding.run_rebalance(placement)
            quiet.append(decoding.run_steps(QUIET_STEPS))
            measured[name] = window(busy, quiet[-2] + quiet[-1], num_slots=migration.progress.num_slots)
        decoding.end()
    return measured


def window(busy: list[float], quiet: list[float], *, num_slots: int) -> Run:
    """Return the steps of a rebalance beside the quiet ones around it. Gaps are over the median quiet step."""
    usual = statistics.median(quiet)
    return {
        "steps": len(busy),
        "slots": num_slots,
        "seconds": sum(busy),
        "quiet_step_s": statistics.fmean(quiet),
        "busy_step_s": statistics.fmean(busy),
        "longest_gap": max(busy) / usual,
        "longest_quiet_gap": max(quiet) / usual,
    }


def main() -> None:
    """Measure, write the result file, print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=8, help="emulated; 32 divides by them")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "rebalance.json")
    arguments = parser.parse_args()
    load_before = load_before_start()
    windows = drift(np.random.default_rng(0), NARROW.num_hidden_layers, NARROW.num_experts)
    runs: dict[str, list[Run]] = {"some": [], "all": []}
    with narrow_engine(
        arguments.devices, rows_per_device=NUM_SEQUENCES // arguments.devices, step_tokens=PROMPT_TOKENS * 4
    ) as engine:
        for repeat in range(-1, arguments.repeats):
            measured = measure_repeat(engine, [next(windows), next(windows)], seed=repeat + 1)
            note(f"{repeat + 1}/{arguments.repeats}: {measured}")
            if repeat >= 0:
                for name, run in measured.items():
                    runs[name].append(run)
        compiled = engine.runner.num_compilations_since_start
    shape = {"layers": NARROW.num_hidden_layers, "experts": NARROW.num_experts, "redundant": NUM_REDUNDANT}
    found = {
        "devices": arguments.devices,
        "slots_per_step": BalancingSettings().slots_per_step,
        "compilations": compiled,
        **shape,
        "runs": runs,
    }
    result = {"facts": machine_facts(load_before), "repeats": arguments.repeats, "rebalance": found}
    save(result, arguments.out)
    print(tables(result))


if __name__ == "__main__":
    main()
