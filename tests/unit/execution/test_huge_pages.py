"""Weights lie on huge pages where the kernel has them, and are what they were."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.execution.weights import huge_pages
from rayserve_moe.execution.weights.huge_pages import HUGE_PAGE_BYTES, use_huge_pages

NUM_PAGES = 5


def _array() -> jax.Array:
    return jnp.arange(NUM_PAGES * HUGE_PAGE_BYTES // 4, dtype=jnp.int32)


def _huge_bytes(array: jax.Array) -> int:
    """Bytes of huge pages in the mapping that holds an array's first whole one, as the kernel reports them."""
    address, here = array.unsafe_buffer_pointer() + HUGE_PAGE_BYTES, False
    with open("/proc/self/smaps", encoding="ascii") as lines:
        for line in lines:
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                begin, end = (int(part, 16) for part in first.split("-"))
                here = begin <= address < end
            elif here and first == "AnonHugePages:":
                return 1024 * int(line.split()[1])
    raise AssertionError("the array lies in no mapping")


def test_what_lies_on_huge_pages_is_what_it_was():
    array = _array()
    moved = use_huge_pages([array])
    if not moved:
        pytest.skip("this kernel makes no huge pages on demand")
    assert (NUM_PAGES - 1) * HUGE_PAGE_BYTES <= moved <= NUM_PAGES * HUGE_PAGE_BYTES
    assert _huge_bytes(array) >= moved
    np.testing.assert_array_equal(array, np.arange(array.size))


def test_arrays_below_one_page_are_left_alone():
    assert use_huge_pages([jnp.zeros(1000), jnp.zeros((0, 4))]) == 0


def test_a_kernel_without_them_leaves_arrays_as_they_are(monkeypatch, caplog):
    monkeypatch.setitem(huge_pages.ADVICE, "MADV_COLLAPSE", 9999)
    array = _array()
    with caplog.at_level(logging.DEBUG, logger=huge_pages.log.name):
        assert use_huge_pages([array]) == 0
    assert "MADV_COLLAPSE" in caplog.text and "Invalid argument" in caplog.text
    np.testing.assert_array_equal(array, np.arange(array.size))
