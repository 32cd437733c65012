"""Channels: frames arrive as they were sent between threads and event loops, and a broken or false end is noticed."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from rayserve_moe.cluster.channel import (
    LENGTH_BYTES,
    Channel,
    UnprovenError,
    accept_proven,
    connect_proven,
    framed,
    prove_connecting,
    prove_listening,
    read_frame,
    wait_readable,
)

HOST, KEY = "127.0.0.1", b"k" * 32
BODIES = [b"", b"x", b"y" * 5000, b"z" * (16 << 20)]
"""The last one is more than the buffers of a connection hold."""


@contextmanager
def served(serve: Callable[[Channel], object], *, max_frame_bytes: int = 1 << 30) -> Iterator[tuple[str, int]]:
    """The address at which a thread accepts one channel and serves it."""

    def run() -> None:
        with accept_proven(listener, key=KEY, timeout_s=30.0, max_frame_bytes=max_frame_bytes) as channel:
            serve(channel)

    with socket.create_server((HOST, 0)) as listener:
        serving = threading.Thread(target=run)
        serving.start()
        yield listener.getsockname()
        serving.join()


def connected(address: tuple[str, int], *, max_frame_bytes: int = 1 << 30) -> Channel:
    return connect_proven(address, key=KEY, deadline=time.monotonic() + 30.0, max_frame_bytes=max_frame_bytes)


def test_bodies_of_wide_numbers_are_framed_by_their_bytes() -> None:
    numbers = array("i", range(10))
    with served(lambda channel: channel.send(memoryview(numbers), b"next")) as address, connected(address) as channel:
        assert channel.receive() == numbers.tobytes() and channel.receive() == b"next"


def test_a_channel_that_this_end_has_closed_counts_as_closed() -> None:
    with served(expect_end) as address:
        channel = connected(address)
        channel.close()
        assert wait_readable([channel], timeout_s=30.0) == [channel]


def expect_end(channel: Channel) -> None:
    with pytest.raises(EOFError):
        channel.receive()


def echo(channel: Channel) -> None:
    for _ in BODIES:
        channel.send(channel.receive())


def test_frames_come_back_one_by_one_and_together():
    with served(echo) as address, connected(address) as channel:
        for body in BODIES:
            channel.send(body)
            assert channel.receive() == body
    with served(lambda channel: channel.send(*BODIES)) as address, connected(address) as channel:
        assert [channel.receive() for _ in BODIES] == BODIES


def test_an_event_loop_connects_to_a_thread():
    async def exchange(address: tuple[str, int]) -> list[bytes]:
        reader, writer = await asyncio.open_connection(*address)
        await prove_connecting(reader, writer, key=KEY)
        received = []
        for body in BODIES:
            writer.write(framed(body))
            received.append(await read_frame(reader))
        writer.close()
        return received

    with served(echo) as address:
        assert asyncio.run(exchange(address)) == BODIES


def test_a_thread_connects_to_an_event_loop():
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await prove_listening(reader, writer, key=KEY)
        for _ in BODIES:
            writer.write(framed(await read_frame(reader)))
        await writer.drain()
        writer.close()

    def exchange(address: tuple[str, int]) -> list[bytes]:
        received = []
        with connected(address) as channel:
            for body in BODIES:
                channel.send(body)
                received.append(channel.receive())
        return received

    async def run() -> list[bytes]:
        server = await asyncio.start_server(serve, HOST, 0)
        async with server:
            return await asyncio.to_thread(exchange, server.sockets[0].getsockname())

    assert asyncio.run(run()) == BODIES


def test_an_event_loop_refuses_a_peer_without_the_key():
    async def run() -> None:
        listening: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await prove_listening(reader, writer, key=KEY)
            except UnprovenError as error:
                listening.set_exception(error)
            writer.close()

        server = await asyncio.start_server(serve, HOST, 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            with pytest.raises(EOFError):
                await prove_connecting(reader, writer, key=b"x" * 32)
            with pytest.raises(UnprovenError, match="the connecting end does not know the key"):
                await listening
            writer.close()

    asyncio.run(run())


def test_a_frame_beyond_the_bound_of_its_reader_ends_the_connection():
    with (
        served(lambda channel: channel.send(b"x" * 11)) as address,
        connected(address, max_frame_bytes=10) as channel,
        pytest.raises(ConnectionError, match="a frame of 11 bytes is too long"),
    ):
        channel.receive()

    async def read() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(framed(b"x" * 11))
        with pytest.raises(ConnectionError, match="a frame of 11 bytes is too long"):
            await read_frame(reader, max_frame_bytes=10)

    asyncio.run(read())


@pytest.mark.parametrize("num_bytes", [0, LENGTH_BYTES - 1, LENGTH_BYTES + 2])
def test_a_connection_that_ends_within_a_frame_is_noticed(num_bytes: int):
    with socket.create_server((HOST, 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    with other:
        other.sendall(framed(b"whole")[:num_bytes])
    with Channel(ours) as channel, pytest.raises(EOFError):
        channel.receive()


def test_silence_ends_a_read_after_its_time():
    done = threading.Event()
    with served(lambda _: done.wait(30.0)) as address, connected(address) as channel:
        channel.limit_silence(0.1)
        assert wait_readable([channel], timeout_s=0.0) == []
        with pytest.raises(BlockingIOError):
            channel.receive()
        done.set()


def test_shutdown_ends_a_read_of_another_thread():
    done = threading.Event()
    with served(lambda _: done.wait(30.0)) as address, connected(address) as channel:
        threading.Timer(0.05, channel.shutdown).start()
        with pytest.raises(EOFError):
            channel.receive()
        done.set()


def test_a_channel_within_a_cycle_is_closed_with_it():
    """Warnings are errors: the socket is closed before it is collected."""
    with served(expect_end) as address:
        cycle: list[object] = [connected(address)]
        cycle.append(cycle)
        del cycle
        gc.collect(1)  # young objects only
