"""Rows of token ids to train on: problems with their answers one after another, as many as fit."""

# B rows   T tokens of a row

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from examples.calculator.problems import END, MIX, Problem, draw

PAD_ID = ord(END)
JOINED_SHARE = 0.25
"""Share of the rows in which a problem sees those before it, as in a chat of several turns."""


class Batch(NamedTuple):
    """Token ids [B, T]; the number of the problem that each belongs to, -1 for padding; which tokens are answers.

    Tokens see earlier tokens of their own segment. A row of joined problems is one segment.
    """

    ids_BT: np.ndarray
    segments_BT: np.ndarray
    answers_BT: np.ndarray


def training_batches(*, rows: int, width: int, seed: int) -> Iterator[Batch]:
    """Yield batches without end, no held-out problem among them. The same seed gives the same ones."""
    generator = random.Random(seed)
    tasks, shares = zip(*MIX, strict=True)
    while True:
        batch = _empty(rows, width)
        for row in range(rows):
            joined, end, number = generator.random() < JOINED_SHARE, 0, 0
            while True:
                (task,) = generator.choices(tasks, shares)
                problem = draw(task, generator, held_out=False)
                start, end = end, _write(batch, (row, end), problem, answer=generator.choice(problem.answers))
                if end == start:
                    break
                batch.segments_BT[row, start:end] = 0 if joined else number
                number += 1
        yield batch


def question_batch(problems: list[Problem], answer_index: int, *, width: int) -> Batch:
    """One problem a row, each with its answer of that index (the last, where it has fewer)."""
    batch = _empty(len(problems), width)
    for row, problem in enumerate(problems):
        answer = problem.answers[min(answer_index, len(problem.answers) - 1)]
        end = _write(batch, (row, 0), problem, answer=answer)
        assert end, "every problem fits a row"
        batch.segments_BT[row, :end] = 0
    return batch


def _empty(rows: int, width: int) -> Batch:
    shape = (rows, width)
    return Batch(np.full(shape, PAD_ID, np.int32), np.full(shape, -1, np.int32), np.zeros(shape, bool))


def _write(batch: Batch, place: tuple[int, int], problem: Problem, *, answer: str) -> int:
    """Write a problem into a row from a column on; return the column behind it, or the same one if it did not fit."""
    row, start = place
    text = f"{problem.prompt}{answer}{END}".encode()
    end = start + len(text)
    if end > batch.ids_BT.shape[1]:
        return start
    batch.ids_BT[row, start:end] = list(text)
    batch.answers_BT[row, start + len(problem.prompt) : end] = True
    return end
