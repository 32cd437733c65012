"""Steps over sockets: what arrives is what was sent, and whatever goes wrong with a host is said, naming it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import numpy as np
import pytest

from rayserve_moe.cluster import channel
from rayserve_moe.cluster.channel import HANDSHAKE_S, MAX_UNPROVEN, Address, accept_proven
from rayserve_moe.cluster.step_transport import HostLostError, Sockets, listen_for_steps
from rayserve_moe.scheduling.step_plan import Chunks, StepPlan, StepResult

HOST, KEY = "127.0.0.1", b"k" * 32
LARGE = 4 * 1024 * 1024
"""Tokens: more bytes than the buffers of a connection hold."""

Execute = Callable[[StepPlan], StepResult | None]


def plan_of(step_id: int, num_tokens: int) -> StepPlan:
    return StepPlan(step_id, Chunks(token_ids=np.arange(num_tokens, dtype=np.int32) + step_id))


def answer_to(plan: StepPlan) -> StepResult:
    """A result that holds all of its plan."""
    ids = plan.chunks.token_ids
    return StepResult(plan.step_id, ids, ids.astype(np.float32), ids >= 0, ids.view(np.uint8).reshape(-1, 2, 2))


def listening(execute: Execute, *, timeout_s: float = 30.0) -> Address:
    return listen_for_steps(execute, host=HOST, key=KEY, timeout_s=timeout_s)


def connected(*hosts: Execute, timeout_s: float = 30.0) -> Sockets:
    addresses = [listening(execute) for execute in hosts]
    return Sockets(addresses, key=KEY, timeout_s=timeout_s)


@pytest.mark.parametrize("num_tokens", [0, 1, 5000, LARGE])
def test_every_host_gets_the_plan_and_the_first_one_answers(num_tokens: int) -> None:
    seen: list[list[StepPlan]] = [[], []]

    def first(plan: StepPlan) -> StepResult:
        seen[0].append(plan)
        return answer_to(plan)

    sockets = connected(first, seen[1].append)
    for step_id in range(3):
        plan = plan_of(step_id, num_tokens)
        result = sockets.execute(plan)
        assert result is not None and result.step_id == step_id
        assert result.routing is not None
        np.testing.assert_array_equal(result.token_ids, plan.chunks.token_ids)
        np.testing.assert_array_equal(result.routing.reshape(-1).view(np.int32), plan.chunks.token_ids)
    for plans in seen:
        assert [plan.step_id for plan in plans] == [0, 1, 2]
        np.testing.assert_array_equal(plans[2].chunks.token_ids, plan.chunks.token_ids)


def test_a_host_that_fails_on_a_step_is_named_with_its_error() -> None:
    def failing(plan: StepPlan) -> None:
        raise ZeroDivisionError(f"step {plan.step_id} divides")

    sockets = connected(answer_to, failing)
    with pytest.raises(HostLostError, match=r"(?s)host 1 failed: .*ZeroDivisionError: step 7 divides"):
        sockets.execute(plan_of(7, 3))


def test_a_host_that_is_late_is_named() -> None:
    done = threading.Event()

    def slow(_: StepPlan) -> None:
        done.wait(30.0)

    for hosts, late in (((answer_to, slow), 1), ((slow, answer_to), 0), ((slow, slow), 0)):
        sockets, started = connected(*hosts, timeout_s=0.3), time.monotonic()
        with pytest.raises(HostLostError, match=rf"host {late} has not answered within 0\.3 s"):
            sockets.execute(plan_of(0, 3))
        assert time.monotonic() - started < 10.0
    done.set()


def test_a_host_that_takes_nothing_in_is_late_too() -> None:
    """The plan is larger than what the connection holds, so that already sending it has to end."""
    done = threading.Event()
    sockets = connected(lambda _: done.wait(30.0) and None, timeout_s=0.3)
    for _ in range(2):
        with pytest.raises(HostLostError, match=r"host 0 has not answered within 0\.3 s"):
            sockets.execute(plan_of(0, LARGE))
    done.set()


def test_a_host_that_is_gone_is_named() -> None:
    with leaving_host(after_s=0.0) as address:
        sockets = Sockets([listening(answer_to), address], key=KEY, timeout_s=30.0)
        with pytest.raises(HostLostError, match="host 1 is gone"):
            sockets.execute(plan_of(0, 3))


def test_a_host_that_is_gone_is_noticed_while_another_one_computes() -> None:
    done = threading.Event()
    with leaving_host(after_s=0.2) as address:
        computing = listening(lambda _: done.wait(30.0) and None)
        sockets, started = Sockets([computing, address], key=KEY, timeout_s=30.0), time.monotonic()
        with pytest.raises(HostLostError, match="host 1 is gone"):
            sockets.execute(plan_of(0, 3))
        assert time.monotonic() - started < 10.0
    done.set()


@contextmanager
def leaving_host(*, after_s: float) -> Iterator[tuple[str, int]]:
    """The address of a host that ends after a while, whatever it is asked for."""

    def serve_briefly() -> None:
        with accept_proven(server, key=KEY, timeout_s=30.0):
            time.sleep(after_s)

    with socket.create_server((HOST, 0)) as server:
        serving = threading.Thread(target=serve_briefly)
        serving.start()
        yield server.getsockname()
        serving.join()


STRANGERS = {
    "says nothing": b"",
    "says half of a proof": b"x" * 32,
    "says a wrong proof": b"x" * 64,
    "is a browser": b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: keep-alive\r\nAccept: */*\r\n\r\n",
    "says no end of things": b"x" * 100_000,
}


@pytest.mark.parametrize("said", STRANGERS.values(), ids=STRANGERS)
def test_strangers_that_connect_first_and_stay_delay_nobody(said: bytes) -> None:
    executed: list[StepPlan] = []
    address = listening(executed.append)
    with ExitStack() as stack:
        for _ in range(8):
            stranger = stack.enter_context(socket.create_connection(address))
            with suppress(ConnectionError):
                stranger.sendall(said)
        started = time.monotonic()
        assert Sockets([address], key=KEY, timeout_s=30.0).execute(plan_of(1, 3)) is None
        assert time.monotonic() - started < HANDSHAKE_S, "it did not wait for a stranger's deadline"
    assert [plan.step_id for plan in executed] == [1]
    with pytest.raises(ConnectionError):
        socket.create_connection(address)


def test_strangers_cannot_take_all_places() -> None:
    """More of them than are kept, and more while the one with the key connects."""
    address, done = listening(answer_to), threading.Event()

    def keep_coming() -> None:
        with ExitStack() as stack:
            while not done.wait(0.001):
                with suppress(ConnectionError):
                    stack.enter_context(socket.create_connection(address))

    with ExitStack() as stack:
        for _ in range(MAX_UNPROVEN + 10):
            stack.enter_context(socket.create_connection(address))
        coming = threading.Thread(target=keep_coming)
        coming.start()
        try:
            assert Sockets([address], key=KEY, timeout_s=30.0).execute(plan_of(1, 3)) is not None
        finally:
            done.set()
            coming.join()


def test_strangers_are_sent_away_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "HANDSHAKE_S", 0.05)
    address = listening(answer_to)
    with socket.create_connection(address) as stranger:
        stranger.settimeout(30.0)
        while stranger.recv(100):
            pass
    assert Sockets([address], key=KEY, timeout_s=30.0).execute(plan_of(1, 3)) is not None


def test_who_listens_without_the_key_is_told_nothing_and_refused() -> None:
    def pretend() -> None:
        accepted, _ = server.accept()
        with accepted:
            accepted.sendall(b"n" * 32)
            heard.append(accepted.recv(64, socket.MSG_WAITALL))
            accepted.sendall(heard[0][32:])  # the proof that it has just been shown
            heard.append(accepted.recv(1))

    heard: list[bytes] = []
    with socket.create_server((HOST, 0)) as server:
        pretending = threading.Thread(target=pretend)
        pretending.start()
        with pytest.raises(HostLostError, match=r"host 0 is gone.*does not know the key"):
            Sockets([server.getsockname()], key=KEY, timeout_s=30.0)
        pretending.join()
    assert heard[1:] == [b""] and KEY not in heard[0]


def test_a_start_ends_by_its_deadline_where_no_host_answers() -> None:
    with socket.create_server((HOST, 0)) as silent, pytest.raises(HostLostError, match=r"host 0 .* within 0\.2 s"):
        Sockets([silent.getsockname()], key=KEY, timeout_s=0.2)


def test_a_host_that_nobody_connects_to_stops_listening(caplog: pytest.LogCaptureFixture) -> None:
    before = set(threading.enumerate())
    address = listening(answer_to, timeout_s=0.05)
    for serving in set(threading.enumerate()) - before:
        serving.join(600.0)
    with pytest.raises(ConnectionError):
        socket.create_connection(address)
    assert "no peer that knows the key has connected" in caplog.text


def test_a_host_stops_serving_when_the_other_end_closes() -> None:
    before = set(threading.enumerate())
    sockets = connected(answer_to)
    sockets.execute(plan_of(0, 3))
    (serving,) = set(threading.enumerate()) - before
    assert serving.is_alive()
    del sockets
    serving.join(600.0)
    assert not serving.is_alive()
