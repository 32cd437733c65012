"""A host that ends, falls silent or hangs is noticed, each for its own reason; one that compiles for long is not."""

from __future__ import annotations

import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rayserve_moe.cluster import heartbeat, host_group
from rayserve_moe.cluster.channel import accept_proven, connect_proven
from rayserve_moe.cluster.fencing import _start_of, end_process
from rayserve_moe.cluster.heartbeat import CHANGING, COMPILING, JOINING, MIN_STEPS, SERVING, Beat, Heartbeat, read_beat
from rayserve_moe.cluster.host_group import HostWatch

KEY = secrets.token_bytes(32)
TIMEOUT_S = 60.0
BEATING = """
import sys, time
from rayserve_moe.cluster.heartbeat import Heartbeat
pulse = Heartbeat()
pulse.enter(sys.argv[2])
print(pulse.listen(host="127.0.0.1", key=bytes.fromhex(sys.argv[1]), timeout_s=60)[1], flush=True)
time.sleep(600)
"""


@contextmanager
def beating(phase: str = SERVING) -> Iterator[tuple[int, tuple[str, int]]]:
    """A process that beats; yields its id and its address."""
    command = [sys.executable, "-c", BEATING, KEY.hex(), phase]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.pid, ("127.0.0.1", int(process.stdout.readline()))
        finally:
            process.kill()


@pytest.mark.parametrize("phase", [SERVING, CHANGING])
def test_silence_is_noticed_after_a_while(monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    monkeypatch.setattr(host_group, "SILENCE_S", 1.5)
    monkeypatch.setattr(host_group, "SILENCE_AT_START_S", 10 * TIMEOUT_S)
    losses: queue.SimpleQueue[str] = queue.SimpleQueue()
    with beating() as (_, address), beating(phase) as (second, other):
        watch = HostWatch([address, other], key=KEY, on_loss=losses.put)
        assert watch.await_loss(0.7) is None
        os.kill(second, signal.SIGSTOP)
        assert losses.get(timeout=TIMEOUT_S) == "host 1 has been silent for 1.5 s" == watch.await_loss(TIMEOUT_S)


def test_an_end_is_noticed_at_once_and_silence_of_a_host_that_compiles_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_group, "SILENCE_S", 1.5)
    losses: queue.SimpleQueue[str] = queue.SimpleQueue()
    with beating(COMPILING) as (first, address), beating() as (_, other):
        watch = HostWatch([address, other], key=KEY, on_loss=losses.put)
        os.kill(first, signal.SIGSTOP)
        assert watch.await_loss(2.5) is None, "it compiles"
        begun = time.monotonic()
        os.kill(first, signal.SIGKILL)
        assert losses.get(timeout=TIMEOUT_S) == "the process of host 0 has ended"
        assert time.monotonic() - begun < 1.5
        watch.close()


def test_a_change_of_phase_is_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then the longer silence of the phase before would hold."""
    monkeypatch.setattr(heartbeat, "BEAT_S", 10 * TIMEOUT_S)
    pulse = Heartbeat()
    pulse.enter(COMPILING)
    address = pulse.listen(host="127.0.0.1", key=KEY, timeout_s=TIMEOUT_S)
    with connect_proven(address, key=KEY, deadline=time.monotonic() + TIMEOUT_S, max_frame_bytes=4096) as channel:
        channel.limit_silence(TIMEOUT_S)
        assert read_beat(channel.receive()).phase == COMPILING
        pulse.enter(SERVING, 3)
        while read_beat(channel.receive()).phase != SERVING:
            pass


def test_a_closed_watch_notices_nothing() -> None:
    losses: queue.SimpleQueue[str] = queue.SimpleQueue()
    with beating() as (pid, address):
        watch = HostWatch([address], key=KEY, on_loss=losses.put)
        watch.close()
        os.kill(pid, signal.SIGKILL)
        watch._thread.join(TIMEOUT_S)
    assert losses.empty() and watch.loss is None


@pytest.mark.parametrize("sent", [b"\x40\x00\x00\x00[", b"\x40", b"\xff\xff\xff\xff["])
def test_a_host_that_stops_within_a_beat_is_lost(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    """Half a beat, half its length, and the length of something else."""
    monkeypatch.setattr(host_group, "SILENCE_S", 0.5)

    def stop_within_beat() -> None:
        channel = accept_proven(listener, key=KEY, timeout_s=TIMEOUT_S)
        with socket.socket(fileno=os.dup(channel.fileno())) as connection:
            connection.sendall(sent)
            is_lost.wait(TIMEOUT_S)

    is_lost = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host = threading.Thread(target=stop_within_beat)
        host.start()
        watch = HostWatch([listener.getsockname()], key=KEY, on_loss=lambda _: None)
        loss = watch.await_loss(10.0)
        is_lost.set()
        host.join()
    assert loss == "the process of host 0 has ended"


def test_a_step_is_late_by_the_steps_before_it_and_nothing_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ordinary steps set the limit; a long compilation has none, nor has a step before there are enough to judge by."""
    monkeypatch.setattr(heartbeat, "MIN_STEP_LIMIT_S", 0.5)
    pulse = Heartbeat()
    with pulse.step(0):
        pulse.beat(0.5)
        assert pulse.beat(0.5).limit_s == 0.0
    for step_id in range(MIN_STEPS):
        with pulse.step(step_id):
            pass
    with pulse.step(99):
        pulse.beat(0.5)
        late = pulse.beat(0.5)
        assert (late.step_id, late.limit_s) == (99, 0.5) and late.seconds >= 0.5
        assert pulse.beat(600.0).seconds == late.seconds + 2 * heartbeat.BEAT_S, "the process itself was stopped"
    pulse.enter(COMPILING)
    for _ in range(100):
        assert pulse.beat(0.5).limit_s == 0.0


@pytest.mark.parametrize(
    ("beat", "complains"),
    [
        (Beat("serving", 7, 6.0, 5.0), True),
        (Beat("serving", 7, 4.0, 5.0), False),
        (Beat("serving", -1, 900.0, 0.0), False),
        (Beat(COMPILING, -1, 900.0, 0.0), False),
        (Beat(JOINING, -1, 61.0, 0.0), True),
        (Beat(JOINING, -1, 59.0, 0.0), False),
    ],
)
def test_what_hangs_is_named(beat: Beat, complains: bool) -> None:
    watch = HostWatch([], key=KEY, on_loss=lambda _: None)
    complaint = watch._complaint(3, beat)
    watch.close()
    assert (complaint is not None) == complains
    assert complaint is None or ("host 3" in complaint and ("step 7" in complaint or JOINING in complaint))


@pytest.mark.parametrize("message", [b"", b"null", b"[1]", b'["serving", 1, NaN, 0]', b'["serving", "x", 0, 0]'])
def test_a_beat_that_is_none_is_refused(message: bytes) -> None:
    with pytest.raises((ValueError, TypeError)):
        read_beat(message)


def test_a_stopped_process_is_ended_and_a_later_one_of_its_number_is_not() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        started = _start_of(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        end_process(process.pid, "another start")
        assert process.poll() is None
        end_process(process.pid, started)
        assert process.wait(TIMEOUT_S) == -signal.SIGKILL
