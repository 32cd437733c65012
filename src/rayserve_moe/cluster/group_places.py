"""Where a group's hosts are: all of them, or, some time after a loss, those that are there."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace

from rayserve_moe.cluster.slice_placement import GivenUpError, SliceReservation, reserve_slice
from rayserve_moe.config.derive import group_sizes, units_of_loss
from rayserve_moe.config.setting_fields import DAY_S
from rayserve_moe.config.settings import ClusterSettings, ParallelSettings
from rayserve_moe.engine.executor import GroupLayout
from rayserve_moe.execution.fewer_hosts import Parts
from rayserve_moe.scheduling.step_plan import StartReport

log = logging.getLogger(__name__)

FEWER_TIMEOUT_S = 10.0
"""For a group of fewer hosts, which are there or are not."""
POLL_S = 0.5


class GroupPlaces:
    """Reserves the hosts of a group. `parallel` is what it serves as now: the whole, or, with `elastic_after_s`, less.

    `on_return` is called from another thread once hosts that were done without have been there for that time.
    """

    def __init__(self, parallel: ParallelSettings, cluster: ClusterSettings, *, given_up: threading.Event) -> None:
        self.parallel = parallel
        self.on_return: Callable[[], object] = lambda: None
        self._whole, self._cluster, self._given_up = parallel, cluster, given_up
        self._reservation: SliceReservation | None = None
        self._watch: ReturnWatch | None = None
        self._has_served = False

    @property
    def parts(self) -> Parts | None:
        """The slices or emulated hosts that it has now, and the fewest; None if it is always whole."""
        if not self._cluster.elastic_after_s:
            return None
        num_parts = units_of_loss(self._cluster, self._whole)
        now = num_parts * self.parallel.num_hosts // self._whole.num_hosts
        return Parts(now, num_parts - self._cluster.elastic_most_lost)

    @property
    def are_back(self) -> bool:
        """Whether hosts that were done without have been there for long enough."""
        return self._watch is not None and self._watch.are_back

    def reserve(self) -> SliceReservation:
        """Return places of hosts that live: those that are reserved, or others.

        TimeoutError, GivenUpError and SettingsError as of `reserve_slice`.
        """
        if self._reservation is not None:
            if self._reservation.is_whole and not self.are_back:
                return self._reservation
            self.release()
        self._end_watch()
        sizes = group_sizes(self._cluster, self._whole) if self._has_served else (self._whole,)
        limits = [self._cluster.elastic_after_s, *[FEWER_TIMEOUT_S] * len(sizes)]
        for size, timeout_s in zip(sizes[:-1], limits, strict=False):
            try:
                return self._reserve(size, timeout_s=timeout_s)
            except TimeoutError:
                log.warning("not all of %d hosts are there: others are to serve without them", size.num_hosts)
        return self._reserve(sizes[-1], timeout_s=self._cluster.start_timeout_s)

    def serve(self, report: StartReport) -> GroupLayout:
        """Note that a group serves there, and look for hosts that are missing; returns what it serves as."""
        self._has_served = True
        whole, parallel = self._whole, self.parallel
        num_missing = whole.num_hosts - parallel.num_hosts
        if num_missing and self._watch is None:
            num_slices = max(1, whole.num_slices - parallel.num_slices)
            missing = replace(whole, num_hosts=num_missing, num_slices=num_slices)
            self._watch = ReturnWatch(missing, self._cluster, on_return=self.on_return)
        return GroupLayout(
            parallel.data_parallel_size,
            report.num_expert_ranks,
            report.num_redundant_experts,
            num_hosts=parallel.num_hosts,
            num_slices=parallel.num_slices,
            num_missing_hosts=num_missing,
        )

    def release(self) -> None:
        """Give everything back; actors that still run there are killed. May be called twice."""
        if self._reservation is not None:
            self._reservation.release()
            self._reservation = None

    def close(self) -> None:
        """The same, for good."""
        self._end_watch()
        self.release()

    def _reserve(self, size: ParallelSettings, *, timeout_s: float) -> SliceReservation:
        self._reservation = reserve_slice(
            replace(self._cluster, start_timeout_s=timeout_s),
            num_hosts=size.num_hosts,
            num_slices=size.num_slices,
            given_up=self._given_up,
        )
        self.parallel = size
        return self._reservation

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None


class ReturnWatch:
    """Waits, in a thread, until there is place for the `missing` hosts, and has been for `elastic_after_s`.

    What it reserves meanwhile keeps others from taking it. `are_back` says that it has called `on_return`.
    """

    def __init__(self, missing: ParallelSettings, cluster: ClusterSettings, *, on_return: Callable[[], object]) -> None:
        self._missing, self._cluster, self._on_return = missing, cluster, on_return
        self._stopped = threading.Event()
        self.are_back = False
        self._thread = threading.Thread(target=self._run, name="returning-hosts", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more; waits until nothing is reserved. Not to be called from `on_return`."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        cluster, missing = replace(self._cluster, start_timeout_s=DAY_S), self._missing
        while not self._stopped.is_set():
            try:
                place = reserve_slice(
                    cluster, num_hosts=missing.num_hosts, num_slices=missing.num_slices, given_up=self._stopped
                )
            except (GivenUpError, TimeoutError):
                continue
            try:
                if self._stay(place):
                    self.are_back = True
            finally:
                place.release()
            if self.are_back:
                self._on_return()
                return

    def _stay(self, place: SliceReservation) -> bool:
        """Whether the hosts stay for the time that is asked."""
        waited_s = 0.0
        while waited_s < self._cluster.elastic_after_s:
            if self._stopped.wait(POLL_S) or not place.is_whole:
                return False
            waited_s += POLL_S
        return True
