"""Both ends of a connection prove that they know one key, before either reads anything else that the other sends.

    listening end -> NONCE
                  <- NONCE, proof of both nonces
    proof of both ->

Every message has a fixed length and every connection a deadline; connections are awaited side by side, so a silent one
delays no other.
"""

from __future__ import annotations

import hmac
import secrets
import selectors
import socket
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

NONCE_BYTES = PROOF_BYTES = 32
HANDSHAKE_S = 10.0
"""Longest time that an accepted connection may take to prove its key."""
PAUSE_S = 0.01
"""From being dropped to connecting again."""
MOST_UNPROVEN = 64
"""Connections without a proof that are kept at once; the oldest gives way to the next."""


@dataclass
class _Unproven:
    """An accepted connection: the nonce it was sent, what it has sent so far, and its deadline."""

    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))
    received: bytes = b""
    deadline: float = field(default_factory=lambda: time.monotonic() + HANDSHAKE_S)


class _Waiting:
    """The unproven connections of a listener, in the order of their arrival."""

    def __init__(self, listener: socket.socket, key: bytes) -> None:
        self._listener, self._key = listener, key
        self._unproven: dict[socket.socket, _Unproven] = {}
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def first(self, *, deadline: float) -> socket.socket:
        """The first connection that proves the key, in blocking mode. TimeoutError where none has by the `deadline`."""
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
            if len(self._unproven) >= MOST_UNPROVEN:
                self._drop(next(iter(self._unproven)))
            peer.setblocking(False)
            self._unproven[peer] = state = _Unproven()
            self._selector.register(peer, selectors.EVENT_READ)
            try:
                peer.sendall(state.nonce)
            except OSError:
                self._drop(peer)

    def _proves(self, peer: socket.socket) -> bool:
        """Receive from a peer; a whole proof is answered, a wrong one drops the peer."""
        state = self._unproven[peer]
        try:
            received = peer.recv(NONCE_BYTES + PROOF_BYTES - len(state.received))
            if not received:
                raise EOFError
            state.received += received
            if len(state.received) < NONCE_BYTES + PROOF_BYTES:
                return False
            nonces, proof = state.nonce + state.received[:NONCE_BYTES], state.received[NONCE_BYTES:]
            if not hmac.compare_digest(proof, proof_of(self._key, b"connecting", nonces=nonces)):
                raise PermissionError
            peer.sendall(proof_of(self._key, b"listening", nonces=nonces))
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


def accept_proven(listener: socket.socket, *, key: bytes, timeout_s: float) -> socket.socket:
    """The first connection that proves that it knows `key`; others are closed. TimeoutError, OSError."""
    waiting = _Waiting(listener, key)
    try:
        return waiting.first(deadline=time.monotonic() + timeout_s)
    finally:
        waiting.close()


def connect_proven(address: tuple[str, int], *, key: bytes, deadline: float) -> socket.socket:
    """Connect to a listener that knows `key`, again where it gave way to others. OSError, TimeoutError."""
    while True:
        with ExitStack() as undo:
            connection = undo.enter_context(socket.create_connection(address, timeout=_seconds_until(deadline)))
            with suppress(ConnectionError, EOFError):
                _prove(connection, key=key, deadline=deadline)
                connection.settimeout(None)
                undo.pop_all()
                return connection
        time.sleep(min(PAUSE_S, _seconds_until(deadline)))


def _prove(connection: socket.socket, *, key: bytes, deadline: float) -> None:
    nonces = _receive(connection, NONCE_BYTES, deadline=deadline) + secrets.token_bytes(NONCE_BYTES)
    connection.settimeout(_seconds_until(deadline))
    connection.sendall(nonces[NONCE_BYTES:] + proof_of(key, b"connecting", nonces=nonces))
    proof = _receive(connection, PROOF_BYTES, deadline=deadline)
    if not hmac.compare_digest(proof, proof_of(key, b"listening", nonces=nonces)):
        raise PermissionError("what listens there does not know the key")


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
    """Seconds until the deadline. TimeoutError where there are none."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no proof has come in time")
    return left


def proof_of(key: bytes, role: bytes, *, nonces: bytes) -> bytes:
    """What one end sends to prove that it knows the key: over the nonces of the listening and the connecting end."""
    return hmac.digest(key, role + nonces, "sha256")
