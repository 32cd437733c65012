"""The dialects that routing travels in, by name: for each its encoder, and its decoder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from rayserve_moe.replay.encoding import nested, npy, packed, rollout, sglang
from rayserve_moe.requests import RoutedExperts


class Dialect(NamedTuple):
    """`encode(routing, layout)` gives the field's value, or None where the dialect cannot say that a row is missing.

    `decode(value, layout, start=0)` gives the routing back; `start` is for dialects whose value does not tell it.
    """

    encode: Callable[..., Any]
    decode: Callable[..., RoutedExperts]


DIALECTS: dict[str, Dialect] = {
    "sglang": Dialect(sglang.encode, sglang.decode),
    "nested": Dialect(nested.encode, nested.decode),
    "npy": Dialect(npy.encode, npy.decode),
    "packed": Dialect(packed.encode, packed.decode),
    "packed-int16": Dialect(partial(packed.encode, dtype="int16"), packed.decode),
    "binary": Dialect(rollout.encode, rollout.decode),
    "binary+zstd": Dialect(partial(rollout.encode, compress=True), rollout.decode),
}
