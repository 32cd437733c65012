"""A request in the journal as bytes: the HTTP request, and the committed updates of its choices.

Each record of a commit is an update of a choice; the updates of a choice add up in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
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
    """An HTTP request after validation, with this server's decisions about it."""

    path: str
    body: bytes
    accept: str
    """The `accept` header."""
    stem: str
    """Common part of the ids in its answer."""
    prompts: tuple[bytes, ...] = ()
    """Token ids of each engine request, int32."""
    seeds: tuple[int, ...] = ()
    """Seed of each engine request."""
    choices: tuple[int, ...] = ()
    """Number of choices of each engine request."""
    weight_version: str = ""
    """Version that served at its arrival."""
    adapters: tuple[str, ...] = ()
    """Key of the adapter of each engine request, with the digest of its bytes; empty for none."""

    def packed(self) -> bytes:
        """Return the request as bytes."""
        return msgpack.packb(list(astuple(self)), use_bin_type=True)

    @classmethod
    def read(cls, record: bytes) -> AskedRequest:
        """Return the request from its bytes."""
        *texts, prompts, seeds, choices, version, adapters = msgpack.unpackb(record, raw=False)
        return cls(*texts, tuple(prompts), tuple(seeds), tuple(choices), version, tuple(adapters))


def packed_update(choice: int, update: ChoiceResult) -> bytes:
    """Pack an update of a choice without text and hidden states; `choice` counts over the whole HTTP request."""
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
        fields["routing"] = {
            **vars(update.routing),
            "rows": _packed(update.routing.rows),
            "parts": {name: _packed_part(values) for name, values in update.routing.parts.items()},
        }
    if update.columns:
        fields["columns"] = _packed_columns(update.columns)
    if (prompt := update.prompt) is not None:
        kept = {name: values for name, values in prompt.columns.items() if name != "hidden"}
        fields["prompt"] = (_packed_columns(kept), dict(prompt.starts), prompt.weight_version)
    return msgpack.packb(fields, use_bin_type=True)


def committed_in(records: Iterable[bytes], num_choices: int) -> list[ChoiceResult]:
    """Return the sum of the records for each choice; `num_choices` and indices count over the whole HTTP request."""
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
        parts = {name: _read_part(packed) for name, packed in routing.get("parts", {}).items()}
        update.routing = RoutedExperts(_read(routing["rows"]), routing["start"], missing, source, versions, parts)
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


def _packed_part(values: np.ndarray) -> Any:
    return values.tolist() if values.dtype == object else _packed(values)


def _read_part(packed: Any) -> np.ndarray:
    """Return the entries of a part: rows of bytes in a list, or a packed array, whose first member is text."""
    if packed and isinstance(packed[0], str):
        return _read(packed)
    entries = np.empty(len(packed), object)
    entries[:] = packed
    return entries


def _packed_columns(columns: Columns) -> dict[str, list[Any]]:
    """Return each column as a packed array, or as two if it is ragged."""
    parts = {name: (v.lengths, v.values) if isinstance(v, Ragged) else (v,) for name, v in columns.items()}
    return {name: [_packed(array) for array in arrays] for name, arrays in parts.items()}


def _read_columns(packed: dict[str, list[Any]]) -> Columns:
    arrays = {name: [_read(array) for array in parts] for name, parts in packed.items()}
    return {name: Ragged(*parts) if len(parts) == 2 else parts[0] for name, parts in arrays.items()}
