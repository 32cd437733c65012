"""Bundles of the kernels of sparse attention at a context of 64k, by libtpu's schedules, and their baseline.

    python -m tests.compile.chosen_schedules [CHIP ...]

writes the baseline of chips, or of all of them, anew: after a change that is meant.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.kernels.reference.attention import BlockPlaces, ScoreConfig
from rayserve_moe.kernels.tpu import paged_attention
from rayserve_moe.kernels.tpu.chosen_attention import attend_chosen
from rayserve_moe.kernels.tpu.packed_rows import latent_lanes
from rayserve_moe.kernels.tpu.paged_sizes import pages_of_a_block
from rayserve_moe.kernels.tpu.token_index import choose_tokens
from rayserve_moe.tools.estimate.bundles import read_schedule
from rayserve_moe.tools.estimate.chips import CHIPS
from rayserve_moe.tools.estimate.dump import DumpFolder
from rayserve_moe.tools.estimate.kernel_work import KernelWork, kernel_name, work_of
from rayserve_moe.tools.estimate.step_work import AttentionSizes, AttentionWork, SparseWork, StepWork
from tests.compile.schedule_baselines import ScheduleBaseline
from tests.compile.topologies import compile_for, text_of

TOKENS, PROMPT_BLOCK, CONTEXT, PAGE, NUM_PAGES, TOP_K = 16, 32, 1 << 16, 128, 4096, 2048
INDEX, ATTENTION, PROMPTS = "token_index", "chosen_attention", "paged_attention"
HEADS = {
    f"{INDEX}, 64 heads": (INDEX, 64),
    f"{INDEX}, 32 heads": (INDEX, 32),
    f"{ATTENTION}, 16 heads": (ATTENTION, 16),
    f"{ATTENTION}, 128 heads": (ATTENTION, 128),
}
"""The kernel of single tokens and its heads."""
PROMPT_HEADS = {
    f"{INDEX} of prompts, 64 heads": (INDEX, 64),
    f"{PROMPTS} of prompts, 16 heads": (PROMPTS, 16),
    f"{PROMPTS} of prompts, 32 heads": (PROMPTS, 32),
}
"""The kernel of prompts and its heads; all queries of a tile fit into one visit."""
BLOCK_KEYS = pages_of_a_block(PAGE, latent_lanes(576) * 2, CONTEXT // PAGE) * PAGE
OF_PROMPTS = AttentionWork(TOKENS, TOKENS * CONTEXT / BLOCK_KEYS, 0, TOKENS * CONTEXT / PAGE, is_of_prompts=True)
WORK = StepWork(
    0,
    0,
    {AttentionSizes(TOKENS, 1, 512): OF_PROMPTS},
    0,
    0,
    sparse=SparseWork(TOKENS, CONTEXT, TOP_K, TOKENS, TOKENS, prompt_context=CONTEXT),
)


def compile_kernel(chip: str, kernel: str, num_heads: int, *, num_queries: int = 1) -> jax.stages.Compiled:
    """Compile a kernel for a chip, with blocks of `num_queries` queries."""
    shape = jax.ShapeDtypeStruct
    table, positions = (shape((TOKENS, size), np.int32) for size in (CONTEXT // PAGE, num_queries))
    width = 128 if kernel == INDEX else 576
    queries = shape((TOKENS, num_queries, num_heads, width), jnp.bfloat16)
    pool = shape((NUM_PAGES, PAGE, latent_lanes(width)), jnp.bfloat16)
    if kernel == INDEX:

        def choose(queries, weights, pool, *places):
            return choose_tokens(queries, weights, pool, BlockPlaces(*places), top_k=TOP_K)

        return compile_for(chip, choose, queries, shape(queries.shape[:3], jnp.float32), pool, table, positions)

    def attend(queries, pool, chosen, *places):
        places = BlockPlaces(*places, chosen_BQK=chosen)
        return attend_chosen(queries, pool, places, config=ScoreConfig(scale=0.1), latent_width=512)

    def attend_masked(queries, pool, chosen, *places):
        places = BlockPlaces(*places, chosen_BQK=chosen)
        return paged_attention.attend(queries, pool, places, config=ScoreConfig(scale=0.1), latent_width=512)

    chosen = shape((TOKENS, num_queries, TOP_K), np.int32)
    attend = attend_masked if kernel == PROMPTS else attend
    return compile_for(chip, attend, queries, pool, chosen, table, positions)


def work_of_kernel(compiled: jax.stages.Compiled) -> KernelWork:
    """Return the work of the only kernel of a program."""
    program = text_of(compiled)
    (call,) = (each for each in program.executions() if kernel_name(each.instruction))
    by_name = {one.name: one for one in program.computations[call.computation]}
    operands = [by_name[name] for name in call.instruction.operands if name in by_name]
    found = work_of(call.instruction, operands, work=WORK)
    assert found is not None, "the kernel is known"
    return found


def compile_all(chip: str, dump: DumpFolder) -> dict[str, float]:
    """Compile every case for a chip; bundles of a core for a token."""
    found, cores = {}, CHIPS[chip].cores_per_device
    for name, (kernel, num_heads) in (HEADS | PROMPT_HEADS).items():
        num_queries = PROMPT_BLOCK if name in PROMPT_HEADS else 1
        compiled = compile_kernel(chip.removeprefix("tpu"), kernel, num_heads, num_queries=num_queries)
        (text,) = (text for op, text in dump.take().items() if op.startswith(kernel))
        spent = work_of_kernel(compiled).of_core(read_schedule(text), cores=cores, iterations=0)
        assert not spent.is_least, "every loop is known"
        found[name] = round(spent.bundles * cores / TOKENS / num_queries)
    return found


BASELINE = ScheduleBaseline("tests.compile.chosen_schedules", tuple(CHIPS), compile_all)

if __name__ == "__main__":
    BASELINE.main()
