"""How many held-out problems of each task a model answers right: greedily, digit by digit, up to the end."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.markdown import markdown_table
from examples.calculator.batches import Batch, question_batch
from examples.calculator.network import Weights, score
from examples.calculator.problems import Problem, Task, held_out_problems
from rayserve_moe.model.spec import ModelSpec

TASKS: tuple[Task, ...] = (
    Task("sums of 1-2 digits", "+", ((1, 2), (1, 2))),
    Task("sums of 3 digits", "+", ((3, 3), (3, 3))),
    Task("differences of 1-2 digits", "-", ((1, 2), (1, 2))),
    Task("differences of 3 digits", "-", ((3, 3), (3, 3))),
    Task("sums of three terms, 1-2 digits", "+", ((1, 2), (1, 2), (1, 2))),
    Task("products of 1-2 digits by one digit", "*", ((1, 2), (1, 1))),
    Task("sum or difference at random, 1-2 digits", "#", ((1, 2), (1, 2))),
)
"""What is measured. Two-operand tasks of 1-2 digits are measured over all held-out problems there are."""

MOST_PROBLEMS = 1000
BATCH, WIDTH = 256, 16


def accuracy_by_task(weights: Weights, spec: ModelSpec, *, limit: int = MOST_PROBLEMS) -> dict[str, tuple[float, int]]:
    """Share of right answers and number of problems (at most `limit`), by the task's name."""

    def is_right(weights: Weights, batch: Batch) -> jax.Array:
        logits_BTV = score(weights, batch.ids_BT, batch.segments_BT, spec=spec, places=BATCH * WIDTH).logits_BTV
        is_chosen = jnp.argmax(logits_BTV[:, :-1], axis=-1) == batch.ids_BT[:, 1:]
        return jnp.all(is_chosen | ~batch.answers_BT[:, 1:], axis=1)

    compiled, found = jax.jit(is_right), {}
    for task in TASKS:
        problems = held_out_problems(task, limit=limit)
        right = 0
        for start in range(0, len(problems), BATCH):
            some = problems[start : start + BATCH]
            asked = some + [some[-1]] * (BATCH - len(some))
            batches = (question_batch(asked, index, width=WIDTH) for index in range(most_answers(some)))
            # Every token of an answer is the likeliest after those before it: that is what greedy decoding writes.
            right += int(np.logical_or.reduce([np.asarray(compiled(weights, b)) for b in batches])[: len(some)].sum())
        found[task.name] = (right / len(problems), len(problems))
    return found


def most_answers(problems: list[Problem]) -> int:
    """The greatest number of right answers that one of the problems has."""
    return max(len(problem.answers) for problem in problems)


def table(found: dict[str, tuple[float, int]]) -> str:
    """The accuracies as a Markdown table."""
    rows = [(name, count, f"{100 * share:.1f} %") for name, (share, count) in found.items()]
    return markdown_table(["held-out problems", "number", "right"], rows)
