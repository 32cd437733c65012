"""The C++ of the native CPU kernels by itself, under the sanitizers: `native/driver.cc` beside naive loops."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.kernels.native_kernels import build_program

DRIVER = Path(__file__).with_name("native") / "driver.cc"
MEMORY = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-D_GLIBCXX_SANITIZE_VECTOR=1")
THREADS = ("-fsanitize=thread",)
TIMEOUT_S = 1800.0


@pytest.mark.parametrize(
    ("options", "stride", "num_cores", "num_callers"),
    [
        pytest.param(("-O0", *MEMORY), 29, 3, 2, id="memory, a few", marks=pytest.mark.slow),
        pytest.param(("-O1", *MEMORY), 1, 1, 1, id="memory, one core", marks=pytest.mark.slow),
        pytest.param(("-O1", *MEMORY), 1, 4, 2, id="memory, four cores", marks=pytest.mark.slow),
        pytest.param(("-O1", *THREADS), 1, 4, 2, id="threads", marks=pytest.mark.slow),
        pytest.param(("-O3",), 1, 4, 1, id="as it is built", marks=pytest.mark.slow),
    ],
)
def test_every_kernel_is_right_and_stays_in_its_arrays(tmp_path, options, stride, num_cores, num_callers):
    program = build_program(DRIVER, *options, directory=tmp_path)
    command = [program, *map(str, (stride, num_cores, num_callers))]
    found = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert found.returncode == 0, (found.stdout + found.stderr)[-3000:]
    assert ", 0 wrong" in found.stdout
