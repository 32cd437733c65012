"""Memory sizing: number of KV pages and state entries that fit into free memory."""

from __future__ import annotations

import ctypes
import gc
import math
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from rayserve_moe.config.derive import max_useful_pages
from rayserve_moe.config.settings import CacheSettings, SchedulerSettings, SettingsError
from rayserve_moe.model.states import KeptState
from rayserve_moe.parallel.sharding import ParallelPlan
from rayserve_moe.state.groups import EntryGroup, PageGroup, page_groups
from rayserve_moe.state.kinds import StateKind


@dataclass(frozen=True)
class EntrySizes:
    """An entry kind of a model, and its bytes on a device, over all layers."""

    kind: StateKind
    entry_bytes: int
    ring_bytes: int
    """Bytes of a row besides its entries."""
    page_bytes: int
    """Bytes of a page of all token kinds."""

    def group(self, num_pages: int, *, scheduler: SchedulerSettings, cache: CacheSettings) -> EntryGroup:
        """Return the entries beside `num_pages` pages of a data rank: two for each row, and entries of cached prefixes.

        The latter take `state_fraction` of the memory that they share with pages.
        """
        share = cache.state_fraction / (1 - cache.state_fraction)
        num_kept = int(num_pages * self.page_bytes * share) // self.entry_bytes
        num_ends = num_pages * cache.page_size // self.kind.entry_tokens
        num_kept = min(num_kept, num_ends) if cache.enable_prefix_caching else 0
        num_entries = 1 + 2 * scheduler.max_running_requests + num_kept
        return EntryGroup(self.kind.name, self.kind.entry_tokens, num_entries, cache.state_interval)


class LayerSize(NamedTuple):
    """A layer with pages."""

    window: int
    """Number of positions that a query sees; 0: all."""
    page_bytes: int
    """Bytes of a page on a device."""


@dataclass(frozen=True)
class PoolSizes:
    """Division of the page pool between layers."""

    layers: tuple[LayerSize, ...]
    """All layers with pages."""
    scheduler: SchedulerSettings
    cache: CacheSettings
    entries: tuple[EntrySizes, ...] = ()

    def groups(self, num_pages: int) -> tuple[PageGroup, ...]:
        """Return the groups of layers, for sequences that hold up to `num_pages` pages on a data rank."""
        windows = (layer.window for layer in self.layers)
        return page_groups(windows, num_pages, scheduler=self.scheduler, cache=self.cache)

    def layer_bytes(self, num_pages: int) -> int:
        """Return the bytes of the pages of all layers together."""
        sizes = dict(self.groups(num_pages))
        return sum(sizes[layer.window] * layer.page_bytes for layer in self.layers)

    def entry_groups(self, num_pages: int) -> tuple[EntryGroup, ...]:
        """Return the groups of layers with entries, beside `num_pages` pages of a data rank."""
        return tuple(each.group(num_pages, scheduler=self.scheduler, cache=self.cache) for each in self.entries)

    def entry_bytes(self, num_pages: int) -> int:
        """Return the bytes of the entries and rings of a data rank on one device."""
        num_rows = self.scheduler.max_running_requests
        return sum(
            group.num_entries * each.entry_bytes + num_rows * each.ring_bytes
            for each, group in zip(self.entries, self.entry_groups(num_pages), strict=True)
        )

    def num_pages_within(self, free: int, *, longest: int, extra_page_bytes: int = 0) -> int:
        """Return `num_pages_that_fit` for sequences of up to `longest` tokens.

        A page of a sequence takes `extra_page_bytes` besides the pages of layers.
        """
        return num_pages_that_fit(
            self.cache,
            bytes_of=lambda num_pages: (
                self.layer_bytes(num_pages) + extra_page_bytes * num_pages + self.entry_bytes(num_pages)
            ),
            free=free,
            max_useful=max_useful_pages(self.scheduler, self.cache, max_tokens=longest),
        )


def page_bytes(states: Iterable[KeptState], *, page_size: int, dtype: str, plan: ParallelPlan) -> int:
    """Return the bytes of a page of all layers on a device; `dtype` is the dtype of the KV cache."""
    return sum(state.num_layers * page_size * state.row_bytes(plan, dtype=dtype) for state in states)


def bytes_on_device(tree: object) -> int:
    """Return the bytes on a device of the arrays in a tree of shapes."""
    return sum(local_elements(leaf) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def local_elements(leaf: Any) -> int:
    """Return the number of elements of an array, or of its shape, on a device."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape))


def free_bytes(devices: list[jax.Device]) -> int:
    """Return the free memory of the fullest local device.

    Emulated devices share the host's available memory, rounded down: it differs from start to start, and compiled
    programs are only found for the same number of pages.
    """
    free = _bytes_beyond("bytes_in_use", devices)
    return free if all(device.memory_stats() for device in devices) else rounded_down(free)


def rounded_down(number: int) -> int:
    """Return a number rounded down to its four leading bits, by at most an eighth."""
    return number >> (bits := max(0, number.bit_length() - 4)) << bits


def spare_bytes(devices: list[jax.Device]) -> int:
    """Return the memory of the fullest local device that no step has needed; for emulated devices all free memory."""
    return _bytes_beyond("peak_bytes_in_use", devices)


class NoPagesError(SettingsError):
    """The memory beside the weights holds fewer than two pages."""


def largest_8_bit(tree: object) -> int:
    """Return the bytes on a device of the largest array of 8 bits in a tree of shapes; 0 without one."""
    return max((local_elements(leaf) for leaf in jax.tree.leaves(tree) if leaf.dtype.itemsize == 1), default=0)


def num_pages_that_fit(cache: CacheSettings, *, bytes_of: Callable[[int], int], free: int, max_useful: int) -> int:
    """Return the pages for `mem_fraction` of `free` bytes, at most `max_useful`; an explicit `num_pages` is kept.

    `bytes_of(n)` are the bytes of the pool of all layers for n pages of sequences; it grows with n.

    Raises: NoPagesError if fewer than two pages fit; the first holds padding.
    """
    if cache.num_pages:
        return cache.num_pages
    fitting = bisect_right(range(max_useful + 1), int(free * cache.mem_fraction), key=bytes_of) - 1
    if fitting < 2:
        raise NoPagesError(
            f"mem_fraction {cache.mem_fraction}: no two KV pages of {bytes_of(1)} bytes fit into {free} free bytes"
        )
    return fitting


def memory_available() -> int:
    """Return the bytes of host memory that are available without swapping."""
    return _meminfo("MemAvailable")


def memory_total() -> int:
    """Return the bytes of host memory."""
    return _meminfo("MemTotal")


def _meminfo(name: str) -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


class FreedMemory:
    """Returns the memory of deleted arrays to the system, from a single thread.

    A thread that waits keeps its arena of malloc, with all memory that was freed there. With a thread for each weight
    update, the next update takes another arena and fills it anew.
    """

    def __init__(self) -> None:
        self._requested, self._lock = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None

    def request(self) -> None:
        """Return freed memory in a second, and twice later, because XLA's threads hold it for a while."""
        self._requested.set()
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, daemon=True)
                self._thread.start()

    def _serve(self) -> None:
        while self._requested.wait():
            self._requested.clear()
            time.sleep(1.0)
            _return_freed()
            for wait_s in (10.0, 30.0):
                if self._requested.wait(wait_s):
                    break
                _return_freed()


FREED_MEMORY = FreedMemory()
"""Instance of this process. All runners share its garbage collector and its malloc."""


def _return_freed() -> None:
    """Collect the host copies that jax keeps, and the memory that malloc of glibc keeps."""
    gc.collect(0)
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def _bytes_beyond(used: str, devices: list[jax.Device]) -> int:
    """Return the minimum over devices of memory beyond `used`, a name of their statistics; 0 without that statistic."""
    stats = [device.memory_stats() for device in devices]
    if all(stats):
        return min(s["bytes_limit"] - s.get(used, s["bytes_limit"]) for s in stats if s)
    return memory_available() // len(devices)
