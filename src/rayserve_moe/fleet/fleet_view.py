"""What one router knows of its fleet: connections to the page feeds of all replicas, the index, the choice."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rayserve_moe.fleet.choosing import Choosing, Prompt
from rayserve_moe.fleet.load_average import Report
from rayserve_moe.fleet.page_feed import METADATA
from rayserve_moe.fleet.page_wire import prove_connecting, read_frame
from rayserve_moe.fleet.prefix_index import PrefixIndex

log = logging.getLogger(__name__)
RETRY_S = 0.5
"""From the end of a connection to the next one."""


class FleetView:
    """Follows the replicas that `choose` is given; call it, and everything else, on one event loop."""

    def __init__(self, key: bytes, *, draw: random.Random) -> None:
        self._key = key
        self.index = PrefixIndex()
        self.choosing = Choosing(self.index, draw=draw, clock=time.monotonic)
        self._readers: dict[str, asyncio.Task[None]] = {}
        self.page_size = 0

    def follow(self, replicas: Mapping[str, Mapping[str, Any]]) -> None:
        """Connect to the feeds of these replicas, by their metadata, and forget all others."""
        if replicas.keys() == self._readers.keys():
            return
        for gone in self._readers.keys() - replicas.keys():
            self._readers.pop(gone).cancel()
            self.choosing.forget(gone)
        self.index.follow(replicas.keys())
        for name in replicas.keys() - self._readers.keys():
            address = replicas[name].get(METADATA) or {}
            self.page_size = address.get("page_size", self.page_size)
            self.choosing.places.limit(name, address.get("most_requests"))
            self._readers[name] = asyncio.get_running_loop().create_task(self._read(name, address))

    def choose(self, prompt: Prompt, replicas: Mapping[str, Mapping[str, Any]]) -> str:
        """Return the id of one of the replicas, of which there are some, by their metadata; never raises for others."""
        self.follow(replicas)
        return self.choosing.choose(prompt, list(replicas))

    def close(self) -> None:
        """End all connections."""
        self.follow({})

    async def _read(self, replica_id: str, address: Mapping[str, Any]) -> None:
        """Connect, and again whenever the connection ends; without an address the replica counts as empty."""
        while address:
            with suppress(OSError, EOFError, TimeoutError, ValueError, TypeError):
                await self._read_once(replica_id, address["host"], address["port"])
            self.index.lose(replica_id)
            self.choosing.places.lose(replica_id)
            await asyncio.sleep(RETRY_S)

    async def _read_once(self, replica_id: str, host: str, port: int) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        try:
            await prove_connecting(reader, writer, key=self._key)
            while True:
                message = await read_frame(reader)
                if isinstance(message, Report):
                    self.choosing.report(replica_id, message)
                elif not self.index.apply(replica_id, message):
                    return  # the next connection begins with a snapshot
                await asyncio.sleep(0)  # requests are routed between two parts of a snapshot
        finally:
            writer.transport.abort()
