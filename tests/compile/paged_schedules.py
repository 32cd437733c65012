"""Bundles that our own paged attention takes per block of keys and values, by libtpu's schedules, and their baseline.

    python -m tests.compile.paged_schedules [CHIP ...]

writes the baseline of chips, or of all of them, anew: after a change that is meant.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.kernels.reference.attention import BlockPlaces, NewRows, Together
from rayserve_moe.kernels.tpu.packed_rows import latent_lanes, packed_width
from rayserve_moe.kernels.tpu.paged_attention import attend, attend_new, describe_singles
from rayserve_moe.kernels.tpu.paged_sizes import pages_of_a_block
from rayserve_moe.tools.estimate.bundles import read_schedule
from rayserve_moe.tools.estimate.chips import CHIPS
from rayserve_moe.tools.estimate.dump import DumpFolder
from tests.compile.schedule_baselines import ScheduleBaseline
from tests.compile.topologies import compile_for

PAGE, PAGES, BLOCKS = 128, 32, 16
MODELS = {
    "gpt-oss, 64 heads": (64, 8, 64, 0),
    "latents, 128 heads": (128, 1, 576, 512),
    "latents, 16 heads": (16, 1, 576, 512),
    "Qwen3, 32 heads of 128": (32, 4, 128, 0),
    "Qwen3 in 8 bits": (32, 4, 128, 0),
}
"""Query heads, KV heads, head width, latent width."""
IN_8_BITS = {"Qwen3 in 8 bits"}
"""Models with keys and values of 8 bits."""
QUERIES = {"single tokens": 1, "single tokens, written": 1, "blocks of 32": 32}
GROUPS = {"groups of 4": 4, "groups of 8": 8}
"""Maximum number of single tokens of a sequence, which are scored 128 rows at a time."""


def lanes_of(model: str) -> int:
    """Return the numbers in a row of the pool."""
    _, num_kv, width, latent_width = MODELS[model]
    return latent_lanes(width) if latent_width else packed_width(num_kv, width, width)


def memory_bundles(chip: str, model: str) -> float:
    """Return the bundles of one core's share of memory time, for a block of keys and values."""
    figures, row_bytes = CHIPS[chip], lanes_of(model) * (1 if model in IN_8_BITS else 2)
    num_bytes = pages_of_a_block(PAGE, row_bytes, PAGES) * PAGE * row_bytes
    return num_bytes / (figures.hbm_bytes / figures.num_cores) * figures.clock_hz


def compile_all(chip: str, dump: DumpFolder) -> dict[str, int]:
    """Compile every case for a chip; bundles of the loop over blocks of keys, its inner loops over rows as they run.

    Copies of pages and clearing, loops of a few bundles, count once; so do rows of groups that are scored together, and
    pieces of new ones.
    """
    found = {}
    for model in MODELS:
        for name, num_queries in (QUERIES | GROUPS).items():
            attend_model = _attend_groups if name in GROUPS else partial(_attend_blocks, writes="written" in name)
            attend_model(chip.removeprefix("tpu"), model, num_queries)
            (text,) = (text for op, text in dump.take().items() if op.startswith("paged_attention"))
            loops = read_schedule(text).loops
            open_loops = [loop for loop in loops if loop.trips is None]
            if name in GROUPS:
                open_loops = [loop for loop in open_loops if any(other.holds(loop) for other in open_loops)]
            block = max(open_loops, key=lambda loop: loop.last - loop.first)
            inner = [loop for loop in loops if block.holds(loop) and loop.trips]
            more = sum((loop.trips - 1) * (loop.last - loop.first + 1) for loop in inner)
            found[f"{model}, {name}"] = block.last - block.first + 1 + more
    return found


def _shapes(model: str, *queries: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Return queries, the pool and new rows, in bfloat16 or in pairs of 8 bits, and page tables."""
    (heads, _, width, _), is_8_bit = MODELS[model], model in IN_8_BITS
    lanes, held = lanes_of(model) // (2 if is_8_bit else 1), jnp.int16 if is_8_bit else jnp.bfloat16
    pool, rows = (jax.ShapeDtypeStruct((*sizes, lanes), held) for sizes in ((2 * BLOCKS * PAGES, PAGE), (BLOCKS,)))
    shape = jax.ShapeDtypeStruct((BLOCKS, *queries, heads, width), jnp.bfloat16)
    return shape, pool, rows, jax.ShapeDtypeStruct((BLOCKS, PAGES), np.int32)


def _attend_blocks(chip: str, model: str, num_queries: int, *, writes: bool) -> None:
    latent_width = MODELS[model][3]

    def run(queries, pool, rows, *places):
        if writes:
            new = NewRows(rows, np.int32(0))
            return attend_new(queries[:, 0], pool, BlockPlaces(*places), new, latent_width=latent_width)
        return attend(queries, pool, BlockPlaces(*places), latent_width=latent_width)

    positions = jax.ShapeDtypeStruct((BLOCKS, num_queries), np.int32)
    compile_for(chip, run, *_shapes(model, num_queries), positions, donate=1)


def _attend_groups(chip: str, model: str, most: int) -> None:
    latent_width = MODELS[model][3]

    def run(queries, pool, rows, table, positions, sequences):
        together = Together(sequences, most)
        sizes = {"page_size": PAGE, "table_width": PAGES, "windows": (0,)}
        described = describe_singles(positions, **sizes, together=together)
        places = BlockPlaces(table, positions[:, None], described[0], together)
        return attend_new(queries, pool, places, NewRows(rows, np.int32(0)), latent_width=latent_width)

    of_tokens = [jax.ShapeDtypeStruct((BLOCKS,), np.int32)] * 2
    compile_for(chip, run, *_shapes(model), *of_tokens, donate=1)


BASELINE = ScheduleBaseline("tests.compile.paged_schedules", tuple(CHIPS), compile_all)

if __name__ == "__main__":
    BASELINE.main()
