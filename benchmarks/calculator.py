"""The calculator by native bfloat16, by XLA in bfloat16, and in float32: answers to held-out problems, time per step.

    python -m benchmarks.calculator [--repeats 5] [--out FILE.json]

One device. Every side answers all held-out problems of every task greedily, digit by digit up to the newline; sides
take turns. Answers of a side are the same in every round, or the measurement fails.
"""

from __future__ import annotations

import argparse
import io
import time
from contextlib import ExitStack, redirect_stderr
from pathlib import Path
from typing import Any

from benchmarks.calculator_table import calculator as as_table
from benchmarks.conditions import RESULTS, load_before_start, machine_facts, note, save
from benchmarks.engine_runs import CLOCK, in_turn
from examples.calculator.accuracy import MOST_PROBLEMS, TASKS
from examples.calculator.problems import held_out_problems
from rayserve_moe.checkpoints.model_path import TRAINED_PREFIX
from rayserve_moe.inprocess.engine import Engine

ENGINE: dict[str, Any] = {
    "max_model_len": 64,
    "max_running_requests": 16,
    "max_step_tokens": 128,
    "num_pages": 100,
    "precompile_bs_paddings": [16],
}
SIDES: dict[str, dict[str, Any]] = {
    "native": {"dtype": "bfloat16", "cpu_kernels": "native"},
    "bfloat16": {"dtype": "bfloat16", "cpu_kernels": "off"},
    "float32": {"dtype": "float32", "cpu_kernels": "off"},
}
SAMPLING = {"temperature": 0, "max_new_tokens": 6}
PROBLEMS = {task.name: held_out_problems(task, limit=MOST_PROBLEMS) for task in TASKS}


def run(engine: Engine) -> tuple[dict[str, float], dict[str, list[str]]]:
    """Ask everything once; returns the run, and by task what was said up to a newline ("" where none came)."""
    prompts = [problem.prompt for problems in PROBLEMS.values() for problem in problems]
    before = engine.loop.statistics()
    with redirect_stderr(io.StringIO()):
        started = time.perf_counter()
        answers = iter(engine.generate(prompts, sampling_params=SAMPLING))
        seconds = time.perf_counter() - started
    after = engine.loop.statistics()
    said = {name: [_said(next(answers)) for _ in problems] for name, problems in PROBLEMS.items()}
    return {"seconds": seconds, **{name: after[name] - before[name] for name in CLOCK}}, said


def _said(answer: dict[str, Any]) -> str:
    return answer["text"] if answer["meta_info"]["finish_reason"]["type"] == "stop" else ""


def judged(said: dict[str, dict[str, list[str]]]) -> dict[str, dict[str, Any]]:
    """Count problems by task, and right answers and answers equal to float32's by side."""
    return {
        name: {
            "problems": len(problems),
            "right": {
                side: sum(text in problem.answers for text, problem in zip(by_task[name], problems, strict=True))
                for side, by_task in said.items()
            },
            "same": {
                side: sum(a == b for a, b in zip(by_task[name], said["float32"][name], strict=True))
                for side, by_task in said.items()
            },
        }
        for name, problems in PROBLEMS.items()
    }


def main() -> None:
    """Measure, print the tables, write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "calculator.json")
    arguments = parser.parse_args()
    load_before = load_before_start()
    said: dict[str, dict[str, list[str]]] = {}
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    with ExitStack() as running:
        model = f"{TRAINED_PREFIX}calculator"
        engines = {name: running.enter_context(Engine(model, **ENGINE, **side)) for name, side in SIDES.items()}
        for engine in engines.values():
            run(engine)
        for repeat in range(arguments.repeats):
            for side in in_turn(list(SIDES), repeat):
                measured, found = run(engines[side])
                runs[side].append(measured)
                if said.setdefault(side, found) != found:
                    raise RuntimeError(f"{side} answered otherwise than before")
            ratio = runs["float32"][-1]["seconds"] / runs["native"][-1]["seconds"]
            note(f"{repeat + 1}/{arguments.repeats}: native is {ratio:.2f} times as fast as float32")
    result = {
        "repeats": arguments.repeats,
        "machine": machine_facts(load_before),
        "tasks": judged(said),
        "runs": runs,
    }
    print(as_table(result))
    save({"calculator": result}, arguments.out)


if __name__ == "__main__":
    main()
