"""Plays conversations against a served fleet, and sees what a simulation of it shows."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from benchmarks.simulation.fleet import Asked, Seen
from benchmarks.simulation.replica import NO_HINTS, SessionHints
from benchmarks.simulation.workloads import Conversation, token_ids
from benchmarks.stream_client import EVENT, events_of

NO_FIELDS: Mapping[str, Any] = MappingProxyType({})
FIRST_ID = 16
"""Ids below may be special."""


@dataclass
class Answer:
    """The tokens of a stream, when its first and last came, the seconds between two events that brought some, and how
    many tokens of its prompt were cached."""

    token_ids: list[int] = field(default_factory=list)
    first_at: float = 0.0
    last_at: float = 0.0
    num_cached: int = 0
    gaps: list[float] = field(default_factory=list)


async def stream(
    address: tuple[str, int],
    prompt: Sequence[int],
    *,
    num_answer: int,
    headers: Mapping[str, str] = NO_FIELDS,
    fields: Mapping[str, Any] = NO_FIELDS,
) -> Answer:
    """Stream one greedy answer of just so many tokens; RuntimeError for an error, or another number."""
    request = _request(address[0], prompt, num_answer, headers=headers, fields=fields)
    reader, writer = await asyncio.open_connection(*address)
    answer = Answer()
    try:
        writer.write(request)
        async for event in events_of(reader):
            _take(answer, event, now=time.perf_counter())
    finally:
        writer.close()
    if len(answer.token_ids) != num_answer:
        raise RuntimeError(f"{len(answer.token_ids)} tokens came, not {num_answer}")
    return answer


def _request(
    host: str, prompt: Sequence[int], num_answer: int, *, headers: Mapping[str, str], fields: Mapping[str, Any]
) -> bytes:
    body: dict[str, Any] = {
        "prompt": list(prompt),
        "max_tokens": num_answer,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    encoded = json.dumps(body).encode()
    added = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(encoded)}\r\n{added}\r\n"
    )
    return head.encode() + encoded


def _take(answer: Answer, event: bytes, *, now: float) -> None:
    if not event.startswith(EVENT + b"{"):
        return
    chunk = json.loads(event[len(EVENT) :])
    if "error" in chunk:
        raise RuntimeError(str(chunk["error"]))
    new = [token for choice in chunk["choices"] for token in choice.get("token_ids") or ()]
    if new:
        if answer.token_ids:
            answer.gaps.append(now - answer.last_at)
        answer.first_at = answer.first_at or now
        answer.last_at = now
        answer.token_ids += new
    if usage := chunk.get("usage"):
        answer.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


async def play(
    address: tuple[str, int],
    conversations: Sequence[Conversation],
    *,
    vocab_size: int,
    num_replicas: int,
    hints: SessionHints = NO_HINTS,
) -> Seen:
    """Play all conversations at their times, with hints about their sessions."""
    seen, began = Seen(num_replicas=num_replicas), time.perf_counter()

    async def converse(conversation: Conversation) -> None:
        history: list[int] = []
        await asyncio.sleep(conversation.starts_at - (time.perf_counter() - began))
        for place, turn in enumerate(conversation.turns):
            if place:
                await asyncio.sleep(turn.gap_s)
            history += plain_ids(token_ids(turn.spans), vocab_size)
            asked = Asked(conversation, place, np.array(history, np.int32), time.perf_counter() - began)
            asked.num_given = len(history)
            headers, fields = hinted(conversation, place, hints=hints)
            answer = await stream(address, history, num_answer=turn.num_answer, headers=headers, fields=fields)
            asked.first_at, asked.last_at = answer.first_at - began, answer.last_at - began
            asked.num_cached = answer.num_cached
            seen.asked.append(asked)
            seen.gaps += answer.gaps
            history += answer.token_ids

    await asyncio.gather(*map(converse, conversations))
    seen.ended_at = time.perf_counter() - began
    return seen


def plain_ids(ids: np.ndarray, vocab_size: int) -> list[int]:
    """Return the same ids within a vocabulary, none of them special."""
    return (FIRST_ID + ids % (vocab_size - FIRST_ID)).tolist()


def hinted(conversation: Conversation, turn: int, *, hints: SessionHints) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the headers and body fields with which a turn sends hints."""
    is_last = turn == len(conversation.turns) - 1
    headers = {"X-Session-Id": str(id(conversation))} if hints.names else {}
    if hints.final and is_last:
        headers["X-Dynamo-Session-Final"] = "true"
    keeps = hints.ttl_s and not (hints.final and is_last)
    return headers, {"nvext": {"cache_control": {"type": "ephemeral", "ttl": hints.ttl_s}}} if keeps else {}
