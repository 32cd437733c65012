"""The loop that the native CPU kernels share with helper threads runs every item once."""

from __future__ import annotations

import subprocess

import pytest

from tests.support.kernels.native_kernels import build_program

PROGRAM = """
#include <cstdio>
#include "threads.h"

int main() {
  std::atomic<int> done[40];
  long wrong = 0;
  for (int turn = 0; turn < %d; ++turn) {
    const int num_items = turn %% 3 == 0 ? 2 : turn %% 3 == 1 ? 3 : 7;
    for (int i = 0; i < num_items; ++i) done[i].store(0, std::memory_order_relaxed);
    native::for_each(num_items, [&](int64_t item) { done[item].fetch_add(1); });
    for (int i = 0; i < num_items; ++i) wrong += done[i].load() != 1;
  }
  native::for_pieces(39, 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) done[i].store(100);
  });
  for (int i = 0; i < 39; ++i) wrong += done[i].load() != 100;
  std::printf("%%ld", wrong);
}
"""


@pytest.mark.parametrize(
    ("num_turns", "options"),
    [
        (300_000, ("-O2",)),
        pytest.param(3_000_000, ("-O2",), marks=pytest.mark.slow),
        pytest.param(60_000_000, ("-O2",), marks=pytest.mark.slow),
        pytest.param(300_000, ("-O1", "-fsanitize=thread"), marks=pytest.mark.slow),
    ],
)
def test_every_item_is_done_once(tmp_path, num_turns, options):
    """Loops follow each other at once: a helper that is late for one meets the next."""
    (tmp_path / "loop.cc").write_text(PROGRAM % num_turns)
    program = build_program(tmp_path / "loop.cc", *options, directory=tmp_path)
    found = subprocess.run([program], check=True, capture_output=True, text=True, timeout=600)
    assert found.stdout == "0"
