"""A replica in a fleet: it follows the wanted state, knows its peers, and hands requests over at its end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from rayserve_moe.cluster.replica_engine import FirstWeights
from rayserve_moe.config.given_files import is_url
from rayserve_moe.config.settings import ServerSettings
from rayserve_moe.engine.command_queue import EngineStoppedError
from rayserve_moe.engine.control import EngineControl
from rayserve_moe.engine.updates.orders import WeightOrder, WeightOutcome
from rayserve_moe.fleet.wanted_state import FleetView, ServedWeights, Wanted

log = logging.getLogger(__name__)

SYNC_S = 1.0
"""Interval for reading the wanted state; all replicas know a new member after it."""
MAX_FAILURES = 3
"""Consecutive failures to reach the wanted state before the replica gives up."""
STATE_WITHIN_S = 60.0
"""Maximum time for a starting replica to reach the state actor."""
_ANY = 1 << 30
"""Keeps the role of a replica that joins again."""
GONE = ("STOPPING",)
"""States of replicas that Serve still lists but that no order concerns."""


class StateUnavailableError(RuntimeError):
    """The actor that holds the wanted state does not answer."""


class CannotFollowError(RuntimeError):
    """This replica cannot load the fleet's weights."""


class FleetState(Protocol):
    """The actor `wanted_state.WantedState`, called from threads. Raises StateUnavailableError if it does not answer."""

    def view(self) -> FleetView: ...
    def join(self, member: str, number: int, *, num_prefill: int = 0) -> bool: ...
    def restore(self, wanted: Wanted) -> Wanted: ...
    def forget(self, members: list[str]) -> None: ...
    def abandon(self, number: int) -> Wanted: ...


@dataclass
class FleetMember:
    """This replica's progress towards the wanted state."""

    name: str
    state: FleetState
    listed: Callable[[], Mapping[str, str]]
    """Returns the replicas that Serve lists, with their states."""
    give_up: Callable[[], object]
    """Ends this replica, so that Serve starts another: it cannot load the weights that the others serve."""
    applied: Wanted = field(default_factory=Wanted)
    """The wanted state that this replica has reached."""
    view: FleetView = field(default_factory=lambda: FleetView(Wanted(), None, frozenset()))
    staged_id: str = ""
    """Order that weights are staged for here."""
    sent_id: str = ""
    """Update whose buckets are staged for `staged_id`."""
    num_prefill: int = 0
    """Number of replicas that compute prompts for the others."""
    is_prefill: bool = False
    """True if this replica computes prompts for others; decided when it joins."""
    on_listed: Callable[[Mapping[str, str]], object] | None = None
    """Called every second with the replicas that Serve lists."""
    _outcome: WeightOutcome | None = None
    _applying: threading.Lock = field(default_factory=threading.Lock)
    _staging: threading.Lock = field(default_factory=threading.Lock)
    _ended: threading.Event = field(default_factory=threading.Event)

    @property
    def is_single_replica(self) -> bool:
        """Return True if no other replica is known to have joined."""
        return self.view.members <= {self.name}

    @property
    def awaited(self) -> str:
        """Return the version of lost weights that must be sent before requests are answered; empty otherwise."""
        return self.applied.weights.awaited

    def first_weights(
        self, offered: Callable[[str], FirstWeights | None] = lambda _: None, *, poll_s: float = SYNC_S
    ) -> FirstWeights:
        """Return the weights to start with.

        If the weights were sent, `offered` asks the other replicas for them by order id; this waits until a replica
        offers them. If the weights are lost (all replicas that had sent weights are gone, or their directory is),
        return the configured weights; requests are rejected while the lost weights are `awaited`.
        """
        is_said = False
        while True:
            view = _reached(self._view_of_living)
            wanted = view.wanted
            if not view.members and not _is_there(wanted.weights.path):
                wanted = self.state.abandon(wanted.number)
                log.error("%s", lost_sentence(wanted.weights.awaited))
            path, first = wanted.weights.path, None
            if path is not None:
                first = FirstWeights(path, wanted.weights.version)
            elif view.members:
                first = offered(wanted.weights.order_id)
            if first is not None:
                self.applied = replace(self.applied, weights=wanted.weights)
                return first
            if not is_said:
                log.warning("weights %s were sent, and no replica offers them: waiting", wanted.weights.version)
                is_said = True
            time.sleep(poll_s)

    def join(self, control: EngineControl, *, poll_s: float = SYNC_S / 4) -> None:
        """Follow the wanted state until this replica has reached it, then join, and wait until the others know it."""
        while True:
            self.follow(control, _reached(self._view_of_living).wanted)  # a lost replica leaves its role to this one
            if self.state.join(self.name, self.applied.number, num_prefill=self.num_prefill):
                break
            time.sleep(poll_s)
        self.view = self._view_of_living()
        self.is_prefill = self.name in self.view.prefill
        if not self.is_single_replica:
            time.sleep(SYNC_S)

    def keep_up(self, control: EngineControl) -> None:
        """Follow until `stop`. Runs in a separate thread."""
        num_failed = 0
        while num_failed < MAX_FAILURES and not self._ended.wait(SYNC_S):
            try:
                self.sync(control)
                num_failed = 0
            except StateUnavailableError as error:
                log.warning("the wanted state of the fleet is unavailable: %s", error)
            except CannotFollowError as error:
                num_failed += 1
                log.warning("this replica cannot follow the fleet: %s", error)
            except EngineStoppedError:
                return
        if num_failed:
            log.error("this replica ends so that another replaces it")
            self.give_up()

    def stop(self) -> None:
        """Stop following."""
        self._ended.set()

    def sync(self, control: EngineControl) -> None:
        """Compare with the wanted state once; join again if the actor was restarted."""
        staged_id = self.staged_id
        view = self._view_of_living()
        if view.wanted.number < self.applied.number:
            self.state.restore(self.applied)
        if self.name not in view.members and view.wanted.number <= self.applied.number:
            self.state.join(self.name, self.applied.number, num_prefill=_ANY if self.is_prefill else 0)
        self.follow(control, view.wanted)
        if staged_id not in ("", view.order_id, view.wanted.weights.order_id):
            self.discard(control, staged_id)

    def stage(self, control: EngineControl, order_id: str, *, path: str) -> str:
        """Stage a checkpoint for an order unless it is staged. Return why it is refused, or empty."""
        with self._staging:
            if self.staged_id == order_id:
                return ""
            self.staged_id = order_id
            refusal = control.staged.stage(path).result()
            self.staged_id = "" if refusal else order_id
            return refusal

    def discard(self, control: EngineControl, order_id: str) -> None:
        """Drop the weights staged for an order that was cancelled."""
        with self._staging:
            if self.staged_id == order_id:
                self.staged_id, sent_id = "", self.sent_id
                control.staged.drop().result()
                if sent_id:
                    control.tensors.drop(sent_id).result()

    def record_sent(self, order_id: str, update_id: str) -> None:
        """Record that all weights sent by an update are staged for an order."""
        with self._staging:
            self.staged_id, self.sent_id = order_id, update_id

    def follow(self, control: EngineControl, wanted: Wanted) -> WeightOutcome:
        """Reach the wanted state unless this replica has it or a later one. Raises CannotFollowError if it cannot."""
        with self._applying:
            outcome = WeightOutcome(True, "", control.card.weight_version)
            if wanted.number <= self.applied.number:
                return self._outcome or outcome
            if wanted.weights != self.applied.weights:
                outcome = self._take(control, wanted.weights)
            if wanted.pause != self.applied.pause:
                (control.resume() if wanted.pause is None else control.pause(wanted.pause)).result()
            self.applied, self._outcome = wanted, outcome
            return outcome

    def record(self, wanted: Wanted) -> None:
        """Record that this replica has reached a wanted state by itself."""
        with self._applying:
            self.applied = wanted if wanted.number > self.applied.number else self.applied

    def _take(self, control: EngineControl, weights: ServedWeights) -> WeightOutcome:
        order = WeightOrder(
            weights.path or "",
            weights.version,
            aborts_requests=weights.aborts_requests,
            adapter=weights.adapter,
        )
        if weights.order_id == self.applied.weights.order_id:
            version = weights.version or control.card.weight_version
            control.rename_weights(version, aborts_requests=weights.aborts_requests).result()
            return WeightOutcome(True, "the weights are renamed", version)
        outcome = WeightOutcome(False, "these weights were sent and are not staged here", control.card.weight_version)
        if self.staged_id == weights.order_id:
            self.staged_id = ""
            is_sent = weights.path is None
            swapped = control.tensors.swap(self.sent_id, order) if is_sent else control.staged.swap(order)
            outcome = swapped.result()
        if not outcome.success and weights.path:
            outcome = control.update_weights(order).result()
        if not outcome.success:
            raise CannotFollowError(outcome.message)
        return outcome

    def _view_of_living(self) -> FleetView:
        """Return the current view, without replicas that Serve no longer lists; make the actor forget them."""
        view = self.state.view()
        if view.members - {self.name} or self.on_listed is not None:
            listed = self.listed()
            if self.on_listed is not None:
                self.on_listed(listed)
            gone = sorted(member for member in view.members if listed.get(member, GONE[0]) in GONE)
            if gone:
                self.state.forget(gone)
                view = replace(view, members=view.members - set(gone), prefill=view.prefill - set(gone))
        self.view = view
        return view


def lost_sentence(version: str) -> str:
    """Return the error text for lost weights, with the fix."""
    return f"weights {version} were lost with all replicas that had them: push them again, or others"


def _reached(view: Callable[[], FleetView]) -> FleetView:
    """Return the view. Raises StateUnavailableError if the actor does not answer within `STATE_WITHIN_S`."""
    deadline = time.monotonic() + STATE_WITHIN_S
    while True:
        try:
            return view()
        except StateUnavailableError:
            if time.monotonic() > deadline:
                raise
        time.sleep(SYNC_S)


def _is_there(path: str | None) -> bool:
    """Return True if weights can still be read: the configured ones (empty), a URL, or an existing directory."""
    return path == "" or (path is not None and (is_url(path) or Path(path).is_dir()))


BEFORE_END_S = 5.0
"""Time left for the last hand-over before Serve stops waiting for a replica."""


@dataclass
class Leaving:
    """Hands the requests of a stopping replica over, again with every `look`."""

    name: str
    """Name of this replica."""
    hand_over: Callable[[], int]
    """Hands running requests over and returns their number."""
    server: ServerSettings
    clock: Callable[[], float] = time.monotonic
    _since: float | None = None

    def look(self, listed: Mapping[str, str]) -> None:
        """Check the replicas that Serve lists, with their states, and hand over if it is time."""
        if listed.get(self.name) not in GONE:
            return
        now = self.clock()
        self._since = now if self._since is None else self._since
        waits_s = self.server.drain_timeout_s - BEFORE_END_S
        if any(state == "RUNNING" for name, state in listed.items() if name != self.name):
            waits_s = min(waits_s, self.server.hand_over_after_s)
        if now - self._since >= waits_s and (number := self.hand_over()):
            log.warning("this replica ends: %d requests were handed over to other replicas", number)
