"""Runs of a workload on the in-process engine: seconds, the step clock's part of them, ids, and starts of steps."""

from __future__ import annotations

import io
import time
from collections import Counter
from contextlib import redirect_stderr

import numpy as np

from benchmarks.figures import PARTS
from benchmarks.workloads import Workload
from rayserve_moe.inprocess.engine import Engine
from rayserve_moe.replay.encoding import extract_routed_experts_from_meta_info
from rayserve_moe.scheduling.step_plan import StepPlan, StepResult

CLOCK = ("steps", *(f"{part}_s" for part in PARTS))


def run_engine(
    engine: Engine,
    workload: Workload,
    *,
    prompts: list[list[int]],
    seed: int,
    return_routed_experts: bool = False,
    lora_path: list[str | None] | None = None,
) -> tuple[dict[str, float], list[list[int]]]:
    """Generate; returns the run and the output ids of every choice. RuntimeError where its work was not done."""
    sampling = {
        "max_new_tokens": workload.num_new_tokens,
        "n": workload.n,
        "temperature": float(workload.n > 1),
        "seed": seed,
        "ignore_eos": True,
    }
    before = engine.loop.statistics()
    with redirect_stderr(io.StringIO()):  # not a terminal: no progress bar inside the measurement
        started = time.perf_counter()
        answers = engine.generate(
            input_ids=prompts,
            sampling_params=sampling,
            return_routed_experts=return_routed_experts,
            lora_path=lora_path,
        )
        seconds = time.perf_counter() - started
    after = engine.loop.statistics()
    ids = [answer["output_ids"] for answer in answers]
    check_complete(sum(map(len, ids)), workload)
    if return_routed_experts:
        layout = engine.card.routing
        num_ids = (workload.prompt_len + workload.num_new_tokens - 1) * layout.num_hidden_layers * layout.top_k
        for answer in answers:
            check_routing(len(extract_routed_experts_from_meta_info(answer)), num_ids)
    return {"seconds": seconds, **{name: after[name] - before[name] for name in CLOCK}}, ids


def check_complete(num_new_tokens: int, workload: Workload) -> None:
    """Refuse a run that did less, or more, than its workload."""
    if num_new_tokens != workload.total_new_tokens:
        raise RuntimeError(f"{num_new_tokens} tokens came out of {workload}, not {workload.total_new_tokens}")


def check_routing(num_ids: int, expected: int) -> None:
    """Refuse a run that returned less routing, or more, than it was asked for."""
    if num_ids != expected:
        raise RuntimeError(f"an answer brought {num_ids} expert ids, not {expected}")


def in_turn(names: list[str], turn: int) -> list[str]:
    """Return the names with another first one in each turn, so that no side always runs first."""
    first = turn % len(names)
    return names[first:] + names[:first]


class StepStarts:
    """Start times of an engine's steps, by `time.perf_counter`."""

    def __init__(self, engine: Engine) -> None:
        self.at: list[float] = []
        self._execute = engine.runner.execute
        engine.runner.execute = self._note  # ty: ignore[invalid-assignment]

    def gaps(self, start: float, stop: float) -> list[float]:
        """Return the seconds between starts of adjacent steps that both began between two times."""
        within = [at for at in self.at if start <= at <= stop]
        return np.diff(within).tolist()

    def _note(self, plan: StepPlan) -> StepResult | None:
        if plan.num_chunks:
            self.at.append(time.perf_counter())
        return self._execute(plan)


class SequenceGaps:
    """Steps from each chunk of a running sequence to its next one: 1 if it runs in every step, however long that is."""

    def __init__(self, engine: Engine) -> None:
        self.counts = Counter[int]()
        """Number of gaps by their steps."""
        self._num_steps, self._last = 0, dict[int, tuple[int, int]]()
        """The last step of each row, and the position after it."""
        self._execute = engine.runner.execute
        engine.runner.execute = self._note  # ty: ignore[invalid-assignment]

    def _note(self, plan: StepPlan) -> StepResult | None:
        chunks = plan.chunks
        self._num_steps += bool(plan.num_chunks)
        for row, start, length in zip(
            chunks.rows.tolist(), chunks.starts.tolist(), chunks.lengths.tolist(), strict=True
        ):
            step, position = self._last.get(row, (0, -1))
            if start == position:  # otherwise another sequence has the row
                self.counts[self._num_steps - step] += 1
            self._last[row] = self._num_steps, start + length
        return self._execute(plan)
