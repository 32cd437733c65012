"""The loop: sample, replay, check, update, push; synchronous, or drawing the next samples while the trainer works."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file
from tqdm import tqdm

from examples.grpo import checkpoints
from examples.grpo.evaluation import Evaluation
from examples.grpo.model import Architecture, Params, checkpoint_tensors
from examples.grpo.probe import probe
from examples.grpo.sampler import RunSampler, Sampled, sample_step
from examples.grpo.settings import GrpoSettings
from examples.grpo.trainer import Programs, TrainerState
from examples.grpo.update import update

METRICS, POLICIES = "metrics.jsonl", "policies"
REWARDS = 3
"""Batches whose mean reward says whether the task is learnt."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Parts:
    """What a run works with, which several runs of one kind can share."""

    sampler: RunSampler
    programs: Programs
    evaluate: Evaluation
    architecture: Architecture
    initial: Params


class Run:
    """One run: the trainer's state, the weights that samples in hand came from, and what was measured at each step."""

    def __init__(self, parts: Parts, settings: GrpoSettings, directory: Path) -> None:
        self.parts, self.settings = parts, settings
        self._directory, self._label = directory, f"{settings.arm}-{settings.seed}-"
        state: TrainerState = parts.programs.initial({name: values.copy() for name, values in parts.initial.items()})
        found = checkpoints.load(state, directory / "trainer")
        self.state, facts = found or (state, {"rows": [], "updates": 0})
        self.rows: list[Row] = facts["rows"]
        self.num_updates: int = facts["updates"]
        self.weights: dict[str, Params] = {}
        self._publish()
        if not self.rows:
            self.rows.append({"step": 0, **parts.evaluate(self.weights[self.version], True)})
            self._save_policy()

    @property
    def num_steps(self) -> int:
        """Steps taken; the first row is that of the policy before them."""
        return len(self.rows) - 1

    @property
    def version(self) -> str:
        """The name of the newest weights."""
        return f"{self._label}{self.num_updates}"

    @property
    def is_over(self) -> bool:
        """Whether all steps were taken, or the policy has learnt the task."""
        above = sum(row["held_out"] > self.settings.stop_at for row in self.rows)
        rewards = [row["reward"] for row in self.rows[1:][-REWARDS:]]
        is_learnt = above >= 2 and statistics.fmean(rewards) > self.settings.stop_reward
        return self.num_steps >= self.settings.steps or is_learnt

    def push(self, *, under_way: bool = False) -> float:
        """Have the server serve the newest weights, samples that are `under_way` going on; returns the seconds."""
        tensors = checkpoint_tensors(self.weights[self.version], self.parts.architecture)
        return self.parts.sampler.serve(tensors, version=self.version, under_way=under_way)

    def learn(self, sampled: Sampled) -> Row:
        """Take the step of these samples, and measure the new policy."""
        started, parts = time.perf_counter(), self.parts
        self.state, facts = update(
            parts.programs,
            self.state,
            sampled,
            weights=self.weights,
            reference=parts.initial,
            settings=self.settings,
        )
        if facts["updated"]:
            self.num_updates += 1
            self._publish()
        trained = time.perf_counter()
        facts |= parts.evaluate(self.weights[self.version], (self.num_steps + 1) % self.settings.probe_every == 0)
        seconds = {"sample": sampled.seconds, "train": trained - started, "evaluate": time.perf_counter() - trained}
        return {"step": self.num_steps + 1, **facts, "version": self.version, "seconds": seconds}

    def finish(self) -> None:
        """Measure the last policy on all tasks, and have the metrics be those of the run, whatever became of them."""
        if "sums" not in self.rows[-1]:
            row = self.rows.pop()
            self.keep({**row, **self.parts.evaluate(self.weights[self.version], True)})
        self._write_metrics()

    def keep(self, row: Row) -> None:
        """Write the step to disk, whole: from here on its samples are used."""
        self.rows.append(row)
        if self.num_steps % self.settings.probe_every == 0:  # before the step counts, or a kill between would lose it
            self._save_policy()
        facts = {"rows": self.rows, "updates": self.num_updates}
        checkpoints.save(self.state, facts, step=self.num_steps, directory=self._directory / "trainer")
        self._write_metrics()

    def _write_metrics(self) -> None:
        lines = "".join(json.dumps(each) + "\n" for each in self.rows)
        with checkpoints.whole_file(self._directory / METRICS) as unfinished:
            unfinished.write_text(lines, encoding="utf-8")

    def _save_policy(self) -> None:
        """Keep the newest weights as they were sent, for `kl_law`."""
        tensors = checkpoint_tensors(self.weights[self.version], self.parts.architecture)
        file = self._directory / POLICIES / f"step-{self.num_steps:03}.safetensors"
        file.parent.mkdir(parents=True, exist_ok=True)
        with checkpoints.whole_file(file) as unfinished:
            save_file(tensors, unfinished)

    def _publish(self) -> None:
        """Round the newest weights as they are sent, beside those of the version before, which samples may be of."""
        before = dict(list(self.weights.items())[-1:])
        self.weights = {**before, self.version: self.parts.programs.rounded(self.state.params)}


def run_to_end(run: Run, *, report: Callable[[list[Row]], None]) -> list[Row]:
    """Take all steps that are left; returns what was measured, a row per step. `report` is called after each.

    Synchronous, a step's samples are drawn by the weights that the step before made. Asynchronous, they are drawn while
    the step before runs, by the weights before: one version old, and never more, for weights are pushed when both the
    step and the samples are ready. Partial, they are pushed when the step is: samples that are not ready wait, are
    computed anew by the new weights, and go on with these.
    """
    if run.is_over:
        run.finish()
        return run.rows
    settings = run.settings
    run.push()
    with ThreadPoolExecutor(1) as pool, tqdm(total=settings.steps, initial=run.num_steps, unit="step") as bar:

        def draw(number: int) -> Future[Sampled]:
            return pool.submit(sample_step, run.parts.sampler, number, settings)

        pending = draw(run.num_steps + 1)
        while not run.is_over:
            number = run.num_steps + 1
            started, sampled = time.perf_counter(), pending.result()
            if settings.asynchronous:
                pending = draw(number + 1)
            row = run.learn(sampled)
            if settings.asynchronous and not settings.partial:
                pending.result()
            row["seconds"]["push"] = run.push(under_way=settings.partial) if row["updated"] else 0.0
            if row["step"] % settings.probe_every == 0:
                row["probe"] = probe(run.parts.sampler, run.parts.programs, run.weights[run.version])
            row["restarts"] = run.parts.sampler.num_restarts
            if not settings.asynchronous:
                pending = draw(number + 1)
            row["seconds"]["whole"] = time.perf_counter() - started
            run.keep(row)
            bar.set_postfix_str(f"reward {row['reward']:.2f}, P(sum) {row['held_out']:.3f}")
            bar.update()
            report(run.rows)
    run.finish()
    return run.rows
