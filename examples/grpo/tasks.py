"""What is trained and what is measured: the tasks of a run, problems held out from them, and what else is forgotten."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from examples.calculator.accuracy import TASKS
from examples.calculator.problems import END, Problem, draw, held_out_problems
from examples.grpo import chain
from examples.grpo.chain import Chain

AMBIGUOUS = next(task for task in TASKS if task.operator == "#")
KEPT = {
    "differences": next(task for task in TASKS if task.name == "differences of 1-2 digits"),
    "sums": next(task for task in TASKS if task.name == "sums of 3 digits"),
}
"""By a short name: what the policy could do before, and should still."""


class GrpoTask(NamedTuple):
    """A task: how problems of a step are drawn, and some that no step draws, each as turns of question and answer.

    No sample of it has more than `width` tokens. `defaults` are the settings of a run that suit it.
    """

    draw: Callable[[random.Random], Chain]
    held_out: Callable[[int], Sequence[Chain]]
    width: int
    defaults: dict[str, float]


def draw_sum(generator: random.Random) -> Chain:
    """A problem `a#b=` that is not held out: the sum is rewarded."""
    return as_chain(draw(AMBIGUOUS, generator, held_out=False))


def as_chain(problem: Problem) -> Chain:
    """A problem of one turn, whose first answer is rewarded: of the ambiguous operator, that is the sum."""
    return Chain(problem.prompt, (), (problem.answers[0],))


def held_out_sums(count: int) -> list[Chain]:
    """Problems of the ambiguous operator that no step ever draws."""
    return [as_chain(problem) for problem in held_out_problems(AMBIGUOUS, limit=count)]


GRPO_TASKS = {
    "sum": GrpoTask(draw_sum, held_out_sums, 12, {"prompts": 32, "group": 8, "learning_rate": 3e-4, "kl_weight": 0.15}),
    "chain": GrpoTask(
        chain.draw_chain,
        chain.held_out_chains,
        chain.WIDTH,
        {"prompts": 16, "group": 16, "learning_rate": 5e-4, "kl_weight": 0.0},
    ),
}
"""By name. `sum` is `a#b=`; in `chain` an answer is the first operand of the next turn's problem."""


def problems_of_step(step: int, count: int, *, seed: int, task: str) -> list[Chain]:
    """Draw the problems of a step, none of them held out; the same ones for the same step and seed."""
    generator = random.Random(f"{seed} {step}")
    return [GRPO_TASKS[task].draw(generator) for _ in range(count)]


def probe_prompts(count: int) -> list[str]:
    """Held-out prompts of all tasks in turn, the same ones always: where replay is measured."""
    each = [held_out_problems(task, limit=count // len(TASKS) + 1) for task in TASKS]
    in_turn = (problems[number] for number in range(count) for problems in each if number < len(problems))
    return [problem.prompt for problem in islice(in_turn, count)]


def answer_rows(problems: Sequence[Chain], *, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Problems with their right answers as ids [B, T], and which of these are the answers', their ends included."""
    ids, is_answer = np.full((len(problems), width), ord(END), np.int32), np.zeros((len(problems), width), bool)
    for row, problem in enumerate(problems):
        text = ""
        for number, answer in enumerate(problem.answers):
            text += problem.question(number, answer_before=problem.answers[number - 1])
            is_answer[row, len(text) : len(text) + len(answer) + 1] = True
            text += answer + END
        ids[row, : len(text)] = list(text.encode())
    return ids, is_answer
