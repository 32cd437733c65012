"""The kernels of sparse attention compile for every chip, read the pool in place, and keep their schedules."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from rayserve_moe.execution.programs.compiled import lowered
from rayserve_moe.execution.programs.specs import programs_of
from rayserve_moe.kernels import packed_blocks
from rayserve_moe.kernels.reference.attention import BlockPlaces, ScoreConfig
from rayserve_moe.kernels.tpu import paged_attention
from rayserve_moe.kernels.tpu.packed_rows import latent_lanes
from rayserve_moe.tools.estimate.chips import CHIPS
from rayserve_moe.tools.hlo_report import kernels_of
from rayserve_moe.tools.served_cases import case_of_model, lay_out
from tests.compile.chosen_schedules import (
    ATTENTION,
    BASELINE,
    CONTEXT,
    HEADS,
    INDEX,
    PROMPT_BLOCK,
    PROMPTS,
    TOKENS,
    TOP_K,
    compile_kernel,
    work_of_kernel,
)
from tests.compile.topologies import TOPOLOGY_OF_CHIP, compile_for, text_of

CHIP_CASES = ["v6e", *(pytest.param(chip, marks=pytest.mark.slow) for chip in TOPOLOGY_OF_CHIP if chip != "v6e")]
KEY_BYTES, GROUP_BYTES = 128 * 2, 8 * 640 * 2
"""Bytes of the index's key of a token, and of the rows that are copied for a chosen token."""

NEAR = {"v5e": 1.0, "v5p": 1.2, "v6e": 1.2, "tpu7x": 3.0}
"""Most bundles of a token over those that its bytes take; requests for copies bound tpu7x, whose memory is fast."""


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("chip", CHIP_CASES)
@pytest.mark.parametrize("case", HEADS)
def test_single_tokens_read_the_pool_in_place(chip: str, case: str):
    kernel, num_heads = HEADS[case]
    compiled = compile_kernel(chip, kernel, num_heads)
    assert kernels_of(text_of(compiled)) == {kernel: 1}
    assert compiled.memory_analysis().temp_size_in_bytes < 8 << 20, "no pool"
    bytes_of = {INDEX: CONTEXT * KEY_BYTES, ATTENTION: TOP_K * GROUP_BYTES}
    assert work_of_kernel(compiled).hbm_bytes == TOKENS * bytes_of[kernel]


@pytest.mark.slow
@pytest.mark.parametrize("chip", TOPOLOGY_OF_CHIP)
def test_prompts_choose_in_place(chip: str):
    compiled = compile_kernel(chip, INDEX, 64, num_queries=32)
    assert kernels_of(text_of(compiled)) == {INDEX: 1}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("chip", CHIP_CASES)
@pytest.mark.parametrize("num_heads", [16, 128])
def test_prompts_attend_their_choice_in_one_kernel(chip: str, num_heads: int):
    """No mask is materialised: it would take a byte for each of 512 queries and 65,536 keys.

    Beside two copies of queries XLA holds page tables and positions, less than a MiB.
    """
    compiled = compile_kernel(chip, PROMPTS, num_heads, num_queries=PROMPT_BLOCK)
    assert kernels_of(text_of(compiled)) == {PROMPTS: 1}
    queries_bytes = TOKENS * PROMPT_BLOCK * num_heads * latent_lanes(576) * 2
    assert compiled.memory_analysis().temp_size_in_bytes <= 2 * queries_bytes + (1 << 20)
    opcodes = {one.opcode for part in text_of(compiled).computations.values() for one in part}
    assert not opcodes & {"while", "conditional", "scatter", "sort"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("chip", CHIP_CASES)
@pytest.mark.parametrize("num_queries", [1, PROMPT_BLOCK])
def test_chosen_blocks_are_attended_in_one_kernel(chip: str, num_queries: int):
    """Two KV heads choose 16 blocks of 128 tokens each; neither a mask nor pages are materialised."""
    shape, sizes = jax.ShapeDtypeStruct, (TOKENS, num_queries)

    def attend(queries, pool, table, positions, chosen):
        run = packed_blocks.attend_single_tokens if num_queries == 1 else paged_attention.attend
        places = BlockPlaces(table, positions, chosen_BQK=chosen)
        return run(queries, pool, places, config=ScoreConfig(scale=0.1), block_size=128)

    queries, pool = shape((*sizes, 32, 128), jnp.bfloat16), shape((4096, 128, 512), jnp.bfloat16)
    integers = (shape(dims, jnp.int32) for dims in ((TOKENS, CONTEXT // 128), sizes, (*sizes, 2, 16)))
    compiled = compile_for(chip, attend, queries, pool, *integers)
    assert kernels_of(text_of(compiled)) == {PROMPTS: 1}
    assert compiled.memory_analysis().temp_size_in_bytes <= 16 << 20


STEPS = {
    "deepseek-v3.2": ({INDEX, ATTENTION, PROMPTS}, ("attention/paged_attention", "index/index_scores")),
    "minimax-m3": ({PROMPTS}, ("attention/paged_attention",)),
}
"""Kernels of a step by model, and the scopes in which XLA runs no loop. XLA chooses the blocks of MiniMax-M3."""


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", STEPS)
def test_a_step_masks_no_prompt_by_xla(model: str):
    """Pages reach beyond a choice, and the layers with an index are among the first four."""
    values = {"max_model_len": 8192, "max_running_requests": 2, "max_step_tokens": 128, "expert_dtype": "int8"}
    served = lay_out(case_of_model(model, "v6e:2x4", tp=8, num_layers=4, values=values))
    (program,) = (each for each in programs_of(served, num_pages=256) if each.name == "prefill_128")
    text = lowered(program, served.config.plan).as_text(debug_info=True)
    kernels, scopes = STEPS[model]
    assert kernels <= set(re.findall(r'kernel_name = "(\w+)"', text))
    of_xla = {name for name in re.findall(r'"([^"]*)"', text) if re.search("/(while|cond|sort|top_k|scatter)", name)}
    assert of_xla and not [name for name in of_xla if any(scope in name for scope in scopes)]


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_no_token_takes_more_bundles_than_the_baseline(chip: str):
    """Where a change is meant to cost this, `python -m tests.compile.chosen_schedules` writes the baseline anew."""
    assert not BASELINE.slower(chip)


@pytest.mark.parametrize(("chip", "most"), NEAR.items())
def test_attention_to_chosen_tokens_is_near_the_time_of_its_copies(chip: str, most: float):
    """With the heads of a device that shares them with seven others."""
    figures, bundles = CHIPS[chip], BASELINE.committed()[chip][f"{ATTENTION}, 16 heads"]
    memory_bundles = TOP_K * GROUP_BYTES / (figures.hbm_bytes / figures.num_cores) * figures.clock_hz
    assert bundles < most * memory_bundles
