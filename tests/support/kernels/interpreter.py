"""What interpreted TPU kernels did wrong, over all calls of a run: the interpreter begins anew at every call.

A step calls kernels by the dozen, and what jax keeps of races is of the last call alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax._src.pallas.mosaic.interpret.race_detection_state import RaceDetectionState
from jax._src.pallas.mosaic.interpret.shared_memory import SharedMemory
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.kernels.candidates import Operation, bound

INTERPRETED = pltpu.InterpretParams(detect_races=True)


@dataclass(frozen=True)
class Outcome:
    """What a case gave: the largest difference, and the largest number; whether copies or ranks raced in any call;
    whether a semaphore was left with a count by any; an error's message.
    """

    difference: float = float("nan")
    largest: float = 0.0
    has_races: bool = False
    has_rest: bool = False
    error: str = ""


@dataclass
class Faults:
    """Of the calls since `begin`: how many there were, which of them raced, and semaphores left with a count."""

    num_calls: int = 0
    racing: set[int] = field(default_factory=set)
    left: list[Any] = field(default_factory=list)

    def begin(self) -> None:
        """Forget all calls. Nothing may run."""
        self.num_calls = 0
        self.racing.clear()
        self.left.clear()

    def outcome(self, difference: float, largest: float) -> Outcome:
        """Return the outcome of a case whose calls these are; AssertionError where no kernel was called."""
        assert self.num_calls, "nothing was interpreted"
        return Outcome(float(difference), float(largest), bool(self.racing), bool(self.left))


FAULTS_FOUND = Faults()


class WatchedRaces(RaceDetectionState):
    """The state of one call, which says in `FAULTS_FOUND` that it raced."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        FAULTS_FOUND.num_calls += 1

    def check_read(self, *access: Any, **more: Any) -> None:
        super().check_read(*access, **more)
        self._tell()

    def check_write(self, *access: Any, **more: Any) -> None:
        super().check_write(*access, **more)
        self._tell()

    def _tell(self) -> None:
        if self.races_found:
            FAULTS_FOUND.racing.add(FAULTS_FOUND.num_calls)


def watch() -> None:
    """Gather the faults of all calls of this process in `FAULTS_FOUND` from now on."""
    find = SharedMemory.get_sempahores_with_nonzero_count

    def watched(memory: SharedMemory, device_id: int) -> list[Any]:
        found = find(memory, device_id)
        FAULTS_FOUND.left.extend(found)
        return found

    SharedMemory.get_sempahores_with_nonzero_count = watched
    interpret_pallas_call.RaceDetectionState = WatchedRaces


def interpreted(operation: Operation, interpret: Any = INTERPRETED) -> Operation:
    """Return an operation with its TPU kernels run by an interpreter."""
    by_xla = {"xla", "ragged_dot"}
    candidates = (each if each.name in by_xla else bound(each, interpret=interpret) for each in operation.candidates)
    return Operation(tuple(candidates))


def run_cases(module: str, *names: str, timeout_s: float | None = None, **environment: str) -> dict[str, Outcome]:
    """Run cases of a module in a process of its own.

    Within a time, as for ranks that do not meet, the process may hang or end: then its error is every outcome.
    """
    environment = os.environ | {"NPROC": "32", "JAX_PLATFORMS": "cpu"} | environment
    command = [sys.executable, "-m", module, *names]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        return dict.fromkeys(names, Outcome(error=str(error)))
    if done.returncode:
        assert timeout_s is not None, done.stderr[-2000:]
        return dict.fromkeys(names, Outcome(error=done.stderr[-2000:] or "no message"))
    return {name: Outcome(**found) for name, found in json.loads(done.stdout.splitlines()[-1]).items()}


def print_outcomes(case_of: Callable[[str], Callable[[], Outcome]]) -> None:
    """Print the outcome of each case that the command line names; what a case raises is its outcome.

    `case_of` prepares a case, and plants its fault: that may not fail.
    """
    watch()
    found = {}
    for name in sys.argv[1:]:
        FAULTS_FOUND.begin()
        case = case_of(name)
        try:
            found[name] = asdict(case())
        except Exception as error:  # noqa: BLE001 (whatever a planted fault raises is the outcome)
            found[name] = asdict(Outcome(error=repr(error)[:300]))
    sys.stdout.write(json.dumps(found))
