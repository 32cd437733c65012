"""Observe edits of the package as `benchmarks.edits.scratch` does, with the programs and the shapes of the tests."""

from __future__ import annotations

from benchmarks.edits import scratch
from tests.support.session.shared_programs import SharedPrograms
from tests.support.session.step_shapes import compile_fewest_shapes

if __name__ == "__main__":
    compile_fewest_shapes()
    SharedPrograms().start()
    scratch.main()
