"""Block sizes stay within what a chip has, for every layout that is served."""

from __future__ import annotations

import itertools

import pytest

from rayserve_moe.kernels.tpu.attention_blocks import (
    CHIPS,
    PAGE_TABLE_BYTES,
    AttentionShape,
    decode_blocks,
    prefill_blocks,
    sequences_per_call,
)

HEADS = [(32, 4), (64, 4), (16, 2), (8, 1), (4, 1), (128, 1), (64, 64)]
LAYOUTS = [
    AttentionShape(*heads, 128, page_size, width, itemsize)
    for heads, page_size, width, itemsize in itertools.product(HEADS, [1, 16, 128, 256], [1, 32, 2560], [1, 2, 4])
]
CHOICES = pytest.mark.parametrize("choose", [decode_blocks, prefill_blocks])


def buffer_bytes(shape: AttentionShape, num_pages: int, num_queries: int) -> int:
    """Both buffers of keys and values, queries and results twice each, sums and statistics in float32."""
    keys = 2 * num_pages * shape.page_size * 2 * shape.num_kv_heads * shape.head_dim * shape.kv_itemsize
    queries = 4 * num_queries * shape.num_heads * shape.head_dim * 4
    sums = 3 * num_queries * shape.num_heads * 128 * 4
    return keys + queries + sums


@CHOICES
@pytest.mark.parametrize("chip", CHIPS)
def test_buffers_fit_the_limit(choose, chip):
    for shape in LAYOUTS:
        blocks = choose(shape, chip=chip)
        assert 1 <= blocks.num_pages <= shape.table_width and blocks.num_queries >= 1
        if blocks.num_pages > 1:
            assert buffer_bytes(shape, blocks.num_pages, blocks.num_queries) < blocks.vmem_limit_bytes, shape


@CHOICES
def test_larger_caches_get_no_larger_blocks(choose):
    for shape in LAYOUTS:
        wide = AttentionShape(shape.num_heads, shape.num_kv_heads, 128, shape.page_size, shape.table_width, 4)
        assert choose(wide, chip="v6e").num_pages <= choose(shape, chip="v6e").num_pages


def test_page_tables_fit_scalar_memory():
    for width in (1, 127, 128, 129, 4096):
        padded = -(-width // 128) * 128
        assert sequences_per_call(width) * padded * 4 <= PAGE_TABLE_BYTES
    assert sequences_per_call(1 << 20) == 1


@CHOICES
def test_an_unknown_chip_is_refused(choose):
    with pytest.raises(ValueError, match="no block sizes for TPU v4; there are v5e, v5p, v6e, 7x"):
        choose(LAYOUTS[0], chip="v4")
