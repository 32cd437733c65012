"""Reading other weights beside the steps, in a thread that no step waits for."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np

from rayserve_moe.execution.staged_weights import StagedWeights
from rayserve_moe.requests import WeightsRefusedError

MOST_STUCK = 4
"""Readings that were given up and still run, as on a disk that does not answer; beyond that none is begun."""
GIVEN_UP = "reading was given up"


@dataclass
class _Reading:
    """One checkpoint being read. `refusal` is empty where it can be used, and counts once it is `done`."""

    given_up: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    refusal: str = ""


class WeightReading:
    """Reads one checkpoint after the other into `StagedWeights`. One that is given up delays none that follow."""

    def __init__(self, staged: StagedWeights) -> None:
        self._staged = staged
        self._threads: list[threading.Thread] = []
        self._current = _Reading(refusal=GIVEN_UP)
        self._current.done.set()

    def begin(self, model_path: str, expert_of_slot: np.ndarray | None) -> None:
        """Read a checkpoint, as `StagedWeights.read` does; an earlier one is given up."""
        self.give_up()
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._current = reading = _Reading()
        if len(self._threads) >= MOST_STUCK:
            reading.refusal = f"{len(self._threads)} earlier readings hang in their files"
            reading.done.set()
            return
        thread = threading.Thread(
            target=self._read, args=(reading, model_path, expert_of_slot), name="weights", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def outcome(self, timeout_s: float = 0.0) -> str | None:
        """Wait for the reading: None where it still runs, empty once it is staged, else why it is refused."""
        reading = self._current
        return reading.refusal if reading.done.wait(timeout_s) else None

    def give_up(self) -> None:
        """Give up the current reading and drop what it staged."""
        reading = self._current
        reading.given_up.set()
        self._staged.drop()
        if not reading.done.is_set():
            reading.refusal = GIVEN_UP
            reading.done.set()

    def _read(self, reading: _Reading, model_path: str, expert_of_slot: np.ndarray | None) -> None:
        try:
            self._staged.read(model_path, expert_of_slot, given_up=reading.given_up)
        except WeightsRefusedError as refusal:
            reading.refusal = str(refusal)
        reading.done.set()


def too_late(timeout_s: float) -> WeightsRefusedError:
    """The refusal of weights that were not read within `staging_timeout_s`."""
    return WeightsRefusedError(f"the weights were not read within staging_timeout_s = {timeout_s:g} s")
