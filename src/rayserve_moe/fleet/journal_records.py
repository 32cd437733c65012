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
from rayserve_moe.requests.columns import Columns, PromptColumns, Ragged
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.records import RoutedExperts
from rayserve_moe.requests.results import ChoiceResult, DraftCounts


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
    """Return an update of a choice, by its number among all of its HTTP request, without text and hidden states."""
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
    if update.columns:
        fields["columns"] = _packed_columns(update.columns)
    if (prompt := update.prompt) is not None:
        kept = {name: values for name, values in prompt.columns.items() if name != "hidden"}
        fields["prompt"] = (_packed_columns(kept), dict(prompt.starts), prompt.weight_version)
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
        missing, source, versions = (
            tuple(map(tuple, routing[name])) for name in ("missing", "source", "weight_version")
        )
        update.routing = RoutedExperts(_read(routing["rows"]), routing["start"], missing, source, versions)
    update.columns = _read_columns(fields.get("columns", {}))
    if "prompt" in fields:
        columns, starts, version = fields["prompt"]
        update.prompt = PromptColumns(_read_columns(columns), starts, version)
    return update


def _packed(values: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    return values.dtype.str, values.shape, values.tobytes()


def _read(packed: tuple[str, list[int], bytes]) -> np.ndarray:
    dtype, shape, content = packed
    return np.frombuffer(content, np.dtype(dtype)).reshape(shape).copy()


def _packed_columns(columns: Columns) -> dict[str, list[Any]]:
    """Return each column as one packed array, or as two if it is ragged."""
    parts = {name: (v.lengths, v.values) if isinstance(v, Ragged) else (v,) for name, v in columns.items()}
    return {name: [_packed(array) for array in arrays] for name, arrays in parts.items()}


def _read_columns(packed: dict[str, list[Any]]) -> Columns:
    arrays = {name: [_read(array) for array in parts] for name, parts in packed.items()}
    return {name: Ragged(*parts) if len(parts) == 2 else parts[0] for name, parts in arrays.items()}
