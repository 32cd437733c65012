"""Bundles that the grouped kernel takes for experts in 8 bits, by libtpu's schedules, and their baseline.

    python -m tests.compile.narrow_schedules [CHIP ...]

writes the baseline of chips, or of all of them, anew: after a change that is meant.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.kernels.narrow_weights import scale_rows
from rayserve_moe.kernels.reference.expert_products import ExpertWeights, LayerExperts, ProductConfig
from rayserve_moe.kernels.tpu.grouped_ffn import multiply_grouped
from rayserve_moe.tools.estimate.bundles import read_schedule
from rayserve_moe.tools.estimate.chips import CHIPS
from rayserve_moe.tools.estimate.dump import DumpFolder
from tests.compile.schedule_baselines import ScheduleBaseline
from tests.compile.topologies import compile_for

KINDS = {
    "bfloat16": ("bfloat16", False),
    "int8": ("int8", False),
    "int8 in blocks": ("int8", True),
    "fp8": ("float8_e4m3fn", False),
    "fp8 in blocks": ("float8_e4m3fn", True),
}
NARROW_ROWS = "rows too"
"""Suffix of kinds whose rows are rounded to e4m3 as well, on chips that multiply it."""
MULTIPLY_E4M3 = ("tpu7x",)
SLOTS, WIDTH, INNER = 16, 2048, 768
"""Of Qwen3-30B-A3B on eight devices."""
ONE_CORE = ("v5e", "v6e", "tpu7x")
"""Chips that the kernel is for: one core to a device."""


def memory_bundles(chip: str) -> float:
    """Bundles that an expert in 8 bits takes on its way from HBM."""
    figures = CHIPS[chip]
    return 3 * WIDTH * INNER / (figures.hbm_bytes / figures.num_cores) * figures.clock_hz


def kinds_of(chip: str) -> list[str]:
    """Kinds of expert products that a chip supports."""
    narrow = [f"{kind}, {NARROW_ROWS}" for kind in KINDS if kind.startswith("fp8")]
    return [*KINDS, *(narrow if chip in MULTIPLY_E4M3 else [])]


def shapes_of(kind: str) -> list[jax.ShapeDtypeStruct]:
    """Tokens, slots, matrices and scales."""
    dtype, in_blocks = KINDS[kind.partition(",")[0]]
    matrices = [(WIDTH, INNER), (WIDTH, INNER), (INNER, WIDTH)]
    given = [((16, WIDTH), "bfloat16"), ((16, 6), "int32"), *(((SLOTS, *size), dtype) for size in matrices)]
    scales = [((SLOTS, scale_rows(rows) if in_blocks else 1, size), "float32") for rows, size in matrices]
    return [jax.ShapeDtypeStruct(size, jnp.dtype(name)) for size, name in given + scales * (dtype != "bfloat16")]


def compile_all(chip: str, dump: DumpFolder) -> dict[str, int]:
    """Compile every kind for a chip; bundles of a slot with a tile of rows: of the longest loop, or of all."""
    found = {}
    for kind in kinds_of(chip):
        config = ProductConfig(SLOTS, 8.0, narrows_rows=kind.endswith(NARROW_ROWS))

        def run(rows, slots, *weights, config=config):
            held = ExpertWeights(*weights[:3], None, None, None, *weights[3:])
            return multiply_grouped(rows, slots, LayerExperts(held, np.int32(0), config))

        compile_for(chip.removeprefix("tpu"), run, *shapes_of(kind))
        (text,) = (text for op, text in dump.take().items() if op.startswith("grouped_ffn"))
        found[kind] = max(loop.last - loop.first + 1 for loop in read_schedule(text).loops)
    return found


BASELINE = ScheduleBaseline("tests.compile.narrow_schedules", ONE_CORE, compile_all)

if __name__ == "__main__":
    BASELINE.main()
