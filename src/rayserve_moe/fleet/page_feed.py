"""A replica's page feed: a thread that sends page events and load reports to its readers, and the messages.

No step waits for it: the engine's thread only queues changes, and a reader that does not keep up is disconnected.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from contextlib import suppress
from typing import Any

import msgpack

from rayserve_moe.cluster.channel import framed, prove_listening, read_frame
from rayserve_moe.engine.admission import Capacity
from rayserve_moe.engine.page_watch import PageWatch
from rayserve_moe.fleet.load_average import Load, LoadAverage, Report
from rayserve_moe.fleet.page_log import PageLog, PageMessage
from rayserve_moe.scheduling.page_events import PageEvents

log = logging.getLogger(__name__)
METADATA = "page_events"
"""Key of the feed's address in a replica's metadata."""
IS_PREFILL = "is_prefill"
"""Key, beside the address, of a replica that answers no requests as long as others do."""
REPORT_S = 0.1
"""Interval of load samples; readers receive only reports that differ."""
MAX_UNSENT = 1024
"""Maximum number of messages that wait for a reader."""
MAX_FRAME_BYTES = 1 << 24
_AT_ONCE = 64
"""Page changes that are processed before other threads of the process may run."""
_START_S = 10.0
_CLOSING_S = 0.01


class PageFeed:
    """Publishes the prefix cache of an engine until `stop`. `address` is the entry for the replica's metadata."""

    def __init__(self, pages: PageWatch, capacity: Capacity, *, host: str, key: bytes) -> None:
        self._pages, self._capacity, self._key = pages, capacity, key
        self._log = PageLog(
            key, num_data_ranks=pages.num_data_ranks, num_pages=pages.num_pages, page_size=pages.page_size
        )
        self._events = PageEvents(self._wake)
        self._unsent: dict[asyncio.Queue[bytes], asyncio.StreamWriter] = {}
        self._loop = asyncio.new_event_loop()
        self._host, self._port = host, 0
        self._is_listening = threading.Event()
        self._average, self._reported = LoadAverage(time.monotonic()), Report()
        self._thread = threading.Thread(target=self._run, name="page-events", daemon=True)
        self._thread.start()
        self._is_listening.wait(_START_S)
        pages.start(self._events)

    @property
    def address(self) -> dict[str, Any]:
        sizes = {"page_size": self._pages.page_size, "max_requests": self._capacity.max_live}
        return {METADATA: {"host": self._host, "port": self._port, **sizes}}

    def stop(self) -> None:
        """Disconnect all readers and end the thread. May be called twice."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, self._host, 0))
        self._port = server.sockets[0].getsockname()[1]
        self._loop.call_soon(self._report)
        self._is_listening.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(_CLOSING_S))
        self._loop.close()

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._publish)

    def _publish(self) -> None:
        """Encode and send waiting changes, a slice at a time."""
        changes = self._events.take(_AT_ONCE)
        if self._events.is_overrun:
            log.error("the queue of page events has overflowed: requests are routed to this replica by load alone")
            self._loop.stop()
        elif changes:
            self._send(self._log.publish(changes))
            self._loop.call_soon(self._publish)

    def _report(self) -> None:
        self._loop.call_later(REPORT_S, self._report)
        load = self._average.add(Load(*self._pages.load()), time.monotonic())
        rounded = Load(round(load.num_choices, 1), round(load.queued_tokens))
        report = Report(rounded, len(self._capacity.live))
        if report != self._reported:
            self._reported = report
            self._send(report)

    def _send(self, message: PageMessage | Report) -> None:
        frame = _frame(message) if self._unsent else b""
        for unsent, writer in list(self._unsent.items()):
            unsent.put_nowait(frame)
            if unsent.qsize() > MAX_UNSENT:
                del self._unsent[unsent]
                writer.transport.abort()  # pending writes to this reader fail and end its task

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send a reader a snapshot, then all later messages."""
        unsent: asyncio.Queue[bytes] = asyncio.Queue()
        try:
            await prove_listening(reader, writer, key=self._key)
            snapshot = self._log.snapshot()
            self._unsent[unsent] = writer
            unsent.put_nowait(_frame(self._reported))
            for part in snapshot:
                writer.write(_frame(part))
                await writer.drain()
            while unsent in self._unsent:
                writer.write(await unsent.get())
                await writer.drain()
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):
            log.debug("a reader of page events has disconnected")
        finally:
            self._unsent.pop(unsent, None)
            writer.transport.abort()


async def read_message(reader: asyncio.StreamReader) -> PageMessage | Report:
    """Return the next message of a feed. Raises EOFError if the connection has ended, OSError if it is lost."""
    body = await read_frame(reader, max_frame_bytes=MAX_FRAME_BYTES)
    fields = msgpack.unpackb(body, raw=False, strict_map_key=False)
    if len(fields) == len(Report._fields):
        load, num_requests = fields
        return Report(Load(*load), num_requests)
    epoch, first, num_to_come, events = fields
    return PageMessage(epoch, first, num_to_come, tuple((kind, rank, body) for kind, rank, body in events))


def _frame(message: PageMessage | Report) -> bytes:
    return framed(msgpack.packb(list(message), use_bin_type=True))
