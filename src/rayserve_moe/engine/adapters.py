"""Adapters that requests name: which are loaded, which are resident on the devices, and their part of a step."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from rayserve_moe.checkpoints.bucket import SentAdapter
from rayserve_moe.config.adapters import AdapterSettings
from rayserve_moe.engine.extension import ReplacedHosts, Reset, StepExtension
from rayserve_moe.requests.records import GenerationRequest, RequestError, WeightsRefusedError
from rayserve_moe.scheduling.plan_builder import Schedule
from rayserve_moe.scheduling.row_table import RowTable
from rayserve_moe.scheduling.step_plan import AdapterWork

DIGEST_CHARACTERS = 12
_KEY = re.compile(rf"@[0-9a-f]{{{DIGEST_CHARACTERS}}}\Z")


class UnknownAdapterError(RequestError):
    """Error for a request of an adapter that is not loaded."""


def adapter_key(name: str, adapter: SentAdapter) -> str:
    """Return the key of an adapter: its name and a digest of its bytes.

    Prefixes, versions and journals name the key, so that other bytes under the same name are another adapter.
    """
    return f"{name}@{hashlib.sha256(adapter.body.data).hexdigest()[:DIGEST_CHARACTERS]}"


def check_name(name: str) -> None:
    """Raise WeightsRefusedError if a name is not printable or looks like an adapter's key.

    Resumed requests name their adapter by key; answers and logs contain names.
    """
    if not name.isprintable() or name != name.strip():
        raise WeightsRefusedError("adapter names must be printable, without spaces at their ends")
    if _KEY.search(name):
        raise WeightsRefusedError(f"adapter names may not end in @ and {DIGEST_CHARACTERS} hexadecimal digits")


class LoadedAdapter(NamedTuple):
    """An adapter in the memory of the hosts."""

    name: str
    path: str
    """Directory that it was read from; empty if it was sent."""
    body: np.ndarray
    """`SentAdapter.body`, for replicas that start later."""


@dataclass
class AdapterTotals:
    """Totals of a server with adapters."""

    num_loads: int = 0
    """Adapters that were made resident."""
    num_dropped: int = 0
    """Adapters that left host memory for others."""


class AdapterTable(StepExtension):
    """Loaded adapters by key, and the places of resident ones.

    `num_slots` adapters are resident. A step that needs another evicts the least recently used one that it does not
    need itself. `keys_in_use` returns the keys of live requests. `record` and `unload` run in the engine thread. They
    and `key_of` hold the lock of the command queue, so that no request of a dropped adapter is added meanwhile.
    """

    def __init__(
        self, settings: AdapterSettings, rows: RowTable, *, keys_in_use: Callable[[], Collection[str]]
    ) -> None:
        self._settings, self._rows, self._keys_in_use = settings, rows, keys_in_use
        self.current: dict[str, str] = {}
        """Key of each name."""
        self.loaded: dict[str, LoadedAdapter] = {}
        """Loaded adapters by key; other threads read it, so only `record` and `unload` change it."""
        self._slots: dict[str, int] = {}
        """Place of each resident adapter, least recently used first."""
        self._used_at: dict[str, int] = {}
        """Number of the last use of each loaded adapter; a load is a use."""
        self._num_uses = 0
        self._totals = AdapterTotals()

    def key_of(self, requested: str) -> str:
        """Return the key of an adapter, given its name or its key.

        Raises: UnknownAdapterError if it is not loaded.
        """
        key = self.current.get(requested, requested)
        if key not in self.loaded:
            names = ", ".join(f"`{name}`" for name in self.current) or "none"
            raise UnknownAdapterError(f"no such adapter is loaded (loaded: {names})", "lora_path")
        return key

    def record(self, key: str, adapter: LoadedAdapter) -> list[str]:
        """Record an adapter that all hosts hold; requests of its name take it from now on.

        Returns: the keys that leave host memory, those without a name and those least recently used.

        Raises: WeightsRefusedError if live requests use all others.
        """
        current, in_use = self.current | {adapter.name: key}, self._keys_in_use()
        idle = [each for each in self.loaded if each != key and each not in in_use]
        nameless = [each for each in idle if current.get(self.loaded[each].name) != each]
        count = max(0, len(self.loaded.keys() | {key}) - len(nameless) - self._settings.num_held)
        oldest = sorted((each for each in idle if each not in nameless), key=self._used_at.__getitem__)[:count]
        if len(oldest) < count:
            raise WeightsRefusedError(f"requests use all {self._settings.num_held} loaded adapters: see max_cpu_loras")
        for each in (*nameless, *oldest):
            self._forget(each)
        self._totals.num_dropped += len(oldest)
        self.loaded[key], self.current[adapter.name] = adapter, key
        self._record_use(key)
        return [*nameless, *oldest]

    def unload(self, name: str) -> list[str]:
        """Forget a name; requests that run keep its adapter. Returns: the keys that leave host memory."""
        self.current.pop(name, None)
        in_use = self._keys_in_use()
        nameless = [key for key, each in self.loaded.items() if self.current.get(each.name) != key]
        idle = [key for key in nameless if key not in in_use]
        for key in idle:
            self._forget(key)
        return idle

    def named(self) -> list[LoadedAdapter]:
        """Return the adapters that requests may name, least recently used first. Any thread may call it."""
        found = [(self._used_at.get(key, 0), self.loaded.get(key)) for key in [*self.current.values()]]
        return [adapter for _, adapter in sorted(found, key=lambda each: each[0]) if adapter is not None]

    def plan(self, schedule: Schedule, before: Schedule | None) -> Schedule:
        """Give every chunk the place of its adapter, and make missing adapters resident before the step."""
        plan = schedule.plan
        if not plan.num_chunks or not self.loaded:
            return schedule
        sequences = [self._rows.sequences[row] for row in plan.chunks.rows.tolist()]
        keys = ["" if sequence is None else sequence.request.adapter for sequence in sequences]
        needed = dict.fromkeys(filter(None, keys))
        if not needed:
            return schedule
        loads = tuple((self._make_resident(key, needed), key) for key in needed if key not in self._slots)
        for key in needed:
            self._slots[key] = self._slots.pop(key)
            self._record_use(key)
        slots = np.asarray([self._slots[key] if key else -1 for key in keys], np.int32)
        return replace(schedule, plan=replace(plan, adapters=AdapterWork(slots, loads)))

    def reset(self, cause: Reset) -> None:
        """Forget which adapters are resident if other hosts run."""
        if isinstance(cause, ReplacedHosts):
            self._slots.clear()

    def statistics(self) -> dict[str, float]:
        """Return the numbers of loaded and resident adapters, and totals."""
        return {
            "adapters_loaded": float(len(self.loaded)),
            "adapters_resident": float(len(self._slots)),
            "adapter_loads": float(self._totals.num_loads),
            "adapters_dropped": float(self._totals.num_dropped),
        }

    def _make_resident(self, key: str, needed: Collection[str]) -> int:
        """Return a free slot for an adapter, or evict the least recently used adapter that no chunk needs."""
        taken = self._slots.values()
        slot = next((each for each in range(self._settings.num_slots) if each not in taken), None)
        if slot is None:
            slot = self._slots.pop(next(each for each in self._slots if each not in needed))
        self._slots[key] = slot
        self._totals.num_loads += 1
        return slot

    def _record_use(self, key: str) -> None:
        self._num_uses += 1
        self._used_at[key] = self._num_uses

    def _forget(self, key: str) -> None:
        adapter = self.loaded.pop(key)
        self._slots.pop(key, None)
        self._used_at.pop(key, None)
        if self.current.get(adapter.name) == key:
            del self.current[adapter.name]


def with_key(request: GenerationRequest, table: AdapterTable | None, *, merged: str | None) -> GenerationRequest:
    """Return a request with the key of its adapter; none for the `merged` adapter, which is part of the weights.

    Raises: UnknownAdapterError if its adapter is not loaded.
    """
    if not request.adapter:
        return request
    if merged and request.adapter == merged and (table is None or merged not in table.current):
        return replace(request, adapter="")
    if table is None:
        raise UnknownAdapterError("no such adapter is loaded", "lora_path")
    return replace(request, adapter=table.key_of(request.adapter))
