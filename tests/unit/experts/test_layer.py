"""A MoE layer over several devices is the MoE layer of one device."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from rayserve_moe.experts.layer import ExpertRule, apply_experts
from rayserve_moe.experts.local import LOCAL_EXPERTS, ExpertWeights
from rayserve_moe.parallel.mesh import plan_for

NUM_EXPERTS, WIDTH, INNER, NUM_LAYERS, TOP_K = 8, 6, 4, 2, 3


def run_layer(num_devices: int, kernel: str, *, layer: int, valid: np.ndarray) -> list[np.ndarray]:
    generator = np.random.default_rng(4)
    hidden = generator.standard_normal((len(valid), WIDTH)).astype(np.float32)
    router = generator.standard_normal((WIDTH, NUM_EXPERTS)).astype(np.float32)
    shapes = [(WIDTH, INNER), (WIDTH, INNER), (INNER, WIDTH)]
    stacked = [generator.standard_normal((NUM_LAYERS, NUM_EXPERTS, *shape)).astype(np.float32) for shape in shapes]
    plan = plan_for(jax.devices()[:num_devices])
    rule = ExpertRule(NUM_EXPERTS, TOP_K, True, kernel, plan)

    def on_device(hidden, router, valid, *stacked):
        flat = ExpertWeights(*(array.reshape(-1, *array.shape[2:]) for array in stacked))
        return apply_experts(hidden, router, flat, layer=jnp.asarray(layer), valid_T=valid, rule=rule)

    split = plan.partition(("layers", "expert_slots", None, None))
    whole = PartitionSpec()
    sharded = partial(jax.shard_map, mesh=plan.mesh, out_specs=whole, check_vma=False)
    run = sharded(on_device, in_specs=(whole, whole, whole, split, split, split))
    return [np.asarray(array) for array in jax.jit(run)(hidden, router, valid, *stacked)]


@pytest.mark.parametrize("kernel", LOCAL_EXPERTS)
@pytest.mark.parametrize(("num_devices", "layer"), [(2, 1), (4, 0)])
def test_devices_do_not_show(kernel, num_devices, layer):
    valid = np.arange(19) % 5 != 3
    reference = run_layer(1, "blocks", layer=layer, valid=valid)
    for found, expected in zip(run_layer(num_devices, kernel, layer=layer, valid=valid), reference, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_padding_comes_out_as_zeros_and_is_not_counted():
    valid = np.arange(10) < 6
    out, ids, counts = run_layer(1, "blocks", layer=0, valid=valid)
    assert (out[~valid] == 0).all() and (out[valid] != 0).any(axis=1).all()
    np.testing.assert_array_equal(counts, np.bincount(ids[valid].reshape(-1), minlength=NUM_EXPERTS))
