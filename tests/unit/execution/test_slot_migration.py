"""All that an expert slot holds moves with its expert: weights, and biases where a model has them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from rayserve_moe.balancing.migration import Migration
from rayserve_moe.config.settings import ExpertSettings
from rayserve_moe.execution.step.pytrees import ModelWeights
from rayserve_moe.execution.weights.migration import MigrationPrograms, MigrationRunner, fetch, swap, vectors_of
from rayserve_moe.execution.weights.placing import first_placement, model_config
from rayserve_moe.experts.slot_mapping import placement_arrays
from rayserve_moe.model.families.qwen3_moe import spec_from_hf
from rayserve_moe.model.layers.moe import slot_specs
from rayserve_moe.parallel.mesh import plan_for
from tests.support.experts.placements import random_placement
from tests.support.models.core import CORE_CONFIG


@pytest.mark.sampled(2)
@pytest.mark.parametrize("slices", [1, 2])
def test_biases_move_with_their_experts(slices):
    """On several slices too, where a fetch is two exchanges: within slices and between them."""
    spec = spec_from_hf(CORE_CONFIG.hf_config("float32") | {"dtype": "float32"})
    plan = plan_for(jax.devices()[:4], data_size=2, num_slices=slices)
    spec = replace(spec, experts=replace(spec.experts, bias=True))
    config = model_config(spec, plan, experts=ExpertSettings(num_redundant=4))
    specs = slot_specs(spec, num_redundant=4)
    generator = np.random.default_rng(3)
    by_expert = {name: generator.random((2, 8, *param.shape[2:]), np.float32) for name, param in specs.items()}
    assert len(by_expert) == 6
    first, layers = first_placement(config), np.arange(2)[:, None]
    held = {
        name: jax.device_put(values[layers, first.expert_of_slot], plan.sharding(specs[name].axes))
        for name, values in by_expert.items()
    }
    weights = ModelWeights({"experts": held}, jax.device_put(placement_arrays(first), plan.replicated()))
    programs = MigrationPrograms(*(jax.jit(partial(run, config=config)) for run in (fetch, swap)))
    mover, migration = (
        MigrationRunner(config, dtype="float32", slots_per_step=2),
        Migration(first, hosts=slices, slices=slices, slots_per_step=2),
    )
    target = random_placement(first, seed=4)
    migration.begin(target)
    while piece := migration.next_piece():
        weights = mover.move(weights, vectors_of(piece), programs=programs)
    for name, values in by_expert.items():
        np.testing.assert_array_equal(weights.params["experts"][name], values[layers, target.expert_of_slot])
    assert (target.expert_of_slot != first.expert_of_slot).any()
