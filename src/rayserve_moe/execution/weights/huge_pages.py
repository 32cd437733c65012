"""Huge pages of 2 MiB for arrays of CPU devices.

A decode step reads all its weights. With pages of 4 KiB it also waits for the translation of their addresses.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterable, Iterator

import jax

HUGE_PAGE_BYTES = 2 << 20
ADVICE = {"MADV_HUGEPAGE": 14, "MADV_COLLAPSE": 25}
"""Advice to the kernel for each array, in order: to allow huge pages, and to make them now (Linux 6.1)."""
log = logging.getLogger(__name__)


def use_huge_pages(arrays: Iterable[jax.Array]) -> int:
    """Move the host memory of `arrays` to huge pages; return the number of bytes on huge pages.

    Contents and addresses stay. If the kernel does not support the advice or has no such pages, arrays stay unchanged.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    num_bytes = 0
    for begin, end in _whole_pages(arrays):
        failed = [name for name, number in ADVICE.items() if libc.madvise(begin, end - begin, number)]
        if failed:
            log.debug("no huge pages: %s: %s", failed[0], os.strerror(ctypes.get_errno()))
        else:
            num_bytes += end - begin
    return num_bytes


def _whole_pages(arrays: Iterable[jax.Array]) -> Iterator[tuple[int, int]]:
    """Yield the address ranges of the huge pages that lie entirely within an array."""
    for array in arrays:
        for shard in array.addressable_shards:
            address, size = shard.data.unsafe_buffer_pointer(), shard.data.nbytes
            begin = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
            end = (address + size) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
            if begin < end:
                yield begin, end
