"""The connection to a journal ends when it is to, whatever it is doing."""

from __future__ import annotations

import logging
import threading

import pytest

from rayserve_moe.fleet import journal_client
from rayserve_moe.fleet.journal_records import AskedRequest
from tests.support.serving.http_client import wait_until
from tests.support.serving.journal_server import OwnJournal

WITHIN_S = 60.0


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
    asked = AskedRequest(
        "/generate", b"{}", "", "", prompts=(b"\0\0\0\0",), seeds=(0,), choices=(1,), weight_version="0", adapters=("",)
    )
    clients[0].open(b"x" * 16, asked)
    wait_until(lambda: clients[1].statistics()["entries"] == 1)
    for client in clients:
        client.link.stop()
