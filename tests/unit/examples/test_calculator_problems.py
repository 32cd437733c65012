"""What the calculator is trained on: right answers, rows that hold whole problems, nothing that is held out."""

from __future__ import annotations

import random
from collections import Counter
from itertools import islice

import numpy as np
import pytest

from examples.calculator.accuracy import TASKS
from examples.calculator.batches import Batch, question_batch, training_batches
from examples.calculator.problems import END, HELD_OUT_ONE_IN, MIX, draw, held_out_problems, problem_of

WIDTH = 64


def answers_by_python(prompt: str) -> set[int]:
    """What Python itself makes of a prompt."""
    text = prompt.removesuffix("=")
    return {eval(text.replace("#", sign)) for sign in ("+-" if "#" in text else "+")}


def lines_of(batch: Batch) -> list[str]:
    """All problems of a batch as text, read off the ids."""
    rows = zip(batch.ids_BT, batch.segments_BT, strict=True)
    texts = (bytes(ids[segments >= 0].astype(np.uint8)).decode() for ids, segments in rows)
    return [line for text in texts for line in text.removesuffix(END).split(END)]


def trained_on(count: int, *, seed: int = 0) -> list[str]:
    return [
        line for batch in islice(training_batches(rows=16, width=WIDTH, seed=seed), count) for line in lines_of(batch)
    ]


@pytest.mark.parametrize("task", [task for task, _ in MIX], ids=lambda task: task.name)
def test_answers_are_right_and_operands_within_their_digits(task):
    generator = random.Random(5)
    for _ in range(200):
        problem = draw(task, generator, held_out=False)
        assert set(map(int, problem.answers)) == answers_by_python(problem.prompt)
        assert all(str(int(answer)) == answer for answer in problem.answers)
        operands = problem.prompt.removesuffix("=").split(task.operator)
        assert all(low <= len(text) <= high for text, (low, high) in zip(operands, task.digits, strict=True))


def test_no_held_out_problem_is_ever_in_a_batch():
    lines = trained_on(60)
    assert len(lines) > 5000
    for line in lines:
        operator = next(sign for sign in "+*#-" if sign in line.partition("=")[0])
        operands = tuple(map(int, line.partition("=")[0].split(operator)))
        assert not problem_of(operator, operands).is_held_out
        mirrored = operands[::-1]
        assert operator == "-" or not problem_of(operator, mirrored).is_held_out


def test_batches_hold_whole_right_problems_and_mark_their_answers():
    for batch in islice(training_batches(rows=16, width=WIDTH, seed=1), 10):
        for line in lines_of(batch):
            prompt, _, answer = line.partition("=")
            assert int(answer) in answers_by_python(prompt)
        for ids, marked in zip(batch.ids_BT, batch.answers_BT, strict=True):
            text = bytes(ids.astype(np.uint8)).decode()
            behind_equals = [text[:i].rpartition(END)[2].find("=") >= 0 for i in range(len(text))]
            assert behind_equals == marked.tolist()


def test_every_task_and_both_answers_of_the_ambiguous_operator_are_drawn():
    lines = trained_on(60)
    shares = Counter(next(sign for sign in "+*#-" if sign in line.partition("=")[0]) for line in lines)
    for operator in "+-*#":
        wanted = sum(share for task, share in MIX if task.operator == operator)
        assert shares[operator] / len(lines) == pytest.approx(wanted, abs=0.03)
    ambiguous = [line.partition("=") for line in lines if "#" in line]
    sums = [int(answer) == sum(map(int, prompt.split("#"))) for prompt, _, answer in ambiguous]
    assert np.mean(sums) == pytest.approx(0.5, abs=0.1)


def test_some_rows_are_one_segment_and_others_have_one_for_each_problem():
    batch = next(training_batches(rows=100, width=WIDTH, seed=2))
    joined = (batch.segments_BT.max(axis=1) == 0).mean()
    assert 0.05 < joined < 0.5
    separate = batch.segments_BT.max(axis=1) > 0
    ends = (batch.ids_BT == ord(END)) & (batch.segments_BT >= 0)
    assert (batch.segments_BT.max(axis=1) + 1 == ends.sum(axis=1))[separate].all()


def test_the_seed_decides_the_batches():
    assert trained_on(2, seed=3) == trained_on(2, seed=3) != trained_on(2, seed=4)


def test_about_a_tenth_of_the_problems_is_held_out():
    pairs = [problem_of("+", (a, b)).is_held_out for a in range(100) for b in range(100)]
    assert np.mean(pairs) == pytest.approx(1 / HELD_OUT_ONE_IN, abs=0.01)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_what_is_measured_is_held_out_distinct_and_of_the_task(task):
    problems = held_out_problems(task, limit=300)
    assert all(problem.is_held_out for problem in problems)
    assert len({problem.prompt for problem in problems}) == len(problems) == (90 if task.operator == "*" else 300)
    assert problems == held_out_problems(task, limit=300)


def test_a_small_task_is_measured_whole():
    (task,) = [task for task in TASKS if task.name == "sums of 1-2 digits"]
    whole = {f"{a}+{b}=" for a in range(100) for b in range(100) if problem_of("+", (a, b)).is_held_out}
    assert {problem.prompt for problem in held_out_problems(task, limit=10**4)} == whole


def test_questions_come_one_to_a_row_with_the_answer_asked_for():
    problems = [problem_of("#", (7, 12)), problem_of("+", (7, 12))]
    first, second = (lines_of(question_batch(problems, index, width=16)) for index in range(2))
    assert first == ["7#12=19", "7+12=19"] and second == ["7#12=-5", "7+12=19"]
