"""Answers of Tinker's `SampleResponse`: protobuf for its clients from 0.18 on, JSON for older ones.

The message, of proto3 package `tinker_public`, has few fields, so it is written by hand: its arrays are the
little-endian bytes of numpy arrays.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rayserve_moe.answers.native import likeliest, prompt_column
from rayserve_moe.requests.columns import Columns, as_array
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.serving.api.schemas.tinker import TinkerSampleBody

STOP, LENGTH = 0, 1
"""`StopReason`."""
EMPTY_LOGPROB = -99999.0
"""In place of log-probs of a row without any; its ids are 0."""
_VARINT, _BYTES = 0, 2


def sample_protobuf(body: TinkerSampleBody, results: Sequence[ChoiceResult], *, num_prompt: int) -> bytes:
    """Return the samples of a prompt of `num_prompt` tokens as a `SampleResponse`."""
    parts = [_field(1, _sequence(body, result)) for result in results]
    if body.prompt_logprobs:
        parts.append(_field(2, prompt_logprobs(body, results[0], num_prompt=num_prompt).astype("<f4").tobytes()))
    if k := body.topk_prompt_logprobs:
        ids, logprobs = _top_of_prompt(results[0], num_prompt=num_prompt, k=k)
        parts.append(_field(3, _top_message(ids, logprobs)))
    cached = results[0].num_cached_tokens
    return b"".join([*parts, _number(4, cached) if cached else b""])


def sample_json(body: TinkerSampleBody, results: Sequence[ChoiceResult], *, num_prompt: int) -> dict[str, Any]:
    """Return the samples as JSON, with None where a prompt token has no log-prob."""
    answer: dict[str, Any] = {"type": "sample", "sequences": [_json_sequence(result) for result in results]}
    if body.prompt_logprobs:
        found = prompt_logprobs(body, results[0], num_prompt=num_prompt)
        answer["prompt_logprobs"] = [None if np.isnan(value) else float(value) for value in found]
    if k := body.topk_prompt_logprobs:
        answer["topk_prompt_logprobs"] = list(_json_top_of_prompt(results[0], num_prompt=num_prompt, k=k))
    return answer


def prompt_logprobs(body: TinkerSampleBody, result: ChoiceResult, *, num_prompt: int) -> np.ndarray:
    """Return float32 [num_prompt], NaN for the first token and those before the requested last ones."""
    found = np.full(num_prompt, np.nan, np.float32)
    start, known = prompt_column(result, "logprobs")
    found[start + 1 : start + 1 + len(known)] = known
    if (last_n := body.prompt_logprobs_last_n) is not None:
        found[: max(0, num_prompt - last_n)] = np.nan
    return found


def _sequence(body: TinkerSampleBody, result: ChoiceResult) -> bytes:
    reason = _stop_reason(result)
    parts = [_number(1, reason)] if reason else []
    parts.append(_field(2, np.asarray(result.token_ids, "<i4").tobytes()))
    parts.append(_field(3, np.asarray(result.logprobs, "<f4").tobytes()))
    if k := body.topk_sample_logprobs:
        ids, logprobs = _top_of(result.columns, count=len(result.token_ids), k=k)
        parts.append(_field(4, _top_message(ids, logprobs)))
    return b"".join(parts)


def _json_sequence(result: ChoiceResult) -> dict[str, Any]:
    reason = "length" if _stop_reason(result) == LENGTH else "stop"
    return {"stop_reason": reason, "tokens": list(result.token_ids), "logprobs": list(result.logprobs)}


def _stop_reason(result: ChoiceResult) -> int:
    return LENGTH if result.finish is not None and result.finish.kind == "length" else STOP


def _top_of_prompt(result: ChoiceResult, *, num_prompt: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ids int32 and log-probs float32 [num_prompt, k] of the likeliest tokens at each prompt token."""
    ids, logprobs = np.zeros((num_prompt, k), np.int32), np.full((num_prompt, k), EMPTY_LOGPROB, np.float32)
    if result.prompt is not None and "top_ids" in result.prompt.columns:
        start, known = prompt_column(result, "top_ids")
        at = slice(start + 1, start + 1 + len(known))
        ids[at], logprobs[at] = known[:, :k], prompt_column(result, "top_logprobs")[1][:, :k]
    return ids, logprobs


def _top_of(columns: Columns, *, count: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ids int32 and log-probs float32 [count, k] of the likeliest tokens at each output."""
    if not count or "top_ids" not in columns:
        return np.zeros((0, k), np.int32), np.zeros((0, k), np.float32)
    ids, logprobs = (as_array(columns[name])[:, :k] for name in ("top_ids", "top_logprobs"))
    return ids, logprobs


def _json_top_of_prompt(result: ChoiceResult, *, num_prompt: int, k: int) -> Iterator[list[list[float]] | None]:
    found = (likeliest(result.prompt.columns) if result.prompt is not None else None) or []
    start = prompt_column(result, "top_ids")[0] + 1
    for position in range(num_prompt):
        at = position - start
        yield [[i, value] for value, i in found[at][:k]] if 0 <= at < len(found) else None


def _top_message(ids: np.ndarray, logprobs: np.ndarray) -> bytes:
    """Return a `TopkLogprobs` of arrays [length, k]."""
    length, k = ids.shape
    arrays = (_field(1, ids.astype("<i4").tobytes()), _field(2, logprobs.astype("<f4").tobytes()))
    return b"".join([*arrays, _number(3, k), _number(4, length)])


def _field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(value)) + value


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3 | _VARINT) + _varint(value)


def _varint(value: int) -> bytes:
    """Return an unsigned integer, seven bits a byte, least significant first."""
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return struct.pack(f"{len(parts) + 1}B", *parts, value)
