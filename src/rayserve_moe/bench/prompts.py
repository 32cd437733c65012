"""Prompts of a load: the lines of a file, or random token ids."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Prompt:
    """Prompt of a request."""

    content: str | list[int] | list[dict[str, Any]]
    """Text, token ids, or messages of a chat."""
    max_tokens: int


@dataclass(frozen=True)
class RandomPrompt:
    """Random token ids."""

    ids: list[int]
    max_tokens: int


def prompts_of_file(path: Path, *, num_prompts: int, max_tokens: int) -> list[Prompt]:
    """Return `num_prompts` prompts of a JSONL file, from its start and again if it has fewer.

    A line is a text, or an object with `prompt` or `messages`, and optionally `output_tokens`.

    Raises: ValueError with the line that is neither.
    """
    found = list(_lines(path, max_tokens))
    if not found:
        raise ValueError(f"--dataset-path {path}: no prompts")
    return [found[number % len(found)] for number in range(num_prompts)]


def _lines(path: Path, max_tokens: int) -> Iterator[Prompt]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"--dataset-path {path}, line {number}: not JSON: {error}") from error
        fields = {"prompt": row} if isinstance(row, str) else row if isinstance(row, dict) else {}
        content, most = fields.get("messages") or fields.get("prompt"), fields.get("output_tokens", max_tokens)
        if not isinstance(content, str | list) or not content:
            raise ValueError(f"--dataset-path {path}, line {number}: neither `prompt` nor `messages`")
        if type(most) is not int or most < 1:
            raise ValueError(f"--dataset-path {path}, line {number}: output_tokens must be a positive integer")
        yield Prompt(content, most)


@dataclass(frozen=True)
class RandomLengths:
    """Lengths of random prompts and answers, in tokens."""

    prompt: int
    output: int
    prefix: int = 0
    """Tokens that all prompts begin with, beside `prompt`."""
    range_ratio: float = 0.0
    """Lengths are uniform between `1 - range_ratio` and `1 + range_ratio` of these."""


def random_prompts(lengths: RandomLengths, *, num_prompts: int, vocab_size: int, seed: int) -> list[RandomPrompt]:
    """Return prompts of uniformly drawn token ids."""
    source = np.random.default_rng(seed)
    prefix = source.integers(0, vocab_size, lengths.prefix).tolist()
    inputs, outputs = (
        _drawn(source, one, lengths.range_ratio, num_prompts) for one in (lengths.prompt, lengths.output)
    )
    prompts = []
    for num_input, num_output in zip(inputs, outputs, strict=True):
        ids = prefix + source.integers(0, vocab_size, num_input).tolist()
        prompts.append(RandomPrompt(ids, num_output))
    return prompts


def _drawn(source: np.random.Generator, length: int, ratio: float, count: int) -> Sequence[int]:
    low, high = max(1, math.floor(length * (1 - ratio))), math.ceil(length * (1 + ratio))
    return source.integers(low, high + 1, count).tolist()


def body_of(prompt: Prompt, *, model: str, is_chat: bool, ignores_eos: bool, temperature: float) -> dict[str, Any]:
    """Return the body of a streamed request.

    Raises: ValueError for messages on a route of completions.
    """
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": prompt.max_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if ignores_eos:
        body["ignore_eos"] = True
    is_messages = isinstance(prompt.content, list) and isinstance(prompt.content[0], dict)
    if is_chat:
        content = prompt.content if is_messages else [{"role": "user", "content": prompt.content}]
        return body | {"messages": content}
    if is_messages:
        raise ValueError("the file has messages: use --backend openai-chat")
    return body | {"prompt": prompt.content}
