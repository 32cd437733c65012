"""What the host does per decode step, without devices: schedule, pack, commit, for 1 to 512 running sequences.

    python -m benchmarks.scheduler [--sequences 16,256] [--repeats 5] [--steps 200] [--routing] [--out FILE.json]

A stand-in for the devices answers each step at once with fixed tokens. Everything else is the engine's own code.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from rayserve_moe.config.settings import SchedulerSettings
from rayserve_moe.engine.loop import cycle_with
from rayserve_moe.engine.routing.capture import RoutingCapture
from rayserve_moe.execution.programs.buckets import step_shapes
from rayserve_moe.execution.step.pack import Packer
from rayserve_moe.execution.step.row_updates import update_vectors
from rayserve_moe.requests.records import GenerationRequest, ModelCard, RoutingLayout, SamplingParams
from rayserve_moe.scheduling.scheduler import Scheduler, StepLimits
from rayserve_moe.scheduling.sequence import Sequence
from rayserve_moe.scheduling.step_plan import StepPlan, StepResult

SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PROMPT_TOKENS, PAGE_SIZE, WARM_STEPS = 32, 16, 20
LAYOUT = RoutingLayout(num_hidden_layers=48, layer_ids=tuple(range(48)), num_experts=128, top_k=8)
CARD = ModelCard("", 1 << 20, 1 << 17, (), LAYOUT, returns_routing=True)
RESULTS = Path(__file__).parent / "results"


class InstantDevices:
    """Packs every plan as a host runner does and answers with a fixed token."""

    def __init__(self, num_rows: int, *, with_routing: bool) -> None:
        self._packer = Packer(step_shapes(SchedulerSettings(max_running_requests=num_rows)), rows_per_rank=num_rows)
        self._num_rows, self._with_routing = num_rows, with_routing
        self._before: StepResult | None = None

    def execute(self, plan: StepPlan) -> StepResult | None:
        started = time.perf_counter()
        if fits := self._packer.fits(plan):
            self._packer.pack(plan, with_changes=fits)
        elif plan.num_chunks:
            self._packer.pack(plan, with_changes=False)
            list(update_vectors(plan, rows_per_rank=self._num_rows))
        pack_s = time.perf_counter() - started
        before, self._before = self._before, self._answer(plan, pack_s) if plan.num_chunks else None
        return before

    def _answer(self, plan: StepPlan, pack_s: float) -> StepResult:
        count = int(np.count_nonzero(plan.chunks.samples))
        routing = None
        if self._with_routing and plan.wants_routing:
            routing = np.zeros((plan.num_tokens, *LAYOUT.row_shape), LAYOUT.dtype)
        ids, logprobs = np.full(count, 7, np.int32), np.zeros(count, np.float32)
        return StepResult(plan.step_id, ids, logprobs, np.ones(count, np.bool_), routing, pack_s)


def microseconds_per_step(num_sequences: int, *, num_steps: int, with_routing: bool) -> dict[str, float]:
    """Decode `num_steps` steps of `num_sequences` sequences; returns the mean microseconds of each part."""
    max_tokens = PROMPT_TOKENS + num_steps + WARM_STEPS + 64
    num_pages = num_sequences * (max_tokens // PAGE_SIZE + 1) + 1
    step_tokens = SchedulerSettings().max_step_tokens
    limits = StepLimits(num_sequences, step_tokens, step_tokens, PAGE_SIZE, num_pages, max_tokens)
    scheduler = Scheduler(limits)
    capture = RoutingCapture(CARD, scheduler.table, num_pages=num_pages)
    devices = InstantDevices(num_sequences, with_routing=with_routing)
    cycle = cycle_with(scheduler, devices, capture=capture if with_routing else None)
    generator = np.random.default_rng(0)
    for i in range(num_sequences):
        # Prompts of different lengths, so that pages fill up at different steps.
        prompt = generator.integers(10, 1000, 2 + i % PROMPT_TOKENS).astype(np.int32)
        sampling = SamplingParams(max_new_tokens=num_steps + WARM_STEPS + 40, temperature=0.0)
        request = GenerationRequest(f"r{i}", prompt, sampling, with_routing)
        cycle.scheduler.add([Sequence(request, 0, seed=0, stop_token_ids=frozenset([2]))])
    while len(cycle.scheduler.running) < num_sequences or cycle.scheduler.ranks[0].prefilling:
        cycle.run()
    for _ in range(WARM_STEPS):
        cycle.run()
    before = cycle.statistics()
    for _ in range(num_steps):
        cycle.run()
    after = cycle.statistics()
    steps = after["steps"] - before["steps"]
    parts = {part: 1e6 * (after[f"{part}_s"] - before[f"{part}_s"]) / steps for part in ("schedule", "pack", "commit")}
    return {**parts, "host": sum(parts.values())}


def measure(sequences: list[int], *, repeats: int, num_steps: int, with_routing: bool) -> dict[str, Any]:
    """Measure every number of sequences in turn; return the median and range over `repeats` rounds."""
    rounds: dict[int, list[dict[str, float]]] = {n: [] for n in sequences}
    for _ in range(repeats):
        for n in sequences:
            rounds[n].append(microseconds_per_step(n, num_steps=num_steps, with_routing=with_routing))
    return {str(n): {part: spread([r[part] for r in of_n]) for part in of_n[0]} for n, of_n in rounds.items()}


def spread(values: list[float]) -> dict[str, float]:
    """Return median, least and most, rounded to tenths."""
    return {"median": round(statistics.median(values), 1), "min": round(min(values), 1), "max": round(max(values), 1)}


def main() -> None:
    """Measure, print, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", default=",".join(map(str, SEQUENCES)), help="comma-separated")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--routing", action="store_true", help="with routing capture (48 layers, top 8 of 128)")
    parser.add_argument("--out", type=Path, default=RESULTS / "scheduler.json")
    arguments = parser.parse_args()
    sequences = [int(n) for n in arguments.sequences.split(",")]
    result = measure(sequences, repeats=arguments.repeats, num_steps=arguments.steps, with_routing=arguments.routing)
    print("| running | schedule | pack | commit | host time, us per step |\n|---|---|---|---|---|")
    for n, parts in result.items():
        whole = parts["host"]
        medians = " | ".join(f"{parts[name]['median']}" for name in ("schedule", "pack", "commit"))
        print(f"| {n} | {medians} | {whole['median']} ({whole['min']}-{whole['max']}) |")
    arguments.out.write_text(json.dumps({"routing": arguments.routing, "host_us": result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
