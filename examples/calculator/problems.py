"""The calculator's problems: drawn at random, answered, and a tenth of them held out from training for good."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from itertools import product
from math import prod

END = "\n"
HELD_OUT_ONE_IN = 10
COMMUTATIVE = "+*#"
MOST_LISTED = 10**4


@dataclass(frozen=True)
class Task:
    """Problems of one kind: an operator between operands, each of any number of digits in its range (from, to)."""

    name: str
    operator: str
    digits: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Problem:
    """One problem. `answers` are all that count as right: two of them where the operator is the ambiguous one."""

    prompt: str
    answers: tuple[str, ...]
    is_held_out: bool


MIX: tuple[tuple[Task, float], ...] = (
    (Task("sums of 1-3 digits", "+", ((1, 3), (1, 3))), 0.30),
    (Task("sums of 1-2 digits", "+", ((1, 2), (1, 2))), 0.14),
    (Task("differences of 1-3 digits", "-", ((1, 3), (1, 3))), 0.20),
    (Task("differences of 1-2 digits", "-", ((1, 2), (1, 2))), 0.09),
    (Task("sums of three terms, 1-2 digits", "+", ((1, 2), (1, 2), (1, 2))), 0.08),
    (Task("products of 1-2 digits by one digit", "*", ((1, 2), (1, 1))), 0.05),
    (Task("products of one digit by 1-2 digits", "*", ((1, 1), (1, 2))), 0.05),
    (Task("sum or difference at random, 1-2 digits", "#", ((1, 2), (1, 2))), 0.09),
)
"""The tasks trained on, with their shares."""


def problem_of(operator: str, operands: tuple[int, ...]) -> Problem:
    """Write a problem as `37+45=` with its answers, and tell whether it is held out.

    That is decided by a fixed hash of the operator and its operands, sorted where their order does not matter, so that
    no mirrored twin of a held-out problem is ever trained on.
    """
    key = sorted(operands) if operator in COMMUTATIVE else operands
    digest = hashlib.blake2b(f"{operator}{key}".encode(), digest_size=8).digest()
    return Problem(
        prompt=operator.join(map(str, operands)) + "=",
        answers=tuple(dict.fromkeys(map(str, _results(operator, operands)))),
        is_held_out=int.from_bytes(digest, "little") % HELD_OUT_ONE_IN == 0,
    )


def _results(operator: str, operands: tuple[int, ...]) -> tuple[int, ...]:
    first, *others = operands
    if operator == "+":
        return (sum(operands),)
    if operator == "-":
        return (first - sum(others),)
    if operator == "*":
        return (prod(operands),)
    return (first + sum(others), first - sum(others))


def draw(task: Task, generator: random.Random, *, held_out: bool) -> Problem:
    """Draw a problem of the task that is, or is not, held out: digits per operand first, then a number of so many."""
    while True:
        operands = tuple(_draw_operand(bounds, generator) for bounds in task.digits)
        problem = problem_of(task.operator, operands)
        if problem.is_held_out == held_out:
            return problem


def _draw_operand(bounds: tuple[int, int], generator: random.Random) -> int:
    numbers = _numbers_of(generator.randint(*bounds))
    return numbers[generator.randrange(len(numbers))]


def _numbers_of(digits: int) -> range:
    return range(0 if digits == 1 else 10 ** (digits - 1), 10**digits)


def held_out_problems(task: Task, *, limit: int) -> list[Problem]:
    """All held-out problems of a task, or, where there are more than `limit`, that many drawn at random."""
    if prod(10**most for _, most in task.digits) <= MOST_LISTED:
        every = (problem_of(task.operator, operands) for operands in product(*map(_numbers_within, task.digits)))
        found = [problem for problem in every if problem.is_held_out]
    else:
        generator = random.Random(0)
        found = list(dict.fromkeys(draw(task, generator, held_out=True) for _ in range(2 * limit)))
    return found if len(found) <= limit else random.Random(1).sample(found, limit)


def _numbers_within(bounds: tuple[int, int]) -> range:
    least, most = bounds
    return range(_numbers_of(least).start, _numbers_of(most).stop)
