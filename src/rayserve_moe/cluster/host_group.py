"""The workers of a generation: started together, watched by their heartbeats, and ended together."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from rayserve_moe.balancing.placement import ExpertPlacement
from rayserve_moe.checkpoints.open_shares import SharePlace
from rayserve_moe.cluster.channel import KEY_BYTES, Address, Channel, connect_proven, wait_readable
from rayserve_moe.cluster.fencing import HostProcess, end_processes
from rayserve_moe.cluster.heartbeat import (
    CHANGING,
    COMPILING,
    JOINING,
    LOADING,
    SERVING,
    STARTING,
    WARMING,
    Beat,
    read_beat,
)
from rayserve_moe.cluster.slice_placement import get
from rayserve_moe.cluster.step_transport import (
    TRANSPORT_ERRORS,
    TRANSPORTS,
    HostLostError,
    StepFailedError,
    StepTransport,
)
from rayserve_moe.cluster.weight_keepers import KeptShare
from rayserve_moe.config import derive
from rayserve_moe.config.settings import ClusterSettings
from rayserve_moe.engine.executor import ExecutorFailure
from rayserve_moe.observability.fault_points import reach
from rayserve_moe.parallel.joining import Coordinator
from rayserve_moe.scheduling.step_plan import StartReport, StepPlan, StepResult, slowest_start

SETTLE_S = 1.0
"""Wait, after an error in a step of several hosts, for the notice that a process has died.

The surviving host often reports its error first.
"""
REPLACING_S = 120.0
"""Maximum time from starting replacement processes to watching them: until then no heartbeat shows a stop."""
CONNECTING = "connecting"
NUM_PORTS_TRIED = 5


@dataclass(frozen=True)
class GroupWeights:
    """The weights that a group loads: a checkpoint, or shares of sent tensors.

    Without `source`, `kept` and `offered` no group can load them.
    """

    source: str | None = ""
    """Checkpoint that replaces the model's own; empty: the model's own; None: the weights were sent."""
    num_pages: int | None = None
    """Required number of KV pages; None: any."""
    kept: tuple[SharePlace, ...] = ()
    """Location of each host's share of sent weights."""
    offered: tuple[KeptShare, ...] = ()
    """Shares to copy from other nodes or replicas, or to be read by a group of another size."""
    placement: ExpertPlacement | None = None
    """Expert placement of the offered shares."""
    first: ExpertPlacement | None = None
    """Placement of the experts that hosts load; None for the order of expert ids. A host's own share keeps its own."""

    @property
    def is_there(self) -> bool:
        return self.source is not None or self.num_hosts is not None

    @property
    def num_hosts(self) -> int | None:
        """Return the number of hosts of the group that wrote the shares; None without shares."""
        return len(self.kept) or next((each.num_hosts for each in self.offered), None)

    @property
    def token(self) -> str:
        """Return the token that identifies sent weights; empty for a checkpoint."""
        return next((place.token for place in (*self.kept, *(each.place for each in self.offered))), "")

    def kept_at(self, kept: tuple[SharePlace, ...], token: str) -> GroupWeights:
        """Return these weights with new share locations if their token is `token`; otherwise unchanged."""
        return replace(self, kept=kept) if self.token == token else self


class Enter(Protocol):
    """Records the phase that begins."""

    def __call__(self, phase: str) -> None: ...


class HostGroup:
    """Drives `workers` from their start to their end. `loss` is a fault of them that was noticed outside a step.

    After a fault all workers are killed, because a worker may wait in a collective for another without a limit.
    Then `on_loss` is called from another thread.
    """

    def __init__(
        self,
        workers: Sequence[ActorHandle],
        cluster: ClusterSettings,
        *,
        on_loss: Callable[[], object],
        given_up: threading.Event,
    ) -> None:
        self.workers = list(workers)
        self._cluster, self._on_loss, self._given_up = cluster, on_loss, given_up
        self._processes: list[HostProcess] = []
        self._killing = threading.Lock()
        self._coordinator: Coordinator | None = None
        self._watch: HostWatch | None = None
        self._transport: StepTransport | None = None

    @property
    def loss(self) -> str | None:
        return None if self._watch is None else self._watch.loss

    def start(self, weights: GroupWeights, *, enter: Enter) -> StartReport:
        """Watch and join the workers, load and compile. A worker's errors pass through unchanged.

        Raises GetTimeoutError after `start_timeout_s`, or if replacement processes have not started after
        `REPLACING_S`; ExecutorFailure if fewer pages fit than `weights` requires.
        """
        begun, is_first = time.monotonic(), weights.num_pages is None
        deadline = begun + self._cluster.start_timeout_s

        def results_of(calls: list[Any], *, until: float = deadline) -> list[Any]:
            return get(calls, timeout_s=until - time.monotonic(), given_up=self._given_up)

        enter(STARTING)
        watched_by = deadline if is_first else min(deadline, begun + REPLACING_S)
        self._processes = results_of([worker.process.remote() for worker in self.workers], until=watched_by)
        key, limit_s = secrets.token_bytes(KEY_BYTES), self._cluster.step_timeout_s
        listening = [worker.listen_for_watch.remote(key, limit_s) for worker in self.workers]
        addresses = results_of(listening, until=watched_by)
        self._watch = HostWatch(addresses, key=key, on_loss=self._end_lost)
        reach("group watched", self)
        enter(LOADING)
        self._coordinator, address = coordinate(len(self.workers))
        kept, source = weights.kept or (None,) * len(self.workers), weights.source or ""
        loads = zip(self.workers, kept, strict=True)
        calls = [
            each.load.remote(address, source, kept=place, spread=weights.offered, placement=weights.first)
            for each, place in loads
        ]
        num_pages = min(results_of(calls))
        if weights.num_pages is not None and weights.num_pages > num_pages:
            raise ExecutorFailure(f"memory holds {num_pages} pages, but {weights.num_pages} are required")
        enter(COMPILING)
        num_pages = weights.num_pages or num_pages
        results_of([worker.prepare.remote(num_pages) for worker in self.workers])
        reach("group compiled", self)
        # A host waits in a collective for a limited time, so all hosts compile before any of them runs a collective.
        enter(WARMING)
        reports = results_of([worker.warm_up.remote() for worker in self.workers])
        enter(CONNECTING)
        transport = TRANSPORTS[derive.transport(self._cluster)]
        self._transport = transport(self.workers, timeout_s=self._cluster.step_timeout_s)
        enter(SERVING)
        return slowest_start(reports)

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Run a step on every host. Raises ExecutorFailure if a host is lost or fails."""
        assert self._transport is not None, "start comes first"
        try:
            return self._transport.execute(plan)
        except TRANSPORT_ERRORS as error:
            is_error = isinstance(error, (StepFailedError, RayTaskError))
            may_be_loss = self._watch is not None and len(self.workers) > 1
            loss = self._watch.await_loss(SETTLE_S) if is_error and may_be_loss and self._watch else self.loss
            raise ExecutorFailure(
                f"step {plan.step_id} was lost: {loss or error}", in_step=is_error and loss is None
            ) from error

    def release(self) -> None:
        """Stop polling between steps."""
        if self._transport is not None:
            self._transport.release()

    def end(self) -> None:
        """Kill every worker in any state and wait until it is gone. May be called twice."""
        if self._watch is not None:
            self._watch.close()
        self._kill()
        if self._coordinator is not None:
            self._coordinator.shutdown()
            self._coordinator = None
        if self._transport is not None:
            with suppress(RayError, HostLostError, TimeoutError):
                self._transport.release()
            self._transport = None

    def _end_lost(self, _: str) -> None:
        """Kill all workers, so that waiting callers get an error, then report the loss. Runs in the watch's
        thread.
        """
        self._kill()
        self._on_loss()

    def _kill(self) -> None:
        with self._killing:
            processes, self._processes = self._processes, []
            for worker in self.workers:
                ray.kill(worker)
            end_processes(processes, waits_far=bool(self._cluster.tpu_topology))


def coordinate(num_hosts: int) -> tuple[Coordinator | None, str]:
    """Return the JAX coordination service and its address; None and an empty address for a single host."""
    if num_hosts == 1:
        return None, ""
    for attempt in range(1, NUM_PORTS_TRIED + 1):
        with closing(socket.socket()) as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        try:
            coordinator = Coordinator(port, num_hosts=num_hosts)
            break
        except RuntimeError:  # Another process has taken the port meanwhile.
            if attempt == NUM_PORTS_TRIED:
                raise
    return coordinator, f"{ray.util.get_node_ip_address()}:{port}"


SILENCE_S, SILENCE_AT_START_S = 3.0, 30.0
"""Maximum silence of a host that serves or changes weights, and of a starting host, whose compiling thread may block
all others.
"""
MAX_BEAT_BYTES = 4096
POLL_S = 0.25
OWN_DELAY_S = 1.0
"""If the watch itself is delayed by more than this, its delay does not count as silence of a host."""
PHASE_LIMITS_S = {JOINING: 60.0}
"""Maximum times of phases that only wait for another host. Compilation has no limit."""
CONNECT_S = 10.0


class HostWatch:
    """Watches the heartbeats of hosts. Its thread sets `loss` to the first fault and calls `on_loss` once."""

    def __init__(
        self,
        addresses: Sequence[Address],
        *,
        key: bytes,
        on_loss: Callable[[str], object],
        limits_s: Mapping[str, float] = PHASE_LIMITS_S,
    ) -> None:
        self.loss: str | None = None
        self._on_loss, self._limits_s = on_loss, limits_s
        deadline = time.monotonic() + CONNECT_S
        self._hosts: dict[Channel, int] = {}
        for host_id, address in enumerate(addresses):
            channel = connect_proven(address, key=key, deadline=deadline, max_frame_bytes=MAX_BEAT_BYTES)
            channel.limit_silence(SILENCE_S)  # A beat that stops halfway must not block the watch over the other hosts.
            self._hosts[channel] = host_id
        self._silence_s = dict.fromkeys(self._hosts, SILENCE_AT_START_S)
        self._found, self._is_closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="host-watch", daemon=True)
        self._thread.start()

    def await_loss(self, timeout_s: float) -> str | None:
        """Return the fault of a host as soon as it is known, or None after `timeout_s`."""
        self._found.wait(timeout_s)
        return self.loss

    def close(self) -> None:
        """Stop watching. May be called twice."""
        self._is_closed.set()

    def _run(self) -> None:
        heard_at = dict.fromkeys(self._hosts, time.monotonic())
        last = time.monotonic()
        loss = None
        while loss is None and not self._is_closed.is_set():
            ready = wait_readable(list(self._hosts), timeout_s=POLL_S)
            now = time.monotonic()
            if now - last > OWN_DELAY_S:
                heard_at = {channel: at + now - last for channel, at in heard_at.items()}
            last = now
            for channel in ready:
                heard_at[channel] = now
                loss = loss or self._heard(channel)
            silent = [each for each, at in heard_at.items() if now - at > self._silence_s[each]]
            if silent and loss is None:
                loss = f"host {self._hosts[silent[0]]} has been silent for {self._silence_s[silent[0]]:g} s"
        for channel in self._hosts:
            with suppress(OSError):
                channel.close()
        if loss is not None and not self._is_closed.is_set():
            self.loss = loss
            self._on_loss(loss)
            self._found.set()

    def _heard(self, channel: Channel) -> str | None:
        """Read a beat; return the fault of its host, or None."""
        host_id = self._hosts[channel]
        try:
            beat = read_beat(channel.receive())
        except (OSError, EOFError, ValueError, TypeError):
            return f"the process of host {host_id} has ended"
        self._silence_s[channel] = SILENCE_S if beat.phase in (SERVING, CHANGING) else SILENCE_AT_START_S
        return self._complaint(host_id, beat)

    def _complaint(self, host_id: int, beat: Beat) -> str | None:
        limit_s = beat.limit_s or self._limits_s.get(beat.phase, 0.0)
        if not limit_s or beat.seconds <= limit_s:
            return None
        activity = f"step {beat.step_id}" if beat.step_id >= 0 else beat.phase
        return f"host {host_id} hangs in {activity}: {beat.seconds:.1f} s of {limit_s:.1f}"
