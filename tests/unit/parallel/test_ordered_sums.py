"""Partial sums of devices are added up in their order if a plan says so."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from rayserve_moe.parallel.mesh import plan_for
from rayserve_moe.parallel.sharding import TENSOR

NUM_DEVICES, NUM_ROWS, WIDTH = 4, 7, 33


def test_sums_over_a_tensor_group_are_in_the_order_of_its_devices():
    plan = replace(plan_for(jax.devices()[:NUM_DEVICES], data_size=1), adds_in_order=True)
    # Numbers of many sizes: other orders have other bits.
    generator = np.random.default_rng(3)
    sizes_N1 = 10.0 ** generator.integers(-4, 5, (NUM_ROWS, 1))
    parts = generator.standard_normal((NUM_DEVICES, NUM_ROWS, WIDTH)) * sizes_N1
    parts = parts.astype(np.float32)
    split = PartitionSpec(TENSOR)
    add = jax.jit(
        jax.shard_map(
            lambda part: plan.sum_over_tensor(part[0]),
            mesh=plan.mesh,
            in_specs=split,
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )
    expected = parts[0]
    for part in parts[1:]:
        expected = expected + part
    np.testing.assert_array_equal(add(jnp.asarray(parts)), expected)
    backwards = parts[::-1].sum(axis=0, dtype=np.float32)
    assert (backwards != expected).any(), "the numbers are as good in any order"
