"""What is left out of garbage collections, and for how long."""

from __future__ import annotations

import gc
import weakref

from rayserve_moe.cluster.startup_memory import frozen


class Ring:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


def test_a_block_leaves_out_what_was_there_and_collects_it_later() -> None:
    ring = Ring()
    before, num_before = weakref.ref(ring), gc.get_freeze_count()
    with frozen():
        assert gc.get_freeze_count() > num_before
        during = weakref.ref(Ring())
        del ring
        gc.collect()
        assert before() is not None and during() is None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert before() is None
