"""Messages between replicas and the journal: msgpack lists, each in a frame of `cluster.channel`.

replica -> journal    [number, operations]       operations are [kind, identity, term, epoch, records]
        <-            [number, fenced, dropped, totals]    once all of them are kept
replica -> journal    [number, kind, identity, epoch]      READ, TAKE_OVER
        <-            [number, fence or nothing, records]
        <-            [0, fenced, [], totals]              at any time

Fenced and dropped requests are named by [identity, term, epoch].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgpack

OPEN, COMMIT, CLOSE, READ, TAKE_OVER = range(5)
MAX_FRAME_BYTES = 1 << 30
UNSOLICITED = 0
"""Message number of an unsolicited answer."""


class Fence(NamedTuple):
    """Ownership of a request. The journal refuses writes with any other fence than the owner's."""

    term: int
    """Number of times it was taken over, plus 1."""
    epoch: int
    """Unique number from the owning replica; higher for replicas that started later."""


def packed(message: list[Any]) -> bytes:
    """Return the bytes of a message."""
    return msgpack.packb(message, use_bin_type=True)


def message_in(body: bytes) -> list[Any]:
    """Return the message of a frame. Raises ConnectionError if it holds none: the other end has another version."""
    try:
        message = msgpack.unpackb(body, raw=False, strict_map_key=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise ConnectionError("a frame of the journal holds no message") from error
    if not isinstance(message, list):
        raise ConnectionError("a frame of the journal holds no message")
    return message
