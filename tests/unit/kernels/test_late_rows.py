"""New rows of single tokens may be written by what attends them: neither results nor pool are other ones."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.kernels.attention_layer import PagedKernels, PagedStep, TokenBatch, attend_blocks, write_early
from rayserve_moe.kernels.reference.attention import ScoreConfig, attend, attend_new

PAGE, PAGES_EACH, HEADS, KV_HEADS, WIDTH, BLOCK, FIRST_PAGE = 4, 5, 4, 2, 8, 4, 3
SINGLES = (9, -1, 0, 16)
"""Positions of single tokens; -1: padding."""
PROMPTS = ((4, 4), (8, 2))
"""Blocks of prompts of one sequence each: first position, number of tokens."""


def random_step(singles: tuple[int, ...], prompts: tuple[tuple[int, int], ...]):
    """Queries, the pool, and what a layer attends with: every block has a sequence of its own."""
    generator, num_blocks = np.random.default_rng(len(prompts)), len(singles) + len(prompts)
    pages = generator.permutation(np.arange(1, 1 + num_blocks * PAGES_EACH)).reshape(num_blocks, PAGES_EACH)
    positions = [[position] for position in singles]
    positions += [[*range(first, first + num), *[-1] * (BLOCK - num)] for first, num in prompts]
    of_block = [np.maximum(each, 0) for each in positions]
    slots = [
        np.where(np.array(own) >= 0, pages[i][at // PAGE] * PAGE + at % PAGE, 0)
        for i, (own, at) in enumerate(zip(positions, of_block, strict=True))
    ]
    positions_T, slots_T = (np.concatenate(each).astype(np.int32) for each in (positions, slots))
    batch = TokenBatch(
        jnp.zeros_like(positions_T), jnp.asarray(positions_T), jnp.asarray(slots_T), jnp.asarray(pages), len(singles)
    )
    shapes = (len(positions_T), HEADS, WIDTH), (len(positions_T), KV_HEADS, 2 * WIDTH)
    shapes += ((FIRST_PAGE + 1 + num_blocks * PAGES_EACH, PAGE, KV_HEADS, 2 * WIDTH),)
    queries, rows, pool = (jnp.asarray(generator.standard_normal(shape), jnp.float32) for shape in shapes)
    return queries, pool, lambda num_late: PagedStep(batch, jnp.int32(FIRST_PAGE), rows, num_late)


def test_late_rows_of_one_sequence_see_each_other():
    """Single tokens of two chains, over the border of a page, beside padding."""
    queries, pool, step_with = random_step((2, 3, 4, -1, 6, 7, 8, 9), ())
    together = jnp.asarray([0, 0, 0, 1, 2, 2, 2, 2], jnp.int32)
    found = []
    for num_late, writing in ((0, None), (8, attend_new)):
        step = step_with(num_late)
        batch, places = step.batch, step.batch.positions_T
        tables = batch.page_table_BP[jnp.asarray([0, 0, 0, 3, 4, 4, 4, 4])]
        slots = jnp.where(places >= 0, tables[jnp.arange(8), places // PAGE] * PAGE + places % PAGE, 0)
        batch = replace(batch, kv_slots_T=slots, page_table_BP=tables)
        step = step._replace(batch=replace(batch, sequences_U=together, max_together=4))
        kernels = PagedKernels(attend, attend, writing).with_knobs(config=ScoreConfig())
        attended, written = attend_blocks(queries, write_early(pool, step), step, kernels=kernels)
        found.append((attended, written[FIRST_PAGE + 1 :]))
    for early, late in zip(*found, strict=True):
        np.testing.assert_array_equal(early, late)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("prompts", [(), PROMPTS])
@pytest.mark.parametrize("config", [ScoreConfig(), ScoreConfig(window=6)])
def test_late_rows_are_attended_and_kept_as_early_ones(prompts, config):
    queries, pool, step_with = random_step(SINGLES, prompts)
    found = []
    for num_late, writing in ((0, None), (len(SINGLES), attend_new)):
        kernels, step = PagedKernels(attend, attend, writing).with_knobs(config=config), step_with(num_late)
        attended, written = attend_blocks(queries, write_early(pool, step), step, kernels=kernels)
        # Padding writes into pages that no sequence owns.
        found.append((attended, written[FIRST_PAGE + 1 :]))
    for early, late in zip(*found, strict=True):
        np.testing.assert_array_equal(early, late)
