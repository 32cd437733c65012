"""A pattern of layers that one loop computes gives what a loop for each layer gives."""

from __future__ import annotations

import zlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from rayserve_moe.config.settings import ExpertSettings
from rayserve_moe.execution.weights.placing import model_config, parameter_tree
from rayserve_moe.kernels.attention_layer import TokenBatch
from rayserve_moe.model.families.qwen3_moe import spec_from_hf
from rayserve_moe.model.layer_runs import layer_runs
from rayserve_moe.model.model_config import ModelConfig
from rayserve_moe.model.spec import LayerSpec
from rayserve_moe.model.states import PoolCounts, pool_shapes
from rayserve_moe.model.transformer import ForwardOutput, forward
from rayserve_moe.parallel.mesh import plan_for
from tests.support.models.core import CORE_CONFIG

NUM_TOKENS, PAGE = 8, 4
M, D, W = LayerSpec("gqa", "moe"), LayerSpec("gqa", "dense"), LayerSpec("gqa", "moe", window=3)
PATTERNS = {
    "experts in two of three": (M, M, D) * 3,
    "experts in every other": (D, M) * 4,
    "windows": (W, D, M, D) * 2,
    "a head and a rest": (D, M, D, M, D, M, M, M),
}


def config_of(layers: tuple[LayerSpec, ...]) -> ModelConfig:
    spec = replace(spec_from_hf(CORE_CONFIG.hf_config("float32")), layers=layers)
    return model_config(spec, plan_for(jax.devices()[:1]), experts=ExpertSettings())


def computed(config: ModelConfig, asked: tuple[int, ...]) -> ForwardOutput:
    """The outputs of a prompt over weights that follow from their names."""
    params = {
        group: {
            name: np.random.default_rng(zlib.crc32(name.encode())).standard_normal(param.shape).astype(np.float32) * 0.2
            for name, param in specs.items()
        }
        for group, specs in parameter_tree(config, dtype="float32").items()
    }
    positions, table = np.arange(NUM_TOKENS, dtype=np.int32), np.array([[1, 2]], np.int32)
    batch = TokenBatch(positions + 3, positions, positions + PAGE, table, num_singles=0)
    shapes = pool_shapes(config, PoolCounts(3), page_size=PAGE, dtype="float32")

    def on_device(params, batch):
        pools = jax.tree.map(lambda of: jnp.zeros(of.shape, of.dtype), shapes)
        return forward(params, pools, batch, config=config, asked=asked)

    whole = PartitionSpec()
    mapped = jax.shard_map(on_device, mesh=config.plan.mesh, in_specs=whole, out_specs=whole, check_vma=False)
    return jax.jit(mapped)(params, batch)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("layers", PATTERNS.values(), ids=PATTERNS.keys())
def test_a_loop_over_periods_is_a_loop_for_each_layer(layers):
    config = config_of(layers)
    everywhere = tuple(range(1, len(layers)))
    assert any(len(run.period) > 1 for run in layer_runs(config.spec))
    assert all(len(run.period) == run.length == 1 for run in layer_runs(config.spec, everywhere))
    found, expected = computed(config, ()), computed(config, everywhere)
    np.testing.assert_allclose(found.hidden_TD, expected.hidden_TD, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(found.topk_ids_MTK, expected.topk_ids_MTK)
    np.testing.assert_array_equal(found.expert_counts_ME, expected.expert_counts_ME)
    for array, other in zip(jax.tree.leaves(found.pools), jax.tree.leaves(expected.pools), strict=True):
        np.testing.assert_allclose(array, other, rtol=1e-4, atol=1e-4)
