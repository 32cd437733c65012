"""A layer whose begin, attention and new rows are kernels of our own is the layer of the reference."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.checkpoints.synthetic import PRESETS
from rayserve_moe.config.settings import ExpertSettings
from rayserve_moe.execution.weights.placing import model_config
from rayserve_moe.kernels.attention_layer import TokenBatch
from rayserve_moe.kernels.operations import Kernels, PoolKernels
from rayserve_moe.kernels.table import CPU, PAGED, TPU, grouped_attention
from rayserve_moe.kernels.tpu import paged_attention
from rayserve_moe.model.decoder_layers import LayerCarry, LayerPlace, add_mixer, norm_for_ffn, step_inputs
from rayserve_moe.model.families.qwen3_moe import spec_from_hf
from rayserve_moe.parallel.mesh import plan_for
from tests.support.kernels.interpreter import interpreted
from tests.support.models.attention_specs import with_attention

LAYERS, LAYER, PAGE, WIDTH = 2, 1, 16, 64
POSITIONS = (40, -1, 7)
PROMPT = (17, 18, -1, -1)
"""A block of a prompt, whose rows are written ahead of attention."""


def own_kernels() -> Kernels:
    interpreter = pltpu.InterpretParams()
    paged, writing = (partial(of, interpret=interpreter) for of in (paged_attention.attend, paged_attention.attend_new))
    project, begin = (interpreted(each, interpreter) for each in (PAGED.project, PAGED.norm_and_project))
    attention = replace(
        grouped_attention(decode=paged, prefill=paged, write_and_decode=writing, project=project),
        describe_singles=paged_attention.describe_singles,
        norm_and_project=begin,
        has_packed_rows=True,
    )
    add_norm = interpreted(TPU.add_norm, interpreter)
    return replace(CPU, attention=attention, pool=PoolKernels(), add_norm=add_norm)


def block_by(kernels: Kernels, prompt: tuple[int, ...]) -> list[np.ndarray]:
    """The stream, its norm, and the pool behind attention, [layers * pages, page, elements of a row]."""
    spec = spec_from_hf(PRESETS["tiny"].hf_config("float32"))
    spec = replace(with_attention(spec, num_heads=4, num_kv_heads=2, head_dim=128), hidden_size=WIDTH)
    config = model_config(spec, plan_for(jax.devices()[:1]), experts=ExpertSettings(), kernels=kernels)
    generator, row = np.random.default_rng(3), (2, 2 * 128)
    shapes = {"q_LDH": (WIDTH, 512), "k_LDG": (WIDTH, 256), "v_LDG": (WIDTH, 256), "o_LHD": (512, WIDTH)}
    shapes |= {"q_norm_Lh": (128,), "k_norm_Lh": (128,), "norm_LD": (WIDTH,)}
    drawn = {name: generator.standard_normal((LAYERS, *shape)) / 8 for name, shape in shapes.items()}
    weights = {"gqa": {name: jnp.asarray(array, jnp.float32) for name, array in drawn.items()}}
    weights["mlp_norm"] = {"scale": jnp.asarray(generator.standard_normal((LAYERS, WIDTH)), jnp.float32)}
    positions, num_blocks = np.array((*POSITIONS, *prompt), np.int32), len(POSITIONS) + bool(prompt)
    tables = generator.permutation(np.arange(1, 1 + num_blocks * 3)).reshape(num_blocks, 3).astype(np.int32)
    of_token = np.minimum(np.arange(len(positions)), len(POSITIONS))
    slots = np.where(positions >= 0, tables[of_token, positions // PAGE] * PAGE + positions % PAGE, 0)
    pool = generator.standard_normal((LAYERS * (num_blocks * 3 + 1), PAGE, *row))
    batch = TokenBatch(*(jnp.asarray(a) for a in (positions, positions, slots, tables)), num_singles=len(POSITIONS))
    hidden, added = (jnp.asarray(generator.standard_normal((len(positions), WIDTH)), jnp.float32) for _ in range(2))

    def run(pool: jax.Array) -> tuple[jax.Array, ...]:
        pools = {"kv": (pool,)}
        carry, inputs = LayerCarry(hidden, added, pools, jnp.int32(0), {}), step_inputs(batch, pools, config)
        place = LayerPlace(*[jnp.int32(LAYER)] * 4)
        carry = add_mixer(weights, carry, spec.layers[LAYER], place=place, inputs=inputs, config=config)
        return *norm_for_ffn(weights, carry, place=place, config=config), *carry.pools["kv"]

    pool = jnp.asarray(pool, jnp.float32)
    *found, pool = jax.jit(run)(pool.reshape(*pool.shape[:2], -1) if kernels.attention.has_packed_rows else pool)
    keeps = np.asarray(positions >= 0)
    written = np.array(pool).reshape(*pool.shape[:2], -1)
    # Padding writes into page 0 of the layer, which no sequence owns.
    written[LAYER * (num_blocks * 3 + 1)] = 0
    return [*(np.asarray(array)[keeps] for array in found), written]


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [(), PROMPT], ids=["single tokens", "beside a prompt"])
def test_a_layer_by_our_own_kernels_is_the_reference(prompt, monkeypatch):
    monkeypatch.setattr(paged_attention, "cores_of_device", lambda _=None: 1)
    for own, expected in zip(block_by(own_kernels(), prompt), block_by(CPU, prompt), strict=True):
        np.testing.assert_allclose(own, expected, rtol=2e-5, atol=2e-5)
