"""Staged weights: read beside the steps in a separate thread, until they replace the current weights."""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from rayserve_moe.balancing.placement import ExpertPlacement
from rayserve_moe.checkpoints.files import open_checkpoint
from rayserve_moe.checkpoints.header import CheckpointError
from rayserve_moe.checkpoints.loader import StagedParameter
from rayserve_moe.checkpoints.names import walk
from rayserve_moe.config.given_files import Reach, is_url, one_line
from rayserve_moe.execution.drafts.model import load_draft, opened_prediction
from rayserve_moe.execution.memory import spare_bytes
from rayserve_moe.execution.step.pytrees import ModelWeights
from rayserve_moe.execution.weights.placing import parameter_tree, read_parameters
from rayserve_moe.model.draft_layer import DraftConfig
from rayserve_moe.model.family_table import spec_from_config
from rayserve_moe.model.model_config import ModelConfig, Parameters
from rayserve_moe.model.spec import ModelSpec, UnsupportedModelError
from rayserve_moe.parallel.mesh import platform_of
from rayserve_moe.requests.records import WeightsRefusedError

log = logging.getLogger(__name__)

SPARE_SHARE = 1.25
"""Minimum free memory of a device, relative to its weights, to hold new weights beside the current ones."""
MAX_STUCK = 4
"""Maximum number of cancelled reads that still run, for example on an unresponsive disk; beyond it no read begins."""
OF_FILES = ("checkpoint_dtype", "block_dtype")
"""Fields of ModelSpec that describe the storage of weights in files, which may differ from the served weights."""
DRAFT = "draft"
"""Key of the draft model's parameters beside the target's."""
GIVEN_UP = "reading was given up"


class StagedWeights:
    """Weights that this host has read and not activated yet, laid out for its devices as the current weights.

    If a prediction layer comes with them, it replaces the draft model; otherwise the draft model stays. If both fit,
    the staged weights lie on the devices, and `take` costs nothing. Otherwise they wait in host memory, and `take`
    frees each parameter on the devices before it copies its replacement.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: str,
        first_placement: ExpertPlacement,
        roots: tuple[str, ...] = (),
        draft: DraftConfig | None = None,
    ) -> None:
        self._config, self._first_placement, self._roots = config, first_placement, roots
        self._dtype, self._draft = dtype, draft
        self._tree = parameter_tree(config, dtype=dtype)
        self._ready: dict[str, Any] | None = None
        self._changing = threading.Lock()

    @property
    def bytes_per_device(self) -> int:
        """Return the bytes of the weights on a device."""
        sharding_of = self._config.plan.sharding
        shards = ((spec, sharding_of(spec.axes).shard_shape(spec.shape)) for _, spec in walk(self._tree))
        return sum(math.prod(shape) * jax.numpy.dtype(spec.dtype).itemsize for spec, shape in shards)

    def read(
        self,
        directory: str,
        expert_of_slot: np.ndarray | None = None,
        *,
        spare: int | None = None,
        given_up: threading.Event | None = None,
    ) -> None:
        """Read this host's share of a checkpoint, with experts in the slots of `expert_of_slot`; None.

        Initial placement.

        Previously staged weights are dropped. `spare` is the free memory of a device, None to measure it.

        Raises: WeightsRefusedError, in a single line, for any fault of the checkpoint, or once `given_up` is set; then
            no weights are staged.
        """
        self.drop()
        reach = Reach(self._roots, given_up or threading.Event())
        with refusing(directory):
            ready = self._read(directory, expert_of_slot, spare=spare, reach=reach)
        self.hold(ready, given_up=reach.given_up)

    def hold(self, ready: dict[str, Any], *, given_up: threading.Event) -> None:
        """Stage parameters: the whole tree, or the changed ones.

        Raises: WeightsRefusedError once `given_up` is set.
        """
        with self._changing:
            if given_up.is_set():
                raise WeightsRefusedError(GIVEN_UP)
            self._ready = ready

    @property
    def ready(self) -> dict[str, Any]:
        """Return the tree of staged parameters; empty without any."""
        with self._changing:
            return self._ready or {}

    def take(self, serving: ModelWeights) -> ModelWeights:
        """Return the staged weights on the devices, with the current maps; the current weights are deleted."""
        assert self._ready is not None, "nothing is staged"
        ready, self._ready = self._ready, None
        draft = serving.draft
        if (own := ready.pop(DRAFT, None)) is not None:
            draft = cast(Parameters, _put(own, draft))
        return dataclasses.replace(serving, params=cast(Parameters, _put(ready, serving.params)), draft=draft)

    def drop(self) -> None:
        """Drop the staged weights."""
        with self._changing:
            self._ready = None

    def _read(
        self, directory: str, expert_of_slot: np.ndarray | None, *, spare: int | None, reach: Reach
    ) -> dict[str, Any]:
        plan = self._config.plan
        files = open_checkpoint(directory, reach)
        _check_alike(spec_from_config(files.config), self._config.spec)
        free = spare_bytes(list(plan.mesh.local_devices)) if spare is None else spare
        is_full = free < SPARE_SHARE * self.bytes_per_device
        slots = self._first_placement.expert_of_slot if expert_of_slot is None else expert_of_slot
        # On a CPU, the other cores are left to the steps.
        num_threads = 1 if platform_of(plan.mesh) == "cpu" else 0
        ready = read_parameters(
            files, self._tree, plan=plan, expert_of_slot=slots, in_host_memory=is_full, num_threads=num_threads
        )
        if self._draft is not None and self._draft.draft.algorithm == "NEXTN":
            opened = opened_prediction(files, self._config.spec)
            if opened is not None:
                ready[DRAFT] = load_draft(
                    opened, self._draft, dtype=self._dtype, in_host_memory=is_full, num_threads=num_threads
                )
        return ready


@contextmanager
def refusing(directory: str = "") -> Generator[None]:
    """Turn any fault of weights into a WeightsRefusedError of a single line, without the path of a checkpoint."""
    try:
        yield
    except (CheckpointError, UnsupportedModelError) as error:
        message = _without_place(str(error), directory) if directory else str(error)
        raise WeightsRefusedError(one_line(message)) from error
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        raise WeightsRefusedError("a host has no memory for the new weights beside the old weights") from error
    except Exception as error:
        log.exception("a checkpoint could not be read")
        raise WeightsRefusedError(f"the checkpoint cannot be read ({type(error).__name__})") from error


def _put(ready: Any, serving: Any) -> Any:
    """Return a tree of device arrays; staged parameters in host memory replace the current ones.

    Parameters that are not in the tree keep their current value.
    """
    if isinstance(ready, dict):
        return {key: _put(ready[key], node) if key in ready else node for key, node in serving.items()}
    if isinstance(ready, StagedParameter):
        serving.delete()
        return ready.on_devices()
    return ready


def _check_alike(found: ModelSpec, served: ModelSpec) -> None:
    """Raise CheckpointError with the names of differing fields; weights of another dtype are converted."""
    here, there = (dict(_knobs(spec)) for spec in (found, served))
    differing = [name for name in here | there if here.get(name) != there.get(name)]
    if differing:
        raise CheckpointError(f"the checkpoint is of another model: {', '.join(differing)} differ")


def _knobs(spec: ModelSpec) -> Iterator[tuple[str, Any]]:
    """Yield the fields that weights depend on, by name; fields of mixers by their own names, and kinds if several."""
    for part in dataclasses.fields(spec):
        if part.name == "mixers":
            for mixer in spec.mixers:
                of_kind = f"{mixer.kind}." if len(spec.mixers) > 1 else ""
                for knob in dataclasses.fields(cast(Any, mixer)):
                    yield of_kind + knob.name, getattr(mixer, knob.name)
        elif part.name not in OF_FILES:
            yield part.name, getattr(spec, part.name)


def _without_place(message: str, directory: str) -> str:
    """Return a message without the path that the client gave, plain or in Python's quoting."""
    place = directory.rstrip("/") if is_url(directory) else str(Path(directory))
    for spelled in (place, repr(place)[1:-1]):
        message = message.replace(f"{spelled}/", "").replace(spelled, "the checkpoint")
    return message


@dataclass
class _Reading:
    """Reading of a checkpoint."""

    given_up: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    refusal: str = ""
    """Reason of a rejection, empty on success; valid once it is `done`."""


class WeightReading:
    """Reads checkpoints in sequence into `StagedWeights`. A cancelled read does not delay later reads."""

    def __init__(self, staged: StagedWeights) -> None:
        self._staged = staged
        self._threads: list[threading.Thread] = []
        self._current = _Reading(refusal=GIVEN_UP)
        self._current.done.set()

    def begin(self, model_path: str, expert_of_slot: np.ndarray | None) -> None:
        """Read a checkpoint as `StagedWeights.read`; an earlier read is cancelled."""
        self.give_up()
        self.run(lambda given_up: self._staged.read(model_path, expert_of_slot, given_up=given_up))

    def run(self, call: Callable[[threading.Event], None]) -> None:
        """Run a call that may raise WeightsRefusedError or be cancelled by the event; no other call may be running."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._current = reading = _Reading()
        if len(self._threads) >= MAX_STUCK:
            reading.refusal = f"{len(self._threads)} earlier reads still hang"
            reading.done.set()
            return
        thread = threading.Thread(target=_run, args=(reading, call), name="weights", daemon=True)
        self._threads.append(thread)
        thread.start()

    def outcome(self, timeout_s: float = 0.0) -> str | None:
        """Wait for the read and return its rejection, empty if the weights are staged; None if it still runs."""
        reading = self._current
        return reading.refusal if reading.done.wait(timeout_s) else None

    def give_up(self) -> None:
        """Cancel the current read and drop its staged weights."""
        reading = self._current
        reading.given_up.set()
        self._staged.drop()
        if not reading.done.is_set():
            reading.refusal = GIVEN_UP
            reading.done.set()


def _run(reading: _Reading, call: Callable[[threading.Event], None]) -> None:
    try:
        call(reading.given_up)
    except WeightsRefusedError as refusal:
        reading.refusal = str(refusal)
    reading.done.set()


def too_late(timeout_s: float) -> WeightsRefusedError:
    """Return the rejection of weights that were not read within `staging_timeout_s`."""
    return WeightsRefusedError(f"the weights were not read within staging_timeout_s = {timeout_s:g} s")
