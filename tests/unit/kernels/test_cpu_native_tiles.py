"""Where the system refuses tile registers, products are computed without them, and to the same value."""

from __future__ import annotations

import subprocess

import pytest

from tests.support.kernels.native_kernels import build_program

PROGRAM = """
#include <cmath>
#include <cstdio>
#include <vector>
#include "products.h"

int main() {
  const int64_t depth = 34;
  std::vector<uint16_t> left(40 * depth, 0x3f80), panel(depth * 32, 0x4000);
  double worst = 0;
  const uint16_t* panels[1] = {panel.data()};
  native::multiply_rows(left.data(), depth, 40, depth, panels, [&](int64_t, const native::Pair(&sums)[1]) {
    alignas(64) float found[32];
    native::put(found, sums[0].low), native::put(found + 16, sums[0].high);
    for (float each : found) worst = std::fmax(worst, std::fabs(each - 2.0 * depth));
  });
  std::printf("%d %g", native::has_tiles, worst);
}
"""


@pytest.mark.parametrize(
    ("options", "has_tiles"),
    [
        pytest.param((), None, marks=pytest.mark.slow),
        pytest.param(("-DNATIVE_TILE_FEATURE=63",), False, id="refused"),
    ],
)
def test_products_do_without_tiles(tmp_path, options, has_tiles):
    (tmp_path / "products.cc").write_text(PROGRAM)
    program = build_program(tmp_path / "products.cc", "-O1", *options, directory=tmp_path)
    found = subprocess.run([program], check=True, capture_output=True, text=True, timeout=60).stdout.split()
    assert found[1] == "0"
    assert has_tiles is None or bool(int(found[0])) is has_tiles
