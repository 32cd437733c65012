"""A journal in a thread of this process, which can be ended and started again on its port."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

from rayserve_moe.fleet.journal import Journal, JournalTable
from rayserve_moe.fleet.journal_client import JournalClient

KEY = b"of the tests"


class OwnJournal:
    """Runs until `end`; `table` is what it keeps."""

    def __init__(self, *, max_bytes: int = 1 << 26, ttl_s: float = 600.0) -> None:
        self._sizes = {"max_bytes": max_bytes, "ttl_s": ttl_s}
        self.port = 0
        self.start()

    def start(self) -> None:
        """Begin an empty one."""
        self.table = JournalTable(max_bytes=int(self._sizes["max_bytes"]), ttl_s=self._sizes["ttl_s"])
        self._loop = asyncio.new_event_loop()
        is_listening = threading.Event()

        async def serve() -> asyncio.Server:
            server = await Journal(self.table, key=KEY).serve("127.0.0.1", self.port)
            self.port = server.sockets[0].getsockname()[1]
            is_listening.set()
            return server

        def run() -> None:
            server = self._loop.run_until_complete(serve())
            self._loop.run_forever()
            server.close()
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
            with suppress(asyncio.CancelledError):
                self._loop.run_until_complete(asyncio.sleep(0.01))
            self._loop.close()

        self._thread = threading.Thread(target=run)
        self._thread.start()
        assert is_listening.wait(10)

    def end(self) -> None:
        """Lose it, with all connections."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def client(self, epoch: int, *, wait_s: float = 5.0) -> JournalClient:
        """Return a replica's connection."""
        return JournalClient(("127.0.0.1", self.port), key=KEY, epoch=epoch, wait_s=wait_s)
