"""Evicted pages of this host's devices in slots of host memory, copied by threads while steps run."""

# M copies   P places   R data ranks

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from rayserve_moe.config.settings import SettingsError
from rayserve_moe.execution.memory import memory_available
from rayserve_moe.execution.served_model import ServedModel
from rayserve_moe.execution.step.page_moves import MAX_MOVES, MovedShape, PageArrays, moved_shapes, num_places
from rayserve_moe.execution.step.pytrees import DeviceState
from rayserve_moe.scheduling.host_slots import PageSlots, SlotBytes
from rayserve_moe.scheduling.step_plan import NO_SLOT, CopyTimes, HostSizes, PageMoves, StepResult

MIB = 1 << 20
MAX_COPIES_BEHIND = 8
"""Maximum number of unfinished copies out of the devices. Each holds memory of the devices."""
SLOT, ENTRY_SLOT, PLACES = 1, 2, 3
"""Columns of `PageMoves`."""
LAUNCH_S = 30.0
"""Maximum wait for the launch of a step whose copies come first."""
LAYOUT, CHECKSUM = "layout", "checksum"
"""Faults of pages of another replica."""


class PagePrograms(NamedTuple):
    """Programs that copy pages."""

    read: Callable[..., PageArrays]
    """Takes DeviceState and places int32 [R, M, P]."""
    write: Callable[..., DeviceState]
    """Takes DeviceState, places and `pages`."""


class _Batch(NamedTuple):
    """Copies of a program: places, and by data rank the columns SLOT and ENTRY_SLOT."""

    places_RMP: np.ndarray
    slots: list[np.ndarray]


class PageStore:
    """Slots for pages and entries of each device's shards, and a thread per device, which copies in the order of plans.

    `move` runs where steps are launched; the threads wait for the devices.
    """

    def __init__(self, served: ServedModel, num_pages: int) -> None:
        config, state = served.step_config(num_pages), served.state(num_pages)
        self._shapes, self._num_places = moved_shapes(state, config), num_places(config)
        self._num_ranks = config.model.plan.data_size
        self.sizes = store_sizes(served, self._shapes)
        self.page_bytes = _row_bytes(self._shapes, is_entry=False)
        """Bytes of a page on a device, without entries."""
        self._slots = [self._allocate(shape) for shape in self._shapes]
        self._ranks = _ranks_of(self._shapes[0])
        """Data rank of each device of this host."""
        self._threads = {device: ThreadPoolExecutor(1, f"page-copies-{device.id}") for device in self._ranks}
        self._copies: list[list[Future[Any]]] = []
        self._restored: list[tuple[np.ndarray, list[Future[list[jax.Array]]]]] = []
        """Places, and rows by device, that the next plan writes."""
        self._num_copied, self._copy_s = 0, 0.0
        self._launched, self._launches = -1, threading.Condition()
        """Last step whose copies have begun."""

    def move(
        self, state: DeviceState, moves: PageMoves | None, *, programs: PagePrograms, step_id: int = -1
    ) -> DeviceState:
        """Write the pages that the plan before has restored, then begin the copies of this plan."""
        state = self._move(state, moves, programs)
        with self._launches:
            self._launched = max(self._launched, step_id)
            self._launches.notify_all()
        return state

    def read(self, pages: PageSlots) -> dict[int, SlotBytes]:
        """Return the bytes of pages on each device of this host, by its place in the data rank, after their copies.

        Raises: TimeoutError if the step of the copies is not launched.
        """
        self._await(pages.after_step)
        places = self.places(pages.data_rank)
        reads = {place: self._threads[device].submit(self._read, device, pages) for device, place in places.items()}
        return {place: read.result() for place, read in reads.items()}

    def write(self, pages: PageSlots, shares: Mapping[int, SlotBytes]) -> list[str]:
        """Write pages of another replica into slots, with the result of `read` there.

        Returns: the fault of each page, empty if it is written: LAYOUT if a share is absent or has another shape,
            CHECKSUM if its bytes have changed.

        Raises: TimeoutError if the step of earlier copies is not launched.
        """
        self._await(pages.after_step)
        writes = [
            self._threads[device].submit(self._write, device, pages, shares.get(place))
            for device, place in self.places(pages.data_rank).items()
        ]
        faults = [write.result() for write in writes]
        return [next(filter(None, of_page), "") for of_page in zip(*faults, strict=True)] or [""] * len(pages.slots)

    def places(self, data_rank: int) -> dict[jax.Device, int]:
        """Return the place of each device of this host in a data rank."""
        shape = self._shapes[0].rows
        devices = sorted(shape.sharding.device_set, key=lambda device: device.id)
        ranks = _ranks_in(shape.sharding.devices_indices_map(shape.shape), self._shapes[0])
        of_rank = [device for device in devices if ranks[device] == data_rank]
        return {device: place for place, device in enumerate(of_rank) if device in self._ranks}

    def _await(self, step_id: int) -> None:
        with self._launches:
            if not self._launches.wait_for(lambda: self._launched >= step_id, LAUNCH_S):
                raise TimeoutError(f"step {step_id} was not launched within {LAUNCH_S} s")

    def _read(self, device: jax.Device, pages: PageSlots) -> SlotBytes:
        arrays = []
        for shape, slots in zip(self._shapes, self._slots, strict=True):
            numbers = pages.slots[:, int(shape.is_entry)]
            arrays.append(slots[device][numbers[numbers != NO_SLOT]])
        return SlotBytes(tuple(arrays), self._checksums(arrays, pages.slots))

    def _write(self, device: jax.Device, pages: PageSlots, share: SlotBytes | None) -> list[str]:
        """Write the pages of a device; return the fault of each."""
        if share is None or not self._fits(share, device, pages.slots):
            return [LAYOUT] * len(pages.slots)
        is_same = self._checksums(share.arrays, pages.slots) == share.checksums[: len(pages.slots)]
        for shape, slots, array in zip(self._shapes, self._slots, share.arrays, strict=True):
            numbers = pages.slots[:, int(shape.is_entry)]
            numbers = numbers[numbers != NO_SLOT]
            slots[device][numbers] = array[: len(numbers)]
        return ["" if same else CHECKSUM for same in is_same.tolist()]

    def _fits(self, share: SlotBytes, device: jax.Device, slots: np.ndarray) -> bool:
        """Return True if the arrays of a share begin with a row of this device's slots for each page."""
        counts = np.count_nonzero(slots != NO_SLOT, axis=0)
        return (len(share.arrays), len(share.checksums) >= len(slots)) == (len(self._shapes), True) and all(
            (array.shape[1:], array.dtype) == (own[device].shape[1:], own[device].dtype)
            and len(array) >= counts[int(shape.is_entry)]
            for shape, own, array in zip(self._shapes, self._slots, share.arrays, strict=True)
        )

    def _checksums(self, arrays: Sequence[np.ndarray], slots: np.ndarray) -> np.ndarray:
        """Return the CRC-32 of each page over its rows in all pools, uint32 [N]."""
        sums = np.zeros(len(slots), np.uint32)
        for shape, array in zip(self._shapes, arrays, strict=True):
            pages = np.flatnonzero(slots[:, int(shape.is_entry)] != NO_SLOT)
            for page, rows in zip(pages.tolist(), array, strict=False):
                sums[page] = zlib.crc32(np.ascontiguousarray(rows).view(np.uint8).data, int(sums[page]))
        return sums

    def _move(self, state: DeviceState, moves: PageMoves | None, programs: PagePrograms) -> DeviceState:
        for places, shards in self._restored:
            state = programs.write(state, places, pages=self._joined([shard.result() for shard in shards]))
        self._restored.clear()
        while len(self._copies) > MAX_COPIES_BEHIND:
            for copy in self._copies.pop(0):
                copy.result()
        if moves is None:
            return state
        for batch in self._batches(moves.offloads):
            rows = programs.read(state, batch.places_RMP)
            for array in rows:
                array.copy_to_host_async()
            shards = [{shard.device: shard.data for shard in array.addressable_shards} for array in rows]
            submitted = self._threads.items()
            self._copies.append([thread.submit(self._store, device, shards, batch) for device, thread in submitted])
        for batch in self._batches(moves.restores):
            shards = [thread.submit(self._load, device, batch) for device, thread in self._threads.items()]
            self._restored.append((batch.places_RMP, shards))
        return state

    def nothing(self) -> PageMoves:
        """Return moves that compile the programs: a page to slot 0, and back to no place."""
        idle = np.zeros((1, PLACES + self._num_places), np.int32)
        idle[:, ENTRY_SLOT] = NO_SLOT
        return PageMoves(idle, idle)

    def timed(self, result: StepResult) -> StepResult:
        """Return a result with the pages that were copied since the last call, and the seconds that it took."""
        num_copied, copy_s = self._num_copied, self._copy_s
        self._num_copied, self._copy_s = 0, 0.0
        return replace(result, copied=CopyTimes(num_copied, copy_s))

    def _allocate(self, shape: MovedShape) -> dict[jax.Device, np.ndarray]:
        count = self.sizes.num_entries if shape.is_entry else self.sizes.num_pages
        local = (shape.num_layers, *_local_shape(shape)[1:])
        return {device: np.empty((count, *local), shape.rows.dtype) for device in _ranks_of(shape)}

    def _batches(self, moves: np.ndarray) -> Iterator[_Batch]:
        if not len(moves):
            return
        of_ranks = [moves[moves[:, 0] == rank] for rank in range(self._num_ranks)]
        for first in range(0, max(map(len, of_ranks)), MAX_MOVES):
            some = [of_rank[first : first + MAX_MOVES] for of_rank in of_ranks]
            places = np.zeros((self._num_ranks, MAX_MOVES, self._num_places), np.int32)
            for rank, own in enumerate(some):
                places[rank, : len(own)] = own[:, PLACES:]
            yield _Batch(places, some)

    def _store(self, device: jax.Device, shards: list[dict[jax.Device, jax.Array]], batch: _Batch) -> None:
        """Copy a device's rows of a batch into their slots."""
        arrays = [np.asarray(of_devices[device]) for of_devices in shards]
        started, moves = time.perf_counter(), batch.slots[self._ranks[device]]
        for shape, slots, own in zip(self._shapes, self._slots, arrays, strict=True):
            numbers, places = _filled(moves, shape)
            slots[device][numbers] = own.reshape(MAX_MOVES, shape.num_layers, *own.shape[1:])[places]
        self._count(moves, started)

    def _load(self, device: jax.Device, batch: _Batch) -> list[jax.Array]:
        """Return a device's rows of a batch, from their slots."""
        started, moves, arrays = time.perf_counter(), batch.slots[self._ranks[device]], []
        for shape, slots in zip(self._shapes, self._slots, strict=True):
            own = np.zeros(_local_shape(shape), shape.rows.dtype)
            numbers, places = _filled(moves, shape)
            own.reshape(MAX_MOVES, shape.num_layers, *own.shape[1:])[places] = slots[device][numbers]
            arrays.append(jax.device_put(own, device))
        jax.block_until_ready(arrays)
        self._count(moves, started)
        return arrays

    def _joined(self, shards: list[list[jax.Array]]) -> PageArrays:
        """Return the arrays of all devices whose shards are given by device."""
        return tuple(
            jax.make_array_from_single_device_arrays(shape.rows.shape, shape.rows.sharding, of_devices)
            for shape, of_devices in zip(self._shapes, map(list, zip(*shards, strict=True)), strict=True)
        )

    def _count(self, moves: np.ndarray, started: float) -> None:
        self._num_copied += len(moves)
        self._copy_s += time.perf_counter() - started


def store_sizes(served: ServedModel, shapes: tuple[MovedShape, ...]) -> HostSizes:
    """Return the slots for each device of this host.

    Raises: SettingsError if the host lacks the memory, if it holds no page or no state of a prefix, or if no prefix is
        cached.
    """
    cache, num_devices = served.settings.cache, len(served.config.plan.mesh.local_devices)
    if not cache.enable_prefix_caching:
        raise SettingsError(f"host_cache_mib {cache.host_mib} needs enable_prefix_caching: true")
    if cache.host_mib * MIB > (available := memory_available()):
        raise SettingsError(f"host_cache_mib {cache.host_mib}: this host has {available // MIB} MiB available")
    page_bytes, entry_bytes = (_row_bytes(shapes, is_entry) for is_entry in (False, True))
    free = cache.host_mib * MIB // num_devices
    num_entries = int(free * cache.state_fraction) // entry_bytes if entry_bytes else 0
    num_pages = (free - num_entries * entry_bytes) // page_bytes
    if num_pages < 1:
        raise SettingsError(f"host_cache_mib {cache.host_mib}: a page takes {page_bytes} bytes of each device")
    if entry_bytes and num_entries < 1:
        raise SettingsError(
            f"host_cache_mib {cache.host_mib}: the states of a prefix take {entry_bytes} bytes of each device, and "
            f"state_fraction {cache.state_fraction} leaves less; raise either"
        )
    return HostSizes(num_pages, num_entries)


def _row_bytes(shapes: tuple[MovedShape, ...], is_entry: bool) -> int:
    """Return the bytes of a page, or of its entries, on a device."""
    sizes = (np.prod(_local_shape(each)) * each.rows.dtype.itemsize for each in shapes if each.is_entry == is_entry)
    return int(sum(sizes)) // MAX_MOVES


def _filled(moves: np.ndarray, shape: MovedShape) -> tuple[np.ndarray, np.ndarray]:
    """Return the slots of a rank's copies that have rows of this kind, and their indices."""
    slots = moves[:, ENTRY_SLOT if shape.is_entry else SLOT]
    places = np.flatnonzero(slots != NO_SLOT)
    return slots[places], places


def _local_shape(shape: MovedShape) -> tuple[int, ...]:
    return shape.rows.sharding.shard_shape(shape.rows.shape)


def _ranks_of(shape: MovedShape) -> dict[jax.Device, int]:
    """Return the data rank of each device of this host."""
    return _ranks_in(shape.rows.sharding.addressable_devices_indices_map(shape.rows.shape), shape)


def _ranks_in(indices: Mapping[jax.Device, Any], shape: MovedShape) -> dict[jax.Device, int]:
    """Return the data rank of each device, by the index of its rows."""
    size = MAX_MOVES * shape.num_layers
    return {device: (index[0].start or 0) // size for device, index in indices.items()}
