"""What a journal keeps of a request, as bytes: what was asked, and what was committed of its choices.

A record of what is committed is one update of one choice; those of a choice add up, in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass
from typing import Any

import msgpack
import numpy as np

from rayserve_moe.answers.resume import joined
from rayserve_moe.requests.records import (
    ChoiceResult,
    DraftCounts,
    FinishReason,
    PromptScores,
    RoutedExperts,
    TopLogprobs,
)


@dataclass(frozen=True)
class AskedRequest:
    """An HTTP request as it was checked, and what this server has decided of it.

    `accept` is its header of this name; `stem` is what ids of its answer are made of; `prompts` int32 and `seeds` are
    those of its engine requests, `choices` how many each has. `weight_version` served when it came.
    """

    path: str
    body: bytes
    accept: str
    stem: str
    prompts: tuple[bytes, ...] = ()
    seeds: tuple[int, ...] = ()
    choices: tuple[int, ...] = ()
    weight_version: str = ""

    def packed(self) -> bytes:
        """Return its bytes."""
        return msgpack.packb(list(astuple(self)), use_bin_type=True)

    @classmethod
    def read(cls, record: bytes) -> AskedRequest:
        """Return it from its bytes."""
        *texts, prompts, seeds, choices, version = msgpack.unpackb(record, raw=False)
        return cls(*texts, tuple(prompts), tuple(seeds), tuple(choices), version)


def packed_update(choice: int, update: ChoiceResult) -> bytes:
    """Return an update of a choice, by its number among all of its HTTP request, without text, as bytes."""
    fields: dict[str, Any] = {
        "choice": choice,
        "ids": np.asarray(update.token_ids, np.int32).tobytes(),
        "logprobs": np.asarray(update.logprobs, np.float32).tobytes(),
        "ranks": np.asarray(update.ranks, np.int32).tobytes(),
        "cached": update.num_cached_tokens,
        "versions": update.weight_versions,
    }
    if update.finish is not None:
        fields["finish"] = astuple(update.finish)
    if update.drafts != DraftCounts():
        fields["drafts"] = tuple(update.drafts)
    if update.routing is not None:
        fields["routing"] = {**asdict(update.routing), "rows": _packed(update.routing.rows)}
    if update.top is not None:
        fields["top"] = _packed_top(update.top)
    if (scores := update.prompt_scores) is not None:
        top = None if scores.top is None else _packed_top(scores.top)
        found = (_packed(scores.logprobs), _packed(scores.ranks))
        fields["scores"] = (scores.start, *found, top, scores.weight_version)
    for name, values in (("evidence", update.evidence), ("listed", update.prompt_listed)):
        if values is not None:
            fields[name] = _packed(values)
    if update.support:
        fields["support"] = [(_packed(ids), logprob) for ids, logprob in update.support]
    return msgpack.packb(fields, use_bin_type=True)


def committed_in(records: Iterable[bytes], num_choices: int) -> list[ChoiceResult]:
    """Add up the records of the choices of an HTTP request; each choice is numbered within all of them."""
    updates: list[list[ChoiceResult]] = [[ChoiceResult(choice_index=choice)] for choice in range(num_choices)]
    for record in records:
        update = _update_in(record)
        updates[update.choice_index].append(update)
    return [joined(each) for each in updates]


def _update_in(record: bytes) -> ChoiceResult:
    fields = msgpack.unpackb(record, raw=False)
    update = ChoiceResult(
        choice_index=fields["choice"],
        token_ids=np.frombuffer(fields["ids"], np.int32).tolist(),
        logprobs=np.frombuffer(fields["logprobs"], np.float32).tolist(),
        ranks=np.frombuffer(fields["ranks"], np.int32).tolist(),
        num_cached_tokens=fields["cached"],
        weight_versions=tuple((position, version) for position, version in fields["versions"]),
    )
    if "finish" in fields:
        update.finish = FinishReason(*fields["finish"])
    update.drafts = DraftCounts(*fields.get("drafts", ()))
    if "routing" in fields:
        routing = fields["routing"]
        update.routing = RoutedExperts(
            _read(routing["rows"]),
            routing["start"],
            missing=tuple((start, end) for start, end in routing["missing"]),
            source=tuple((start, end, source) for start, end, source in routing["source"]),
            weight_version=tuple((start, end, version) for start, end, version in routing["weight_version"]),
        )
    if "top" in fields:
        update.top = _read_top(fields["top"])
    if "scores" in fields:
        start, logprobs, ranks, top, version = fields["scores"]
        update.prompt_scores = PromptScores(start, _read(logprobs), _read(ranks), top and _read_top(top), version)
    update.evidence = _read(fields["evidence"]) if "evidence" in fields else None
    update.prompt_listed = _read(fields["listed"]) if "listed" in fields else None
    update.support = [(_read(ids), logprob) for ids, logprob in fields.get("support", ())]
    return update


def _packed(values: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    return values.dtype.str, values.shape, values.tobytes()


def _read(packed: tuple[str, list[int], bytes]) -> np.ndarray:
    dtype, shape, content = packed
    return np.frombuffer(content, np.dtype(dtype)).reshape(shape).copy()


def _packed_top(top: TopLogprobs) -> tuple[Any, Any]:
    return _packed(top.token_ids), _packed(top.logprobs)


def _read_top(packed: tuple[Any, Any]) -> TopLogprobs:
    return TopLogprobs(_read(packed[0]), _read(packed[1]))
