"""Frames between replicas and the journal: lists in msgpack, behind their length.

replica -> journal    [number, operations]       operations are [kind, identity, term, epoch, records]
        <-            [number, fenced, dropped, totals]    once all of them are kept
replica -> journal    [number, kind, identity, epoch]      READ, TAKE_OVER
        <-            [number, fence or nothing, records]
        <-            [0, fenced, [], totals]              at any time

Requests that are fenced or dropped are named by [identity, term, epoch].
"""

from __future__ import annotations

from typing import Any

import msgpack

OPEN, COMMIT, CLOSE, READ, TAKE_OVER = range(5)
LENGTH_BYTES = 4
LONGEST_FRAME = 1 << 30
UNASKED = 0
"""The number of an answer that no question waits for."""


def framed(message: list[Any]) -> bytes:
    """Return the bytes of a message, with their length before them."""
    packed = msgpack.packb(message, use_bin_type=True)
    return len(packed).to_bytes(LENGTH_BYTES, "little") + packed


def length_in(header: bytes) -> int:
    """Return the length that stands before a frame. ConnectionError for one that no end sends."""
    length = int.from_bytes(header, "little")
    if length > LONGEST_FRAME:
        raise ConnectionError(f"a frame of {length} bytes")
    return length


def message_in(frame: bytes) -> list[Any]:
    """Return the message of a frame."""
    return msgpack.unpackb(frame, raw=False, strict_map_key=False)
