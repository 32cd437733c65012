"""Block sizes of the paged attention kernel: plain numbers, one row per chip, one rule per kind of chunk.

The kernel copies the keys and values of a sequence into VMEM block by block, double buffered, and multiplies them with
a block of queries. Decode waits for memory, so its blocks of keys are large, and a block of queries holds one sequence.
Prefill computes, so its blocks of queries are large: 512 rows of queries times heads for every KV head.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
PREFILL_ROWS = 512
DECODE_ROWS = 8
"""Query rows per KV head: a full pass of the matrix unit in prefill, one register tile in decode."""
MOST_QUERY_ROWS = 4096
"""Queries times heads per block, where every head has keys of its own."""
MOST_KEYS = {"decode": 1024, "prefill": 512}
"""Key positions per block. A block is read whole, so more would read too much of short sequences."""
MOST_PAGES = 32
"""Pages per block: each is one copy of its own in the program."""
PAGE_TABLE_BYTES = 768 << 10
"""Part of the 1 MiB of scalar memory that one call may fill with page ids."""
SCALAR_LANES = 128
"""Scalar memory keeps every row of a table padded to as many words."""


@dataclass(frozen=True)
class ChipLimits:
    """What a chip allows the kernel, bytes: keys and values of one block, and VMEM per kind of chunk.

    A block of keys and values covers what memory delivers in some 0.6 us. The VMEM limits leave at least half of the
    chip's VMEM to everything else.
    """

    kv_block_bytes: int
    decode_vmem_bytes: int
    prefill_vmem_bytes: int


CHIPS: dict[str, ChipLimits] = {
    "v5e": ChipLimits(MIB // 2, 16 * MIB, 48 * MIB),
    "v5p": ChipLimits(2 * MIB, 16 * MIB, 32 * MIB),
    "v6e": ChipLimits(MIB, 16 * MIB, 48 * MIB),
    "7x": ChipLimits(2 * MIB, 16 * MIB, 32 * MIB),
}


@dataclass(frozen=True)
class AttentionShape:
    """The shapes that block sizes follow from; heads are those of one device, the table is that of one call."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    table_width: int
    kv_itemsize: int


@dataclass(frozen=True)
class KernelBlocks:
    """Queries and KV pages per block, and the VMEM that the kernel may take, bytes."""

    num_queries: int
    num_pages: int
    vmem_limit_bytes: int


def limits_of(chip: str) -> ChipLimits:
    """The limits of a chip; ValueError lists those that have block sizes."""
    if chip not in CHIPS:
        raise ValueError(f"paged attention has no block sizes for TPU {chip}; there are {', '.join(CHIPS)}")
    return CHIPS[chip]


def decode_blocks(shape: AttentionShape, *, chip: str) -> KernelBlocks:
    """Block sizes for single tokens; ValueError for an unknown chip."""
    limits = limits_of(chip)
    num_pages = _pages(shape, most_keys=MOST_KEYS["decode"], most_bytes=limits.kv_block_bytes)
    return KernelBlocks(_queries(shape, DECODE_ROWS), num_pages, limits.decode_vmem_bytes)


def prefill_blocks(shape: AttentionShape, *, chip: str) -> KernelBlocks:
    """Block sizes for prefill chunks; ValueError for an unknown chip."""
    limits = limits_of(chip)
    num_pages = _pages(shape, most_keys=MOST_KEYS["prefill"], most_bytes=2 * MIB)
    return KernelBlocks(_queries(shape, PREFILL_ROWS), num_pages, limits.prefill_vmem_bytes)


def sequences_per_call(table_width: int) -> int:
    """How many rows of page ids fit into the scalar memory of one call; at least one."""
    padded = -(-table_width // SCALAR_LANES) * SCALAR_LANES
    return max(1, PAGE_TABLE_BYTES // (4 * padded))


def _queries(shape: AttentionShape, rows: int) -> int:
    return max(1, min(rows * shape.num_kv_heads, MOST_QUERY_ROWS) // shape.num_heads)


def _pages(shape: AttentionShape, *, most_keys: int, most_bytes: int) -> int:
    """KV pages per block, within the bounds and no more than a sequence has."""
    bytes_per_key = 2 * shape.num_kv_heads * shape.head_dim * shape.kv_itemsize
    keys = min(most_keys, most_bytes // bytes_per_key)
    return max(1, min(keys // shape.page_size, MOST_PAGES, shape.table_width))
