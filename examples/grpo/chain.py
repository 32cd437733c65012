"""Problems of several turns: each answer of the model is the first operand of the next turn's problem."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import NamedTuple

from examples.calculator.problems import END, problem_of

NUM_OPERANDS, LEAST, MOST = 4, 1, 24
LONGEST_ANSWER = 2
"""Digits of an answer that an episode goes on with: a longer one, or one that is no number, ends it."""
WIDTH = 34
"""Tokens of the longest episode: `24#24=`, then twice two digits, the end and `#24=`, and six sampled ones; rounded."""


class Chain(NamedTuple):
    """A first prompt, the operands of the turns after it, and the right answers of all turns."""

    prompt: str
    operands: tuple[int, ...]
    answers: tuple[str, ...]

    def question(self, turn: int, *, answer_before: str) -> str:
        """What the environment says in a turn, from 0, after the answer of the one before."""
        return self.prompt if turn == 0 else f"{answer_before}#{self.operands[turn - 1]}="

    def goes_on(self, turn: int, output: bytes) -> bool:
        """Whether another turn follows on what was answered in this one."""
        answer = output.removesuffix(END.encode())
        is_number = answer.isdigit() and len(answer) <= LONGEST_ANSWER and len(answer) < len(output)
        return turn < len(self.operands) and is_number

    def reward(self, turn: int, output: bytes) -> float:
        """1 for the last right answer and its end, in the last turn, else 0."""
        return float(turn == len(self.operands) and output == (self.answers[-1] + END).encode())


def draw_chain(generator: random.Random, *, held_out: bool = False) -> Chain:
    """Draw a chain of sums, none of which is a held-out problem of `#`; or with one that is."""
    while True:
        operands = tuple(generator.randint(LEAST, MOST) for _ in range(NUM_OPERANDS))
        sums = list(accumulate(operands))
        links = zip(sums, operands[1:], strict=False)
        if any(problem_of("#", link).is_held_out for link in links) == held_out:
            return Chain(f"{operands[0]}#{operands[1]}=", operands[2:], tuple(map(str, sums[1:])))


def held_out_chains(count: int) -> list[Chain]:
    """Chains that no step ever draws: one of their sums at least is held out."""
    generator = random.Random(0)
    return [draw_chain(generator, held_out=True) for _ in range(count)]
