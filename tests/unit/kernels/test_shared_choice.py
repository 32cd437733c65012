"""Devices of a tensor axis share the choice: each chooses for some tokens, and all receive every choice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from rayserve_moe.kernels.attention_layer import TokenBatch
from rayserve_moe.kernels.token_index import choose_in_parts
from rayserve_moe.parallel.mesh import local_devices, plan_for

QUERIES, PAGE = 4, 16


def step(num_singles: int, num_blocks: int) -> TokenBatch:
    """Single tokens, the second of them padding, and blocks of prompts, on pages of their own."""
    num_tables, num_tokens = num_singles + num_blocks, num_singles + QUERIES * num_blocks
    positions = np.arange(20, 20 + num_tokens, dtype=np.int32)
    positions[1:2] = -1
    tables = np.arange(num_tables * 8, dtype=np.int32).reshape(num_tables, 8)[::-1]
    tokens = jnp.zeros(num_tokens, jnp.int32)
    return TokenBatch(tokens, jnp.asarray(positions), tokens, jnp.asarray(tables), num_singles)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("num_singles", "num_blocks"), [(3, 6), (1, 4), (9, 0), (0, 1)])
def test_shares_of_devices_are_the_choice_of_one(num_singles: int, num_blocks: int):
    """A choice depends on the page table, so a block on another device's table would show."""
    plan, batch, seen = plan_for(local_devices(4)), step(num_singles, num_blocks), []

    def choose(queries_BQd, key_pages, places):
        seen.append(len(queries_BQd))
        of_table_BQ1 = jnp.sum(places.page_table_BP * np.arange(8), axis=1)[:, None, None] + key_pages[0, :1]
        return jnp.stack([queries_BQd[..., 0] + of_table_BQ1[..., 0], places.positions_BQ.astype(jnp.float32)], -1)

    queries_Td, pages = jnp.arange(2.0 * len(batch.positions_T)).reshape(-1, 2), jnp.ones((80, PAGE))

    def run(queries_Td, of_plan):
        return choose_in_parts((queries_Td,), pages, batch, jnp.int32(5), choose=choose, plan=of_plan)

    def on_device(queries_Td):
        return run(queries_Td, plan)[None]

    parts = PartitionSpec("tensor")
    shared = jax.shard_map(on_device, mesh=plan.mesh, in_specs=PartitionSpec(), out_specs=parts, check_vma=False)
    found, sizes = np.asarray(jax.jit(shared)(queries_Td)), list(seen)
    whole = np.asarray(run(queries_Td, None))
    np.testing.assert_array_equal(found, np.broadcast_to(whole, (4, *whole.shape)))
    assert sizes == [-(-count // 4) for count in (num_singles, num_blocks) if count]
