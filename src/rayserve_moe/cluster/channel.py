"""Mutually authenticated TCP channels between processes that share a key.

They carry steps, heartbeats, the journal and page feeds. Handshake:

    listening end -> NONCE
                  <- NONCE, proof of both nonces
    proof of both ->

Neither end reads application data before the other end has proven that it knows the key. Handshake messages have a
fixed length and every connection has a deadline. Connections are awaited concurrently, so a silent peer delays no
other. After the handshake each end sends frames: the body's length (4 bytes, little-endian), then the body. A reader
rejects bodies longer than its limit. Bodies are bytes; callers choose the encoding.

Threads use `connect_proven` and `accept_proven`, which return a blocking `Channel`. Event loops use `prove_connecting`,
`prove_listening`, `read_frame` and `framed` on asyncio streams. Both kinds of ends can talk to each other.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import secrets
import select
import selectors
import socket
import struct
import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Self

KEY_BYTES = 32
NONCE_BYTES = PROOF_BYTES = 32
HANDSHAKE_S = 10.0
"""Maximum time for an accepted connection to prove its key."""
PAUSE_S = 0.01
"""Delay before reconnecting after the listener drops a connection."""
MAX_UNPROVEN = 64
"""Maximum number of open unproven connections; a further one closes the oldest."""
LENGTH_BYTES = 4
MAX_FRAME_BYTES = (1 << 8 * LENGTH_BYTES) - 1
"""Maximum body length that the length field can hold; readers may accept less."""

Address = tuple[str, int]


class UnprovenError(PermissionError):
    """The other end does not know the key."""


class Channel:
    """A proven connection for threads: two threads may send and receive at once. It closes with its last reference."""

    def __init__(self, connection: socket.socket, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._connection, self._max_frame_bytes = connection, max_frame_bytes
        # Unlike `__del__`, a finalizer never runs after the socket's own finalizer, which would warn.
        weakref.finalize(self, connection.close).atexit = False
        # Without TCP_NODELAY the end of a long frame waits until its beginning is acknowledged.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """Return the file descriptor, -1 once the channel is closed."""
        return self._connection.fileno()

    def limit_silence(self, timeout_s: float) -> None:
        """Make `send` and `receive` raise BlockingIOError if nothing moves for `timeout_s`."""
        seconds = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1_000_000))
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)

    def send(self, *bodies: bytes | memoryview) -> None:
        """Send each body as a frame. Raises OSError if the connection is lost."""
        views = [memoryview(body).cast("B") for body in bodies]
        parts = [part for view in views for part in (_length_of(view), view)]
        if len(bodies) > 1:
            parts = [b"".join(parts)]
        num_sent = self._connection.sendmsg(parts)
        for part in parts:
            if num_sent < len(part):
                self._connection.sendall(memoryview(part)[num_sent:])
            num_sent = max(0, num_sent - len(part))

    def receive(self) -> bytes:
        """Return the next body. Raises EOFError if the other end has closed, OSError if the connection is lost."""
        length = _accepted_length(self._read(LENGTH_BYTES), max_frame_bytes=self._max_frame_bytes)
        return self._read(length)

    def shutdown(self) -> None:
        """End pending and later sends and receives of all threads."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. May be called twice."""
        self._connection.close()

    def _read(self, num_bytes: int) -> bytes:
        received = self._connection.recv(num_bytes, socket.MSG_WAITALL)
        while len(received) < num_bytes:
            part = self._connection.recv(num_bytes - len(received), socket.MSG_WAITALL)
            if not part:
                raise EOFError("the other end has closed")
            received += part
        return received


def connect_proven(address: Address, *, key: bytes, deadline: float, max_frame_bytes: int = MAX_FRAME_BYTES) -> Channel:
    """Connect to a listener that knows `key`; retry if the listener dropped the connection.

    Raises OSError if it cannot connect, TimeoutError after the `deadline`, UnprovenError if the listener's proof is
    wrong.
    """
    while True:
        with ExitStack() as undo:
            connection = undo.enter_context(socket.create_connection(address, timeout=_seconds_until(deadline)))
            with suppress(ConnectionError, EOFError):
                _prove(connection, key=key, deadline=deadline)
                connection.settimeout(None)
                channel = Channel(connection, max_frame_bytes=max_frame_bytes)
                undo.pop_all()
                return channel
        time.sleep(min(PAUSE_S, _seconds_until(deadline)))


def accept_proven(
    listener: socket.socket, *, key: bytes, timeout_s: float, max_frame_bytes: int = MAX_FRAME_BYTES
) -> Channel:
    """Return the first connection that proves the key and close all others. Raises TimeoutError or OSError."""
    waiting = _Waiting(listener, key)
    try:
        connection = waiting.first(deadline=time.monotonic() + timeout_s)
    finally:
        waiting.close()
    return Channel(connection, max_frame_bytes=max_frame_bytes)


def wait_readable(channels: Sequence[Channel], *, timeout_s: float) -> list[Channel]:
    """Return the channels that are readable or closed as soon as any is; an empty list after `timeout_s`."""
    if closed := [channel for channel in channels if channel.fileno() < 0]:
        return closed
    poll = select.poll()
    by_descriptor = {channel.fileno(): channel for channel in channels}
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    return [by_descriptor[descriptor] for descriptor, _ in poll.poll(math.ceil(1000 * max(0.0, timeout_s)))]


async def prove_listening(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, key: bytes) -> None:
    """Verify the connecting end's proof and answer with this end's. Raises OSError, EOFError or TimeoutError."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    writer.write(nonce)
    async with asyncio.timeout(HANDSHAKE_S):
        received = await reader.readexactly(NONCE_BYTES + PROOF_BYTES)
    writer.write(_proof_in_return(key, nonce, received=received))


async def prove_connecting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, key: bytes) -> None:
    """Prove the key to a listener and verify its proof. Raises OSError, EOFError or TimeoutError."""
    async with asyncio.timeout(HANDSHAKE_S):
        nonces = await reader.readexactly(NONCE_BYTES) + secrets.token_bytes(NONCE_BYTES)
        writer.write(_proof_at_first(key, nonces))
        proof = await reader.readexactly(PROOF_BYTES)
    _check_proof(proof, key, role=b"listening", nonces=nonces)


async def read_frame(reader: asyncio.StreamReader, *, max_frame_bytes: int = MAX_FRAME_BYTES) -> bytes:
    """Return the next body. Raises EOFError if the other end has closed, OSError if the connection is lost."""
    length = _accepted_length(await reader.readexactly(LENGTH_BYTES), max_frame_bytes=max_frame_bytes)
    return await reader.readexactly(length)


def framed(body: bytes) -> bytes:
    """Return the body preceded by its length."""
    return _length_of(body) + body


def _length_of(body: bytes | memoryview) -> bytes:
    if len(body) > MAX_FRAME_BYTES:
        raise ConnectionError(f"a frame of {len(body)} bytes is too long")
    return len(body).to_bytes(LENGTH_BYTES, "little")


def _accepted_length(header: bytes, *, max_frame_bytes: int) -> int:
    length = int.from_bytes(header, "little")
    if length > max_frame_bytes:
        raise ConnectionError(f"a frame of {length} bytes is too long")
    return length


@dataclass
class _Unproven:
    """Handshake state of an accepted connection."""

    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))
    """Sent to the peer."""
    received: bytes = b""
    """Received from the peer until now."""
    deadline: float = field(default_factory=lambda: time.monotonic() + HANDSHAKE_S)


class _Waiting:
    """The unproven connections of a listener, oldest first."""

    def __init__(self, listener: socket.socket, key: bytes) -> None:
        self._listener, self._key = listener, key
        self._unproven: dict[socket.socket, _Unproven] = {}
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def first(self, *, deadline: float) -> socket.socket:
        """Return the first connection that proves the key, in blocking mode. Raises TimeoutError."""
        while (now := time.monotonic()) < deadline:
            for late in [peer for peer, state in self._unproven.items() if state.deadline <= now]:
                self._drop(late)
            until = min([deadline, *(state.deadline for state in self._unproven.values())])
            for event, _ in self._selector.select(until - now):
                ready = event.fileobj
                assert isinstance(ready, socket.socket)
                if ready is self._listener:
                    self._accept()
                elif ready in self._unproven and self._proves(ready):
                    return ready
        raise TimeoutError("no peer that knows the key has connected")

    def close(self) -> None:
        for peer in list(self._unproven):
            self._drop(peer)
        self._selector.close()

    def _accept(self) -> None:
        with suppress(OSError):
            peer, _ = self._listener.accept()
            if len(self._unproven) >= MAX_UNPROVEN:
                self._drop(next(iter(self._unproven)))
            peer.setblocking(False)
            self._unproven[peer] = state = _Unproven()
            self._selector.register(peer, selectors.EVENT_READ)
            try:
                peer.sendall(state.nonce)
            except OSError:
                self._drop(peer)

    def _proves(self, peer: socket.socket) -> bool:
        """Receive from a peer. Return True once its proof is complete and answered; drop the peer if the proof is
        wrong.
        """
        state = self._unproven[peer]
        try:
            received = peer.recv(NONCE_BYTES + PROOF_BYTES - len(state.received))
            if not received:
                raise EOFError
            state.received += received
            if len(state.received) < NONCE_BYTES + PROOF_BYTES:
                return False
            peer.sendall(_proof_in_return(self._key, state.nonce, received=state.received))
        except BlockingIOError:
            return False
        except (OSError, EOFError):
            self._drop(peer)
            return False
        del self._unproven[peer]
        self._selector.unregister(peer)
        peer.setblocking(True)
        return True

    def _drop(self, peer: socket.socket) -> None:
        del self._unproven[peer]
        self._selector.unregister(peer)
        peer.close()


def _prove(connection: socket.socket, *, key: bytes, deadline: float) -> None:
    nonces = _receive(connection, NONCE_BYTES, deadline=deadline) + secrets.token_bytes(NONCE_BYTES)
    connection.settimeout(_seconds_until(deadline))
    connection.sendall(_proof_at_first(key, nonces))
    proof = _receive(connection, PROOF_BYTES, deadline=deadline)
    _check_proof(proof, key, role=b"listening", nonces=nonces)


def _receive(connection: socket.socket, length: int, *, deadline: float) -> bytes:
    received = b""
    while len(received) < length:
        connection.settimeout(_seconds_until(deadline))
        part = connection.recv(length - len(received))
        if not part:
            raise EOFError("the other end has closed")
        received += part
    return received


def _seconds_until(deadline: float) -> float:
    """Return the seconds until the deadline. Raises TimeoutError if it has passed."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the handshake did not finish in time")
    return left


def _proof_at_first(key: bytes, nonces: bytes) -> bytes:
    """Return the connecting end's message: its nonce (the second nonce), then its proof."""
    return nonces[NONCE_BYTES:] + _proof_of(key, b"connecting", nonces=nonces)


def _proof_in_return(key: bytes, nonce: bytes, *, received: bytes) -> bytes:
    """Return the listening end's proof, given the connecting end's message. Raises UnprovenError if that is wrong."""
    nonces = nonce + received[:NONCE_BYTES]
    _check_proof(received[NONCE_BYTES:], key, role=b"connecting", nonces=nonces)
    return _proof_of(key, b"listening", nonces=nonces)


def _check_proof(proof: bytes, key: bytes, *, role: bytes, nonces: bytes) -> None:
    if not hmac.compare_digest(proof, _proof_of(key, role, nonces=nonces)):
        raise UnprovenError(f"the {role.decode()} end does not know the key")


def _proof_of(key: bytes, role: bytes, *, nonces: bytes) -> bytes:
    """Return an end's proof: an HMAC of its role and of both nonces (listening end's first)."""
    return hmac.digest(key, role + nonces, "sha256")
