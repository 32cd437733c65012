"""The prompts of a job: rows of a JSONL or Parquet file, parsed independently, so that a bad row affects no other.

A row has exactly one of `text`, `messages` (OpenAI's, for the checkpoint's chat template) and `input_ids`. It may have
an `id`, and `sampling_params` in SGLang's names, which override the job's. Its other fields are kept with its samples.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rayserve_moe.requests.constraints import ConstraintFields
from rayserve_moe.requests.fields import SGLANG, Values, declared, is_token_id
from rayserve_moe.requests.records import SamplingParams
from rayserve_moe.text.chat import encode_chat
from rayserve_moe.text.tokenizer import Tokenizer

FORMS = ("text", "messages", "input_ids")
MAX_ID_LENGTH = 256
_READ = (*FORMS, "id", "sampling_params")
_BATCH_ROWS = 256
SAMPLING: dict[str, Values] = {
    field.names[SGLANG]: field.values
    for field in (*declared(SamplingParams), *declared(ConstraintFields))
    if SGLANG in field.names and field.name not in ("n", "first_choice")
}
"""Accepted values by name; the job itself sets the number of choices."""


class BadRow(ValueError):
    """A prompt that cannot be sampled; the message gives the reason without repeating the prompt."""


class PromptsError(ValueError):
    """A file of prompts that cannot be read at all."""


@dataclass(frozen=True)
class Row:
    """A row of the prompts file, or the reason why it cannot be used."""

    position: int
    """Row number from 0."""
    prompt_id: str
    content: Mapping[str, Any] = field(default_factory=dict)
    """The prompt's field."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    fault: str | None = None
    """Why it cannot be used, or None."""
    others: str | None = None
    """Its other fields as a JSON object, or None."""


def count_rows(path: Path) -> int:
    """Return the number of rows without blank lines. Raises PromptsError if the file cannot be read."""
    try:
        if path.suffix == ".parquet":
            return pq.read_metadata(path).num_rows
        with path.open("rb") as lines:
            return sum(not line.isspace() for line in lines)
    except (OSError, pa.ArrowInvalid) as error:
        raise PromptsError(f"{path}: {error}") from error


def read_rows(path: Path) -> Iterator[Row]:
    """Yield every row, with a batch in memory at a time. A row with the id of an earlier row has a fault."""
    seen: set[str] = set()
    for position, raw in enumerate(_parquet_rows(path) if path.suffix == ".parquet" else _lines(path)):
        row = _read_row(raw, position)
        if row.prompt_id in seen:
            row = Row(position, _own_id(raw, position), fault="`id` is already used by an earlier row")
        seen.add(row.prompt_id)
        yield row


def prompt_ids_of(row: Row, tokenizer: Tokenizer | None) -> list[int]:
    """Return the token ids of a row without fault. Raises BadRow if it has none, or text has no tokenizer."""
    if (ids := row.content.get("input_ids")) is not None:
        return ids
    if tokenizer is None:
        raise BadRow("text and messages need the checkpoint's tokenizer: pass its directory with --tokenizer")
    try:
        messages = row.content.get("messages")
        ids = tokenizer.encode(row.content["text"]) if messages is None else encode_chat(tokenizer, messages)
    except (AttributeError, TypeError, ValueError) as error:
        raise BadRow("the tokenizer or the chat template rejects this prompt") from error
    if not ids:
        raise BadRow("the prompt has no tokens")
    return ids


def check_sampling(params: object) -> dict[str, Any]:
    """Return sampling parameters unchanged. Raises BadRow with the name of an unknown or invalid parameter."""
    if not isinstance(params, Mapping):
        raise BadRow("`sampling_params` should be an object")
    if not SAMPLING.keys() >= params.keys():
        raise BadRow(f"`sampling_params` may only hold {', '.join(SAMPLING)}")
    for name, value in params.items():
        try:
            SAMPLING[name].read(value)
        except ValueError as error:
            raise BadRow(f"`sampling_params.{name}` {error}") from error
    return dict(params)


def seed_of(job_seed: int, prompt_id: str, *, sampling: Mapping[str, Any]) -> int:
    """Return the seed of a prompt, 32 bits, which all its samples share; they differ by index.

    It depends only on the prompt's id and the job's seed, or the prompt's own `sampling_seed` in its place.
    """
    text = f"{sampling.get('sampling_seed', job_seed)}/{prompt_id}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def _read_row(raw: Any, position: int) -> Row:
    own_id = _own_id(raw, position)
    try:
        content = _parsed(raw)
        own_id = _given_id(content) or own_id
        sampling = check_sampling(content.get("sampling_params", {}))
        _check_prompt(content)
        others = _others(content)
    except BadRow as fault:
        return Row(position, own_id, fault=str(fault))
    prompt = {name: content[name] for name in FORMS if name in content}
    return Row(position, own_id, prompt, sampling, others=others)


def _others(content: Mapping[str, Any]) -> str | None:
    """Return the JSON of the other fields, or None; Parquet values without a JSON form are written as text."""
    others = {name: value for name, value in content.items() if name not in _READ}
    try:
        return json.dumps(others, default=_as_text) if others else None
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRow("its other fields cannot be written as JSON") from error


def _as_text(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def _parsed(raw: Any) -> dict[str, Any]:
    """Return a line's JSON, or a Parquet row, without nulls."""
    try:
        content = json.loads(raw) if isinstance(raw, bytes) else raw
    except (ValueError, RecursionError) as error:
        raise BadRow("not JSON") from error
    if not isinstance(content, Mapping):
        raise BadRow("not a JSON object")
    content = {name: value for name, value in content.items() if value is not None}
    if not isinstance(raw, bytes):
        content = _from_columns(content)
    return content


def _from_columns(content: dict[str, Any]) -> dict[str, Any]:
    """Decode the values of a Parquet row: drop the nulls that pad its structs, and parse JSON strings."""
    for name in ("sampling_params", "messages"):
        if isinstance(content.get(name), str):
            try:
                content[name] = json.loads(content[name])
            except (ValueError, RecursionError) as error:
                raise BadRow(f"`{name}` is a string that is not JSON") from error
    return {name: _without_nulls(value) for name, value in content.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(entry) for name, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value


def _given_id(content: Mapping[str, Any]) -> str | None:
    given = content.get("id")
    if given is None:
        return None
    if type(given) not in (str, int):
        raise BadRow("`id` should be a whole number or a string")
    text = str(given)
    if not 0 < len(text) <= MAX_ID_LENGTH or not text.isprintable():
        raise BadRow(f"`id` should have 1 to {MAX_ID_LENGTH} printable characters")
    return text


def _own_id(raw: Any, position: int) -> str:
    """Return a generated id for a row without an id: its position and a hash of its content."""
    text = raw if isinstance(raw, bytes) else json.dumps(raw, sort_keys=True, default=str).encode()
    return f"{position:08d}-{hashlib.sha256(text.strip()).hexdigest()[:16]}"


def _check_prompt(content: Mapping[str, Any]) -> None:
    given = [form for form in FORMS if form in content]
    if len(given) != 1:
        raise BadRow(f"a row should have one of {', '.join(FORMS)}")
    value = content[given[0]]
    if given[0] == "text":
        if not isinstance(value, str) or not value:
            raise BadRow("`text` should be a non-empty string")
    elif not isinstance(value, list) or not value:
        raise BadRow(f"`{given[0]}` should be a non-empty list")
    elif given[0] == "messages":
        if not all(isinstance(message, Mapping) for message in value):
            raise BadRow("`messages` should be a list of objects")
    elif not all(map(is_token_id, value)):
        raise BadRow("`input_ids` should be a list of token ids")


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as lines:
        yield from (line for line in lines if not line.isspace())


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(_BATCH_ROWS):
            yield from batch.to_pylist()
