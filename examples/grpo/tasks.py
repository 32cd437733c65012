"""What is trained and what is measured: `a#b=`, rewarded as a sum; problems held out from it; tasks that it forgets."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import islice

import numpy as np

from examples.calculator.accuracy import TASKS
from examples.calculator.problems import END, Problem, draw, held_out_problems

AMBIGUOUS = next(task for task in TASKS if task.operator == "#")
KEPT = {
    "differences": next(task for task in TASKS if task.name == "differences of 1-2 digits"),
    "sums": next(task for task in TASKS if task.name == "sums of 3 digits"),
}
"""By a short name: what the policy could do before, and should still."""


def prompts_of_step(step: int, count: int, *, seed: int) -> list[Problem]:
    """Draw the problems of a step, none of them held out; the same ones for the same step and seed."""
    generator = random.Random(f"{seed} {step}")
    return [draw(AMBIGUOUS, generator, held_out=False) for _ in range(count)]


def reward(problem: Problem, output_ids: np.ndarray) -> float:
    """1 for the sum and the end, else 0."""
    return float(bytes(output_ids.astype(np.uint8)) == (wanted(problem) + END).encode())


def wanted(problem: Problem) -> str:
    """The answer that is rewarded, which of the ambiguous operator is the sum."""
    return problem.answers[0]


def held_out(count: int) -> list[Problem]:
    """Problems of the ambiguous operator that no step ever draws."""
    return held_out_problems(AMBIGUOUS, limit=count)


def probe_prompts(count: int) -> list[str]:
    """Held-out prompts of all tasks in turn, the same ones always: where replay is measured."""
    each = [held_out_problems(task, limit=count // len(TASKS) + 1) for task in TASKS]
    in_turn = (problems[number] for number in range(count) for problems in each if number < len(problems))
    return [problem.prompt for problem in islice(in_turn, count)]


def answer_rows(problems: Sequence[Problem], *, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Problems with their wanted answers as ids [B, T], and which of these are the answer's, its end included."""
    ids, is_answer = np.full((len(problems), width), ord(END), np.int32), np.zeros((len(problems), width), bool)
    for row, problem in enumerate(problems):
        text = f"{problem.prompt}{wanted(problem)}{END}".encode()
        ids[row, : len(text)] = list(text)
        is_answer[row, len(problem.prompt) : len(text)] = True
    return ids, is_answer
