"""The tracer sees what runs and what is made, and lines are counted by what they hold."""

from __future__ import annotations

import threading

from benchmarks.house import lines_of, size_of
from benchmarks.tracer import Tracer
from rayserve_moe.requests import SamplingParams
from rayserve_moe.scheduling.pages import PageAllocator
from rayserve_moe.scheduling.prefix_tree import PrefixTree


def test_every_line_is_of_one_kind():
    text = '"""Doc."""\n\n# why\nx = 1  # inline\n\n\ndef f():\n    """Two\n    lines."""\n    return """no\ndoc"""\n'
    assert lines_of(text) == {"code": 4, "docstrings": 3, "comments": 1, "blank": 3}
    assert sum(lines_of(text).values()) == len(text.splitlines())


def test_a_flag_is_counted_by_places_and_by_files(tmp_path):
    package = tmp_path / "src" / "rayserve_moe" / "engine"
    package.mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    (tmp_path / "README.md").write_text("three words here\n")
    (package / "a.py").write_text("cache_salt = 1\ncache_salt\nno_cache_salt\n\n\nclass Page:\n    x = 1\n")
    (package / "b.py").write_text("cache_salt\n")
    found = size_of(tmp_path)
    assert found["flags"]["cache_salt"] == {"places": 3, "files": 2}
    assert found["lines"]["engine"] == {"files": 2, "code": 6, "docstrings": 0, "comments": 0, "blank": 2}
    assert (found["files"], found["types"], found["readme_words"], found["test_lines"]) == (2, 1, 3, 0)
    assert found["largest_class"] == ("Page", 2)


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
