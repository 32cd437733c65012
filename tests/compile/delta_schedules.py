"""Bundles of the kernel of gated delta and Mamba-2 layers, by libtpu's schedules, and their baseline.

    python -m tests.compile.delta_schedules [CHIP ...]

writes the baseline of chips, or of all of them, anew: after a change that is meant.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rayserve_moe.kernels.reference.gated_delta import (
    CHUNK,
    PIECE,
    WINDOW_ROWS,
    DeltaPools,
    DeltaTokens,
    Pieces,
    RowEntries,
)
from rayserve_moe.kernels.tpu.delta_rule import advance_tokens
from rayserve_moe.tools.estimate.bundles import read_schedule
from rayserve_moe.tools.estimate.chips import CHIPS
from rayserve_moe.tools.estimate.dump import DumpFolder
from rayserve_moe.tools.estimate.kernel_work import kernel_name, work_of
from rayserve_moe.tools.estimate.step_work import RecurrentWork, StepWork
from tests.compile.schedule_baselines import ScheduleBaseline
from tests.compile.topologies import compile_for, text_of

TOKENS, ROWS, ENTRIES, WIDTH = 16, 24, 63, 128


class Heads(NamedTuple):
    """Sizes of a layer on a device."""

    num_key_heads: int
    num_heads: int
    num_decays: int = 1
    """Decays of a head."""
    value_dim: int = WIDTH
    delta: bool = True
    """False for Mamba-2."""

    @property
    def num_blocks(self) -> int:
        """Return the number of rows of values, which fill the lanes."""
        return self.num_heads * self.value_dim // WIDTH

    @property
    def input_rows(self) -> tuple[int, int]:
        """Return the number and the width of the rows that inputs of the convolution lie in."""
        channels = 2 * WIDTH + self.num_heads // self.num_key_heads * self.value_dim
        if self.delta:
            return self.num_key_heads, channels
        return 8 * math.ceil(self.num_key_heads * channels / (8 * WIDTH)), WIDTH


HEADS = {
    "of 35B": Heads(16, 32),
    "of 397B": Heads(16, 64),
    "of 35B over 2": Heads(8, 16),
    "of 35B over 8": Heads(2, 4),
    "of Kimi-Linear": Heads(32, 32, WIDTH),
    "of Kimi-Linear over 8": Heads(4, 4, WIDTH),
    "of Nemotron-3 Nano": Heads(8, 64, value_dim=64, delta=False),
    "of Nemotron-3 Nano over 4": Heads(2, 16, value_dim=64, delta=False),
    "of Granite 4": Heads(1, 128, value_dim=64, delta=False),
}


def shapes_of(of: Heads) -> tuple[DeltaPools, DeltaTokens, Pieces]:
    """Return the shapes of a call."""
    key_heads, heads, num_decays = of.num_key_heads, of.num_heads, of.num_decays
    of_rows = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    pools = DeltaPools(
        of_rows((ENTRIES, of.num_blocks, WIDTH, WIDTH)),
        of_rows((ENTRIES, 3, *of.input_rows)),
        of_rows((ROWS, CHUNK, key_heads, WIDTH)),
        of_rows((ROWS, CHUNK, of.num_blocks, WIDTH)),
        of_rows((ROWS, heads, WIDTH) if num_decays == 1 else (ROWS, CHUNK, heads, WIDTH)),
        of_rows((ROWS, WINDOW_ROWS, *of.input_rows)),
    )
    narrow = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    keys, values = narrow((TOKENS, key_heads, WIDTH)), narrow((TOKENS, heads, of.value_dim))
    decays, betas = of_rows((TOKENS, heads, num_decays)), of_rows((TOKENS, heads))
    tokens = DeltaTokens(keys, keys, values, decays, betas, narrow((TOKENS, *of.input_rows)))
    ints = jax.ShapeDtypeStruct((TOKENS,), jnp.int32)
    return pools, tokens, Pieces(*[ints] * 5, RowEntries(*[ints] * 3))


def compile_step(chip: str, heads: Heads) -> jax.stages.Compiled:
    """Compile a call with donated pools for a chip."""
    pools, *given = shapes_of(heads)

    def step(pools: DeltaPools, tokens: DeltaTokens, pieces: Pieces, first_entry: jax.Array, first_row: jax.Array):
        return advance_tokens(tokens, pools, pieces, layer=(first_entry, first_row), delta=heads.delta)

    place = jax.ShapeDtypeStruct((), jnp.int32)
    return compile_for(chip, step, pools, *given, place, place, donate=0)


WORK = {
    "decode": RecurrentWork(TOKENS, 0, TOKENS, 36, TOKENS / CHUNK),
    "a prompt": RecurrentWork(0, TOKENS / PIECE, 1, 0, TOKENS / CHUNK),
}
"""Tokens of rows of their own with rings up to any cursor, and of one row that begins."""


def compile_all(chip: str, dump: DumpFolder) -> dict[str, float]:
    """Compile every case for a chip; bundles of a core: of a call in which every piece folds, and of usual calls."""
    found = {}
    for name, heads in HEADS.items():
        compiled = compile_step(chip.removeprefix("tpu"), heads)
        (text,) = (text for op, text in dump.take().items() if op.startswith("delta_rule"))
        schedule = read_schedule(text)
        found[name] = schedule.spent().bundles
        calls = (each.instruction for each in text_of(compiled).executions())
        (call,) = (call for call in calls if kernel_name(call) == "delta_rule")
        for case, work in WORK.items():
            kernel = work_of(call, [], work=StepWork(0, 0, {}, 0, 0, work))
            assert kernel is not None
            spent = kernel.of_core(schedule, cores=CHIPS[chip].cores_per_device, iterations=0)
            assert not spent.is_least, "every loop is known"
            found[f"{name}, {case}"] = round(spent.bundles)
    return found


BASELINE = ScheduleBaseline("tests.compile.delta_schedules", tuple(CHIPS), compile_all)

if __name__ == "__main__":
    BASELINE.main()
