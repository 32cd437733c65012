"""The dialects of routing by name, and detection of a JSON value's dialect."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from rayserve_moe.replay.encoding import nested, npy, packed, rollout, sglang
from rayserve_moe.replay.encoding.wire_rows import from_base64, rows_from_hidden_layers
from rayserve_moe.requests.records import RoutedExperts, RoutingLayout


class Dialect(NamedTuple):
    """The encoder and decoder of a dialect."""

    encode: Callable[..., Any]
    """`encode(routing, layout)` returns the field's value; None if it cannot express a missing row."""
    decode: Callable[..., RoutedExperts]
    """`decode(value, layout, start=0)` returns the routing; `start` is for dialects whose value does not have it."""


DIALECTS: dict[str, Dialect] = {
    "sglang": Dialect(sglang.encode, sglang.decode),
    "nested": Dialect(nested.encode, nested.decode),
    "npy": Dialect(npy.encode, npy.decode),
    "packed": Dialect(packed.encode, packed.decode),
    "packed-int16": Dialect(partial(packed.encode, dtype="int16"), packed.decode),
    "binary": Dialect(rollout.encode, rollout.decode),
    "binary+zstd": Dialect(partial(rollout.encode, compress=True), rollout.decode),
}


def decode_json(value: object, layout: RoutingLayout, *, start: int = 0) -> RoutedExperts:
    """Decode a JSON value of any dialect. Raises ValueError if it is none.

    Text is the npy dialect if its bytes start like such a file, otherwise the sglang dialect.
    """
    if isinstance(value, Mapping):
        return packed.decode(value, layout, start=start)
    if isinstance(value, list):
        return nested.decode(value, layout, start=start)
    raw = from_base64(value)
    if raw.startswith(npy.MAGIC):
        return RoutedExperts(rows_from_hidden_layers(npy.npy_ids(raw), layout), start)
    return sglang.decode(value, layout, start=start)


def decode_each_forced(
    value: object, layout: RoutingLayout, *, prompt_lens: Sequence[int], is_batch: bool
) -> list[RoutedExperts | None]:
    """Decode `forced_routed_experts` for every prompt: a batch has a list with an entry, or None, per prompt."""
    each = value if is_batch and value is not None else [value] * len(prompt_lens)
    if not isinstance(each, list | tuple) or len(each) != len(prompt_lens):
        raise ValueError("should be a list with one entry, or null, per prompt")
    lengths = zip(each, prompt_lens, strict=True)
    return [None if entry is None else decode_forced(entry, layout, prompt_len=n) for entry, n in lengths]


def decode_forced(value: object, layout: RoutingLayout, *, prompt_len: int) -> RoutedExperts:
    """Decode the request field `forced_routed_experts`. Raises ValueError unless it covers the prompt's last positions.

    Rows end with the last prompt token, or with the previous token, like the rows of an answer to the whole sequence.
    """
    routing = _forced(value, layout)
    end = routing.start + len(routing.rows)
    if end not in (prompt_len - 1, prompt_len):
        raise ValueError(f"forced_routed_experts ends at position {end}, but the prompt has {prompt_len} tokens")
    return routing


def _forced(value: object, layout: RoutingLayout) -> RoutedExperts:
    """Return the routing of a RoutedExperts, an array of rows from position 0, or a JSON value."""
    if isinstance(value, RoutedExperts):
        return value
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "iu" or (value.size and not 0 <= value.min() <= value.max() < layout.num_experts):
            raise ValueError("ids must be integers below the number of experts")
        return RoutedExperts(value.astype(layout.dtype))
    if not isinstance(value, str | dict | list):
        raise ValueError("forced_routed_experts must be text, an object or nested lists")
    return decode_json(value, layout)
