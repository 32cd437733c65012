"""Messages between replicas and the journal: lists in msgpack, a frame of `cluster.channel` each.

replica -> journal    [number, operations]       operations are [kind, identity, term, epoch, records]
        <-            [number, fenced, dropped, totals]    once all of them are kept
replica -> journal    [number, kind, identity, epoch]      READ, TAKE_OVER
        <-            [number, fence or nothing, records]
        <-            [0, fenced, [], totals]              at any time

Requests that are fenced or dropped are named by [identity, term, epoch].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgpack

OPEN, COMMIT, CLOSE, READ, TAKE_OVER = range(5)
MAX_FRAME_BYTES = 1 << 30
UNASKED = 0
"""The number of an answer that no question waits for."""


class Fence(NamedTuple):
    """Who owns a request: how often it was taken over, and an epoch of its own from the replica that did, a later
    start's being higher. Replicas bring their fences; what is written under any other than the owner's is refused."""

    term: int
    epoch: int


def packed(message: list[Any]) -> bytes:
    """Return the bytes of a message."""
    return msgpack.packb(message, use_bin_type=True)


def message_in(body: bytes) -> list[Any]:
    """Return the message of a frame. ConnectionError if it holds none: then the other end is of another version."""
    try:
        message = msgpack.unpackb(body, raw=False, strict_map_key=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise ConnectionError("a frame of the journal holds no message") from error
    if not isinstance(message, list):
        raise ConnectionError("a frame of the journal holds no message")
    return message
