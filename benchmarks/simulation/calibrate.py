"""Step times of a served fleet, from streams that its replicas share evenly: no access but HTTP is needed.

What a step takes is told by the gaps between tokens, for several numbers of streams and lengths of context; what a
prompt takes by the time to the first token of lone prompts. Both are fitted by least squares.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.simulation.client import FIRST_ID, Answer, stream
from benchmarks.simulation.costs import MeasuredSteps

ANSWER_TOKENS = 64
SHORT = 16


async def calibrate(
    address: tuple[str, int],
    *,
    vocab_size: int,
    num_replicas: int,
    streams: Sequence[int] = (1, 2, 4, 8, 16),
    prompts: Sequence[int] = (16, 64, 256, 512, 1024),
    repeats: int = 3,
) -> MeasuredSteps:
    """Fit the step times of one replica; `streams` run on each at once, `prompts` are lengths."""
    draw = np.random.default_rng(0)

    async def together(count: int, length: int, num_answer: int) -> list[Answer]:
        """Streams of new prompts, with the seconds to the first token in `first_at`, and from it in `last_at`."""

        async def one() -> Answer:
            prompt, began = draw.integers(FIRST_ID, vocab_size, length).tolist(), time.perf_counter()
            answer = await stream(address, prompt, num_answer=num_answer)
            return replace(answer, first_at=answer.first_at - began, last_at=answer.last_at - answer.first_at)

        return list(await asyncio.gather(*(one() for _ in range(count))))

    await together(num_replicas * max(streams), SHORT, ANSWER_TOKENS)
    decodes = []
    for count, length in [(count, SHORT) for count in streams] + [(streams[0], max(prompts))]:
        for _ in range(repeats):
            answers = await together(num_replicas * count, length, ANSWER_TOKENS)
            gap = statistics.median(answer.last_at / (ANSWER_TOKENS - 1) for answer in answers)
            decodes.append((1.0, count, count * (length + ANSWER_TOKENS / 2), gap))
    step_s, row_s, context_s = fit(decodes)
    firsts = []
    for length in prompts:
        for _ in range(repeats * 2):
            answers = await together(num_replicas, length, 2)
            firsts += [(1.0, length, length * (length - 1) / 2, answer.first_at) for answer in answers]
    request_s, prompt_s, prompt_context_s = fit(firsts)
    return MeasuredSteps(step_s, row_s, context_s, 0.0, prompt_s, prompt_context_s, max(0.0, request_s - step_s))


def fit(rows: Sequence[tuple[float, ...]]) -> list[float]:
    """Coefficients, none negative, of the columns before the last, whose errors count relative to it."""
    table = np.array(rows)
    given, wanted = table[:, :-1] / table[:, -1:], np.ones(len(table))
    kept = list(range(given.shape[1]))
    while True:
        found = np.linalg.lstsq(given[:, kept], wanted, rcond=None)[0]
        if (found >= 0).all():
            break
        kept.pop(int(np.argmin(found)))
    return [float(found[kept.index(column)]) if column in kept else 0.0 for column in range(given.shape[1])]
