"""The connection of a replica to the journal: two threads, one that connects and sends, one that receives."""

from __future__ import annotations

import logging
import socket
import threading
import time
from contextlib import suppress
from typing import Any, Protocol

from rayserve_moe.cluster.handshake import connect_proven
from rayserve_moe.fleet.journal_wire import LENGTH_BYTES, framed, length_in, message_in

log = logging.getLogger(__name__)
_RETRY_S = 0.1
_CONNECT_S = 1.0


class Outbox(Protocol):
    """What is sent and received (`journal_client.JournalClient`)."""

    def greet(self, name: str) -> list[Any]: ...
    def next_messages(self) -> list[list[Any]] | None: ...
    def take(self, message: list[Any]) -> None: ...
    def note_loss(self) -> None: ...
    def go_without(self) -> None: ...


class JournalLink:
    """Connects, again after every loss, until `stop`. After `wait_s` without success the outbox goes without."""

    def __init__(self, outbox: Outbox, address: tuple[str, int], *, key: bytes, wait_s: float) -> None:
        self._outbox, self._address, self._key = outbox, address, key
        self.wait_s = wait_s
        self._stopped = threading.Event()
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close the connection and end the threads."""
        self._stopped.set()
        self._disconnect()
        self._thread.join()

    def _run(self) -> None:
        lost_at = time.monotonic()
        while not self._stopped.is_set():
            was_connected = self._serve_once()
            if self._stopped.is_set():
                break  # nothing is lost
            if was_connected:
                lost_at = time.monotonic()
                log.warning("the journal is lost: tokens wait for another")
            if time.monotonic() - lost_at >= self.wait_s:
                self._outbox.go_without()
            self._stopped.wait(_RETRY_S)

    def _serve_once(self) -> bool:
        """Connect, and send until the connection is lost; whether there was one."""
        try:
            connection = connect_proven(self._address, key=self._key, deadline=time.monotonic() + _CONNECT_S)
        except (OSError, EOFError):
            return False
        with connection:
            self._connection = connection
            if self._stopped.is_set():  # after `stop` has closed the one before
                return False
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            receiving = threading.Thread(target=self._receive, args=(connection,), name="journal-in", daemon=True)
            with suppress(OSError, EOFError):
                _, name = _read_message(connection)
                greeting = self._outbox.greet(name)
                receiving.start()
                connection.sendall(framed(greeting))
                while (messages := self._outbox.next_messages()) is not None:
                    connection.sendall(b"".join(map(framed, messages)))
            self._disconnect()
            if receiving.ident is not None:
                receiving.join()
        return True

    def _receive(self, connection: socket.socket) -> None:
        try:
            with suppress(OSError, EOFError):
                while True:
                    self._outbox.take(_read_message(connection))
        finally:
            self._outbox.note_loss()

    def _disconnect(self) -> None:
        self._outbox.note_loss()
        if (connection := self._connection) is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _read_message(connection: socket.socket) -> list[Any]:
    return message_in(_read(connection, length_in(_read(connection, LENGTH_BYTES))))


def _read(connection: socket.socket, length: int) -> bytes:
    parts, num_read = bytearray(length), 0
    view = memoryview(parts)
    while num_read < length:
        count = connection.recv_into(view[num_read:])
        if not count:
            raise EOFError("the journal has closed the connection")
        num_read += count
    return bytes(parts)
