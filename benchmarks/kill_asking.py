"""Streams and plain requests that a fault may hit, and what differs in their answers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from benchmarks.kill_table import NUM_PLAIN, NUM_STREAMS
from benchmarks.serve_process import HOST

LIMIT_S = 300.0
Answer = tuple[str, list[float], Any]
"""Text, log-probs and routing rows of a request."""


@dataclass
class Asked:
    """What is asked in one repeat, and what has come of it so far, which a fault may wait for.

    `salt` keeps cached prefixes of others away. `arrivals` are the times of all events, `first_at` that of
    the first of each stream; of every request there are its tokens and the last choice.
    """

    max_tokens: int
    prompt_repeats: int = 1
    salt: str = ""
    arrivals: list[float] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    choices: dict[int, dict[str, Any]] = field(default_factory=dict)
    first_at: dict[int, float] = field(default_factory=dict)

    @property
    def all_decode(self) -> bool:
        """Return True if every stream has got something."""
        return len(self.first_at) == NUM_STREAMS

    @property
    def decode_at(self) -> float:
        """When every stream had got something."""
        return max(self.first_at.values())

    @property
    def num_over(self) -> int:
        """Requests whose answers are whole."""
        return sum(choice.get("finish_reason") is not None for choice in self.choices.values())

    def body(self, number: int) -> dict[str, Any]:
        """Return a sampled completion with rows; the first ones are streams."""
        return {
            "prompt": f"{number}+45=" * self.prompt_repeats,
            "max_tokens": self.max_tokens,
            "temperature": 1,
            "seed": number,
            "ignore_eos": True,
            "stream": number < NUM_STREAMS,
            "logprobs": 0,
            "return_routed_experts": True,
            "routed_experts_format": "packed",
            "return_weight_versions": True,
            "return_token_ids": True,
            **({"cache_salt": self.salt} if self.salt else {}),
        }


Fault = Callable[[Asked], Awaitable[None]]
"""Waits for its moment, and comes."""


async def ask(client: httpx.AsyncClient, number: int, asked: Asked) -> Answer:
    """Ask for one completion; notes when anything arrives."""
    body = asked.body(number)
    texts, logprobs, rows = [], [], None
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise ValueError(f"status {answer.status_code}")
        async for text in _events(answer) if body["stream"] else _whole(answer):
            (choice,) = json.loads(text)["choices"]
            if body["stream"]:
                asked.arrivals.append(time.monotonic())
                asked.first_at.setdefault(number, asked.arrivals[-1])
            asked.choices[number] = choice
            asked.tokens.setdefault(number, []).extend(choice["token_ids"])
            texts.append(choice["text"])
            logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or []
            rows = choice.get("routed_experts") or rows
    return "".join(texts), logprobs, rows and rows["data"]


async def _events(answer: httpx.Response) -> AsyncIterator[str]:
    async for line in answer.aiter_lines():
        if line.startswith("data: {"):
            yield line.removeprefix("data: ")


async def _whole(answer: httpx.Response) -> AsyncIterator[str]:
    """Yield a whole answer; `aiter_lines` would cut JSON at some characters of its text."""
    yield (await answer.aread()).decode()


async def answers(port: int, asked: Asked, *, fault: Fault | None = None) -> tuple[list[Answer | str], float]:
    """Return all answers, the error where there is none, and the longest time in which no stream got anything."""
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=LIMIT_S) as client:
        waiting = [asyncio.create_task(ask(client, number, asked)) for number in range(NUM_STREAMS + NUM_PLAIN)]
        if fault is not None:
            await fault(asked)
        found = await asyncio.gather(*waiting, return_exceptions=True)
    gap_s = float(np.diff(sorted(asked.arrivals)).max()) if len(asked.arrivals) > 1 else LIMIT_S
    return [repr(each) if isinstance(each, BaseException) else each for each in found], gap_s


def differing(found: list[Answer | str], expected: list[Answer | str]) -> dict[str, int | float]:
    """Return how many requests were lost, in how many others tokens, log-probs or rows differ, and by how much
    log-probs do where tokens are the same.
    """
    pairs = [(ours, theirs) for ours, theirs in zip(found, expected, strict=True) if not isinstance(ours, str)]
    return {
        "lost": len(found) - len(pairs),
        "tokens": sum(ours[0] != theirs[0] for ours, theirs in pairs),
        "logprobs": sum(ours[1] != theirs[1] for ours, theirs in pairs),
        "rows": sum(ours[2] != theirs[2] or ours[2] is None for ours, theirs in pairs),
        "logprob_gap": max((_gap(ours[1], theirs[1]) for ours, theirs in pairs if ours[0] == theirs[0]), default=0.0),
    }


def _gap(ours: list[float], theirs: list[float]) -> float:
    return max((abs(a - b) for a, b in zip(ours, theirs, strict=False)), default=0.0)
