"""What clients of a fleet ask for: conversations drawn to the shapes of published traces, or read from a trace file.

A turn says which tokens it adds by seeds: equal seeds are equal tokens, so that prompts share what those of a trace do.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

FIRST_ID, LAST_ID = 16, 1 << 30
BLOCK_TOKENS = 512
"""Tokens of a block of Mooncake's traces."""
SYSTEM_SEED = 0
LEAST_TOKENS = 1

Span = tuple[int, int]
"""A seed, and how many tokens are drawn from it."""


@dataclass(frozen=True)
class Turn:
    """A request: tokens that come behind all before them, tokens of its answer, and seconds after the answer before."""

    spans: tuple[Span, ...]
    num_answer: int
    gap_s: float = 0.0
    calls: tuple[Conversation, ...] = ()
    """Conversations of subagents. They begin with the gap, and the prompt is sent after all of them have ended."""
    num_dropped: int = 0
    """Tokens that an edit removes from the end of the history."""

    @property
    def num_tokens(self) -> int:
        """Tokens that it adds to its conversation's prompt."""
        return sum(length for _, length in self.spans)


@dataclass(frozen=True)
class Conversation:
    """Turns that follow on each other, each after the answer to the one before; the first at `starts_at` seconds."""

    starts_at: float
    turns: tuple[Turn, ...]
    sends_hints: bool = True
    """True if its client sends the compared hints (`SessionHints`)."""

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all prompts and answers, including subagents."""
        own = sum(turn.num_tokens + turn.num_answer for turn in self.turns)
        return own + sum(called.num_tokens for turn in self.turns for called in turn.calls)


@dataclass(frozen=True)
class Shape:
    """Numbers to draw conversations from. Lengths are log-normal, by median and sigma of the logarithm.

    `common` tokens begin every prompt; `turns` is the mean of a geometric number; gaps between turns are exponential.
    `arrival_cv` is the coefficient of variation of the Gamma gaps between conversations (1: Poisson).
    """

    prompt: tuple[float, float]
    answer: tuple[float, float]
    common: int = 0
    turns: float = 1.0
    gap_s: float = 0.0
    arrival_cv: float = 1.0
    longest: int = 32_768


SHAPES = {
    "conversation": Shape((1500, 1.1), (300, 0.6), common=512, turns=5.0, gap_s=60.0),
    "chat": Shape((1020, 0.55), (129, 1.0), common=0, turns=1.0, arrival_cv=1.09),
    "code": Shape((1469, 0.95), (13, 1.13), common=0, turns=1.0, arrival_cv=4.0),
    "agents": Shape((900, 1.0), (120, 0.8), common=2048, turns=10.0, gap_s=4.0),
}
"""After Mooncake's conversations, Azure's 2023 traces of chat and of code, and Mooncake's trace of agents: lengths,
what is shared, and bursts as published, cut at `longest`."""


def drawn(shape: Shape, *, rate: float, num_requests: int, seed: int) -> Iterator[Conversation]:
    """Return conversations in order of time with at least `num_requests` turns, at `rate` requests per second."""
    draw = np.random.default_rng(seed)
    at, count, between = 0.0, 0, shape.turns / rate
    while count < num_requests:
        variance = shape.arrival_cv**2
        at += float(draw.gamma(1 / variance, between * variance))
        conversation = conversation_at(shape, at, draw)
        count += len(conversation.turns)
        yield conversation


def conversation_at(shape: Shape, at: float, draw: np.random.Generator) -> Conversation:
    """Draw a conversation that begins at a time."""
    turns, length = [], 0
    for place in range(int(draw.geometric(1 / shape.turns))):
        new, answer = (_length(median, sigma, draw) for median, sigma in (shape.prompt, shape.answer))
        common = ((SYSTEM_SEED, shape.common),) if shape.common and not place else ()
        left = shape.longest - length - answer - sum(tokens for _, tokens in common)
        if left < LEAST_TOKENS:
            break
        spans = (*common, (int(draw.integers(1, 1 << 62)), min(new, left)))
        turns.append(Turn(spans, answer, float(draw.exponential(shape.gap_s)) if place else 0.0))
        length += turns[-1].num_tokens + answer
    return Conversation(at, tuple(turns))


def _length(median: float, sigma: float, draw: np.random.Generator) -> int:
    """Return a length of at most a hundred times the median."""
    return max(LEAST_TOKENS, int(min(draw.lognormal(np.log(median), sigma), 100 * median)))


def traced(path: Path, *, longest: int, speed: float = 1.0) -> Iterator[Conversation]:
    """Return the requests of a trace file, at `speed` times its pace, each cut to `longest` tokens.

    `.jsonl` is Mooncake's form (`timestamp` in ms, `input_length`, `output_length`, `hash_ids` of 512 tokens), `.csv`
    Azure's (TIMESTAMP, ContextTokens, GeneratedTokens), whose prompts share nothing. ValueError for another ending.
    """
    read = {".jsonl": _mooncake, ".csv": _azure}.get(path.suffix)
    if read is None:
        raise ValueError(f"{path.name}: a trace is Mooncake's .jsonl or Azure's .csv")
    first: float | None = None
    for at, spans, num_answer in read(path):
        first = at if first is None else first
        answer = max(LEAST_TOKENS, min(num_answer, longest // 2))
        yield Conversation((at - first) / speed, (Turn(tuple(_cut(spans, longest - answer)), answer),))


def _mooncake(path: Path) -> Iterator[tuple[float, list[Span], int]]:
    with path.open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            blocks, length = row["hash_ids"], row["input_length"]
            sizes = [min(BLOCK_TOKENS, length - place * BLOCK_TOKENS) for place in range(len(blocks))]
            yield row["timestamp"] / 1e3, list(zip(blocks, sizes, strict=True)), row["output_length"]


def _azure(path: Path) -> Iterator[tuple[float, list[Span], int]]:
    with path.open(encoding="utf-8", newline="") as lines:
        for number, row in enumerate(csv.DictReader(lines), 1):
            at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            yield at, [(number, int(row["ContextTokens"]))], int(row["GeneratedTokens"])


def _cut(spans: list[Span], most: int) -> Iterator[Span]:
    for seed, length in spans:
        if (kept := min(length, most)) > 0:
            yield seed, kept
        most -= length


def token_ids(spans: tuple[Span, ...]) -> np.ndarray:
    """Return the tokens of spans, int32."""
    return np.concatenate(
        [np.random.default_rng(seed).integers(FIRST_ID, LAST_ID, length, dtype=np.int32) for seed, length in spans]
    )
