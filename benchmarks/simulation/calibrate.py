"""Step times of a served fleet, from streams that each of its replicas is asked for directly, all at the same time.

What a step takes is told by the gaps between tokens, for several numbers of streams and lengths of context; what a
prompt takes by the time to the first token of lone prompts. Both are fitted by least squares. What the endpoint adds is
told by lone prompts that are asked for there and of a replica, in turn.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import numpy as np

from benchmarks.simulation.client import FIRST_ID, Answer, stream
from benchmarks.simulation.costs import MeasuredSteps

ANSWER_TOKENS = 64
SHORT = 16
ROUNDS, DAMPING = 12, 0.6


Address = tuple[str, int]


async def calibrate(
    endpoint: Address,
    replicas: Sequence[Address],
    *,
    vocab_size: int,
    streams: Sequence[int] = (1, 2, 4, 8, 16),
    prompts: Sequence[int] = (16, 40, 96, 200, 420, 900),
    repeats: int = 3,
) -> MeasuredSteps:
    """Fit the step times of one replica; `streams` run on each at once.

    `prompts` are lengths, most of which a step pads as it does those of others.
    """
    draw = np.random.default_rng(0)

    async def one(address: Address, length: int, num_answer: int) -> Answer:
        """Stream a new prompt; record the seconds to the first token in `first_at`, and from it in `last_at`."""
        prompt, began = draw.integers(FIRST_ID, vocab_size, length).tolist(), time.perf_counter()
        answer = await stream(address, prompt, num_answer=num_answer)
        return replace(answer, first_at=answer.first_at - began, last_at=answer.last_at - answer.first_at)

    async def together(count: int, length: int, num_answer: int) -> list[Answer]:
        asked = [one(address, length, num_answer) for address in replicas for _ in range(count)]
        return list(await asyncio.gather(*asked))

    await together(max(streams), SHORT, ANSWER_TOKENS)
    decodes = []
    for count, length in [(count, SHORT) for count in streams] + [(streams[0], max(prompts))]:
        for _ in range(repeats):
            answers = await together(count, length, ANSWER_TOKENS)
            gap = statistics.median(answer.last_at / (ANSWER_TOKENS - 1) for answer in answers)
            decodes.append((1.0, count, count * (length + ANSWER_TOKENS / 2), gap))
    step_s, row_s, context_s = fit(decodes)
    firsts = []
    for length in prompts:
        for _ in range(repeats * 2):
            answers = await together(1, length, 2)
            firsts += [(1.0, length, length * (length - 1) / 2, answer.first_at) for answer in answers]
    request_s, prompt_s, prompt_context_s = fit(firsts)
    pairs = [[(await one(address, SHORT, 2)).first_at for address in (endpoint, replicas[0])] for _ in range(40)]
    added_s = statistics.median(through - direct for through, direct in pairs)
    request_s = max(0.0, request_s - step_s + added_s)
    return MeasuredSteps(step_s, row_s, context_s, 0.0, prompt_s, prompt_context_s, request_s)


def fitted_to(
    real: dict[str, float], times: MeasuredSteps, *, simulate: Callable[[MeasuredSteps], dict[str, float]]
) -> MeasuredSteps:
    """Scale all step times, and move `request_s`, until a simulation has the medians of what a run has shown.

    Beside the steps a machine runs all that stands before the replicas: where they share cores, steps take longer.
    """
    for _ in range(ROUNDS):
        seen = simulate(times)
        factor = (real["tpot_p50_s"] / seen["tpot_p50_s"]) ** DAMPING
        steps = {name: factor * value for name, value in asdict(times).items() if name != "request_s"}
        request_s = max(0.0, times.request_s + DAMPING * (real["ttft_p50_s"] - seen["ttft_p50_s"]))
        times = MeasuredSteps(**steps, request_s=request_s)
    return times


def fit(rows: Sequence[tuple[float, ...]]) -> list[float]:
    """Return coefficients, none negative, of the columns before the last, whose errors count relative to it."""
    table = np.array(rows)
    given, wanted = table[:, :-1] / table[:, -1:], np.ones(len(table))
    kept = list(range(given.shape[1]))
    while True:
        found = np.linalg.lstsq(given[:, kept], wanted, rcond=None)[0]
        if (found >= 0).all():
            break
        kept.pop(int(np.argmin(found)))
    return [float(found[kept.index(column)]) if column in kept else 0.0 for column in range(given.shape[1])]
