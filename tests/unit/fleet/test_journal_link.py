"""A journal client closes at any time, and reconnects to a restarted journal."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from rayserve_moe.fleet import journal_client
from rayserve_moe.fleet.journal_client import JournalClient
from rayserve_moe.fleet.journal_records import AskedRequest
from tests.support.cluster.ports import free_port
from tests.support.serving.http_client import wait_until
from tests.support.serving.journal_server import KEY, OwnJournal

WITHIN_S = 60.0
ASKED = AskedRequest(
    "/generate", b"{}", "", "", prompts=(b"\0\0\0\0",), seeds=(0,), choices=(1,), weight_version="0", adapters=("",)
)
COMMAND = [sys.executable, "-m", "rayserve_moe.fleet.journal", "--host", "127.0.0.1", "--port"]
"""Command line of a journal on Kubernetes or on several machines, where the user starts it."""


@contextlib.contextmanager
def process_at(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a journal by its command; it is killed at the end."""
    environment = os.environ | {"RAYSERVE_MOE_JOURNAL_KEY": KEY.decode()}
    with subprocess.Popen([*COMMAND, str(port)], env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def journal():
    journal = OwnJournal()
    yield journal
    journal.end()


def test_it_stops_while_it_connects(journal, monkeypatch):
    """It waits for the journal's proof when it is stopped, and is connected later."""
    is_connecting, may_connect = threading.Event(), threading.Event()
    connect = journal_client.connect_proven

    def connect_late(*address, **how):
        is_connecting.set()
        assert may_connect.wait(WITHIN_S)
        return connect(*address, **how)

    monkeypatch.setattr(journal_client, "connect_proven", connect_late)
    client = journal.client(1)
    assert is_connecting.wait(WITHIN_S)
    stopping = threading.Thread(target=client.link.stop, daemon=True)
    stopping.start()
    assert client.link._stopped.wait(WITHIN_S)
    may_connect.set()
    stopping.join(WITHIN_S)
    assert not stopping.is_alive()


def test_one_that_is_stopped_does_not_say_that_the_journal_is_lost(journal, caplog):
    client = journal.client(1, wait_s=0.0)
    with caplog.at_level(logging.WARNING):
        wait_until(lambda: client.is_up)
        caplog.clear()  # it may have gone without one before the first connection
        client.link.stop()
    assert not caplog.records


def test_a_replica_that_writes_nothing_knows_what_the_journal_keeps(journal):
    clients = [journal.client(epoch) for epoch in (1, 2)]
    wait_until(lambda: all(client.is_up for client in clients))
    clients[0].open(b"x" * 16, ASKED)
    wait_until(lambda: clients[1].statistics()["entries"] == 1)
    for client in clients:
        client.link.stop()


def test_a_journal_that_is_started_by_hand_needs_a_key():
    environment = {name: value for name, value in os.environ.items() if name != "RAYSERVE_MOE_JOURNAL_KEY"}
    ended = subprocess.run(
        [*COMMAND, "1"], check=False, env=environment, capture_output=True, text=True, timeout=WITHIN_S
    )
    assert ended.returncode == 2 and "RAYSERVE_MOE_JOURNAL_KEY is not set" in ended.stderr


def test_a_replaced_journal_learns_the_running_requests():
    """Without a standby the replica reports no journal until a new one listens at the same address."""
    port = free_port()
    client = JournalClient(("127.0.0.1", port), key=KEY, epoch=1)
    try:
        with process_at(port):
            wait_until(lambda: client.is_up, within_s=WITHIN_S)
            client.open(b"x" * 16, ASKED)
            wait_until(lambda: client.statistics()["entries"] == 1, within_s=WITHIN_S)
        wait_until(lambda: not client.is_up, within_s=WITHIN_S)
        with process_at(port):
            wait_until(lambda: client.is_up and client.statistics()["entries"] == 1, within_s=WITHIN_S)
            found = client.ask(b"x" * 16).result(WITHIN_S)
            assert found is not None and list(found.records) == [ASKED.packed()]
    finally:
        client.link.stop()
