"""Loads of LoRA adapters: merged into the configured checkpoint by orders, or held beside the weights."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from rayserve_moe.checkpoints.bucket import SentAdapter
from rayserve_moe.engine.adapters import AdapterTable, LoadedAdapter, adapter_key, check_name
from rayserve_moe.engine.command_queue import CommandQueue
from rayserve_moe.engine.executor import Executor, ExecutorFailure
from rayserve_moe.engine.updates.orders import WeightOrder, WeightOutcome
from rayserve_moe.engine.updates.tensors import BucketOrder
from rayserve_moe.requests.records import WeightsRefusedError

LOST_WHILE_LOADING = "a host was lost while hosts read the adapter: it is not loaded"


def load_fault(merged: str | None) -> str:
    """Return why no adapter can be loaded, or empty. `merged` is the merged adapter, None for other weights."""
    if merged is not None:
        return ""
    return (
        "the serving weights came by an update, and adapters are merged into the configured checkpoint: "
        "load that by /update_weights_from_disk first"
    )


def unload_fault(merged: str | None, name: str) -> str:
    """Return why the adapter `name` cannot be unloaded, or empty."""
    if merged and merged == name:
        return ""
    return "no adapter of that name is loaded" + (f": `{merged}` is" if merged else "")


def adapter_order(name: str, *, weight_version: str | None = None, aborts_requests: bool = False) -> BucketOrder:
    """Return the order of an update by an adapter's body; an empty `name` restores the configured checkpoint."""
    order = WeightOrder("", weight_version, aborts_requests=aborts_requests, adapter=name)
    return BucketOrder(f"adapter-{uuid.uuid4().hex}", order, 0, is_last=True)


@dataclass
class AdapterLoads:
    """Loads of adapters beside the weights, without a pause. Requests that run keep the adapter that they began with.

    Calls may come from any thread; the update thread runs them.
    """

    table: AdapterTable
    executor: Executor
    commands: CommandQueue
    updates: ThreadPoolExecutor
    version: Callable[[], str]
    """Return the current weight version."""
    generation: Callable[[], int]
    """Return the generation of the hosts."""
    record_loss: Callable[..., None]
    """Record the loss of a host, in the engine thread."""

    def load(self, adapter: SentAdapter, name: str, *, path: str = "") -> Future[WeightOutcome]:
        """Have every host hold an adapter, then answer requests of its name by it."""
        self.commands.check_open()
        return self.updates.submit(self._load, adapter, LoadedAdapter(name, path, adapter.body))

    def unload(self, name: str) -> Future[WeightOutcome]:
        """Reject later requests of a name."""
        self.commands.check_open()
        return self.updates.submit(self._unload, name)

    def _load(self, adapter: SentAdapter, loaded: LoadedAdapter) -> WeightOutcome:
        key, generation = adapter_key(loaded.name, adapter), self.generation()
        try:
            check_name(loaded.name)
            if key not in self.table.loaded:
                self.executor.adapters.add(key, adapter)
        except WeightsRefusedError as refusal:
            return WeightOutcome(False, str(refusal), self.version())
        except ExecutorFailure as failure:
            self.commands.call(partial(self.record_loss, failure, generation=generation)).result()
            return WeightOutcome(False, LOST_WHILE_LOADING, self.version())
        dropped = self.commands.call(partial(self._record, key, loaded)).result()
        if isinstance(dropped, str):
            self._drop([key], generation=generation)
            return WeightOutcome(False, dropped, self.version())
        self._drop(dropped, generation=generation)
        return WeightOutcome(True, f"{key} serves", self.version())

    def _record(self, key: str, loaded: LoadedAdapter) -> list[str] | str:
        """Record a loaded adapter; return the keys to drop, or why it is refused."""
        with self.commands.lock:
            try:
                return self.table.record(key, loaded)
            except WeightsRefusedError as refusal:
                return str(refusal)

    def _unload(self, name: str) -> WeightOutcome:
        if name not in self.table.current:
            return WeightOutcome(False, unload_fault("", name), self.version())
        generation = self.generation()
        self._drop(self.commands.call(partial(self._forget, name)).result(), generation=generation)
        return WeightOutcome(True, "the adapter is unloaded", self.version())

    def _forget(self, name: str) -> list[str]:
        with self.commands.lock:
            return self.table.unload(name)

    def _drop(self, keys: Sequence[str], *, generation: int) -> None:
        """Drop adapters from the hosts. If a host is lost meanwhile, its replacement does not receive them."""
        try:
            self.executor.adapters.drop(keys)
        except ExecutorFailure as failure:
            self.commands.call(partial(self.record_loss, failure, generation=generation)).result()
