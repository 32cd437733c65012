"""The tracer sees the functions that run and the instances that are made."""

from __future__ import annotations

import threading

from benchmarks.tracer import Tracer
from rayserve_moe.requests.records import SamplingParams
from rayserve_moe.scheduling.pages import PageAllocator
from rayserve_moe.scheduling.prefix_tree import PrefixTree


def test_a_trace_tells_what_was_made_from_what_was_there_and_what_ran_from_what_was_passed():
    tracer, pages = Tracer(), PageAllocator(8)
    with tracer.installed():
        with tracer.recording() as trace:
            PrefixTree(pages, page_size=4)
            assert pages.num_free
            assert SamplingParams().n
        pages.check_integrity({})
    assert PageAllocator in trace.used and PageAllocator not in trace.created
    assert {PrefixTree, SamplingParams} <= set(trace.created)
    assert "scheduling/pages.PageAllocator.num_free" in trace.functions
    assert "scheduling/pages.PageAllocator.check_integrity" not in trace.functions
    assert trace.packages == ["scheduling"], "generated constructors are no functions of ours"
    assert {"scheduling/pages", "scheduling/prefix_tree"} <= set(trace.modules)


def test_threads_that_start_under_the_tracer_are_seen_and_the_hook_leaves():
    tracer = Tracer()
    with tracer.installed(), tracer.recording() as trace:
        thread = threading.Thread(target=PageAllocator, args=(8,))
        thread.start()
        thread.join()
    with tracer.recording() as after:
        PageAllocator(8)
    assert list(trace.created) == [PageAllocator]
    assert not after.functions
