"""The journal: a process that outlives replicas, and keeps what they have asked for and committed.

    python -m rayserve_moe.fleet.journal --host H --port P --max-bytes N --ttl-s S

Replicas prove that they know the key, RAYSERVE_MOE_JOURNAL_KEY in the environment of both.

It knows no model, no Ray and no HTTP; records are bytes to it. It keeps all in memory: its end loses them, and replicas
bring those back that still run.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rayserve_moe.cluster.channel import framed, prove_listening, read_frame
from rayserve_moe.config.load import environment_setting
from rayserve_moe.fleet.journal_table import Fence, JournalTable
from rayserve_moe.fleet.journal_wire import (
    CLOSE,
    COMMIT,
    MAX_FRAME_BYTES,
    OPEN,
    TAKE_OVER,
    UNASKED,
    message_in,
    packed,
)

log = logging.getLogger(__name__)
EXPIRE_S = 1.0
MOST_UNREAD_BYTES = 64 << 20
"""Answers that wait for one replica; beyond that it is not listened to, and cut off after `READ_S`."""
READ_S = 30.0


class Journal:
    """Serves a table over TCP to whoever proves that it knows `key`; `serve` in an event loop."""

    def __init__(self, table: JournalTable, *, key: bytes) -> None:
        self.table, self._key = table, key
        self._name = secrets.token_hex(8)
        self._writers: set[asyncio.StreamWriter] = set()

    async def serve(self, host: str, port: int) -> asyncio.Server:
        """Listen; returns the server. OSError where the port is taken."""
        server = await asyncio.start_server(self._answer, host, port)
        self._expiring = asyncio.create_task(self._expire())
        return server

    async def _expire(self) -> None:
        sent: list[int] = []
        while True:
            await asyncio.sleep(EXPIRE_S)
            self.table.expire()
            if sent != (sent := self._totals):  # for replicas that write nothing
                for writer in self._writers:
                    writer.write(framed(packed([UNASKED, [], [], sent])))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await prove_listening(reader, writer, key=self._key)
            writer.write(framed(packed([UNASKED, self._name])))
            self._writers.add(writer)
            while True:
                message = message_in(await read_frame(reader, max_frame_bytes=MAX_FRAME_BYTES))
                reply = self._kept(message, writer) if len(message) == 2 else self._found(message, writer)
                writer.write(framed(packed(reply)))
                if writer.transport.get_write_buffer_size() > MOST_UNREAD_BYTES:
                    await asyncio.wait_for(writer.drain(), READ_S)
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):
            log.info("a replica has gone")
        finally:
            self._writers.discard(writer)
            self.table.lose(writer)
            writer.transport.abort()

    @property
    def _totals(self) -> list[int]:
        return [len(self.table), self.table.num_bytes, self.table.num_dropped]

    def _kept(self, message: list[Any], owner: asyncio.StreamWriter) -> list[Any]:
        number, operations = message
        fenced, dropped = [], []
        for kind, identity, term, epoch, records in operations:
            fence = Fence(term, epoch)
            is_kept: bool | None = True
            if kind == OPEN:
                is_kept = self.table.open(identity, fence, records=records, owner=owner)
            elif kind == COMMIT:
                is_kept = self.table.commit(identity, fence, records=records)
            elif kind == CLOSE:
                self.table.close(identity, fence)
            if is_kept is None:
                fenced.append([identity, *fence])
            elif not is_kept:
                dropped.append([identity, *fence])
        return [number, fenced, dropped, self._totals]

    def _found(self, message: list[Any], owner: asyncio.StreamWriter) -> list[Any]:
        number, kind, identity, epoch = message
        if kind == TAKE_OVER:
            taken = self.table.take_over(identity, epoch, owner=owner)
            if taken is None:
                return [number, None, []]
            entry, before, fence = taken
            if isinstance(before, asyncio.StreamWriter) and before is not owner:
                before.write(framed(packed([UNASKED, [[identity, *fence]], [], self._totals])))
        elif (found := self.table.read(identity)) is None:
            return [number, None, []]
        else:
            entry = found
        return [number, list(entry.fence), entry.records]


async def run(host: str, port: int, *, table: JournalTable, key: bytes) -> None:
    """Serve until the task is cancelled."""
    server = await Journal(table, key=key).serve(host, port)
    async with server:
        await server.serve_forever()


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until a signal ends the process."""
    parser = argparse.ArgumentParser(prog="python -m rayserve_moe.fleet.journal", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-bytes", type=int, default=1 << 30)
    parser.add_argument("--ttl-s", type=float, default=120.0)
    given = parser.parse_args(arguments)
    table = JournalTable(max_bytes=given.max_bytes, ttl_s=given.ttl_s)
    if not (key := environment_setting("journal_key")):
        parser.error("RAYSERVE_MOE_JOURNAL_KEY is not set: anyone could read and write what is kept")
    with suppress(KeyboardInterrupt):
        asyncio.run(run(given.host, given.port, table=table, key=key.encode()))


if __name__ == "__main__":
    main()
