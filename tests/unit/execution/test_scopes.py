"""Every block of a step has its name in the lowered program, so that a trace reads like the architecture."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.config.settings import ExpertSettings
from rayserve_moe.execution.step.device_state import block_input_shapes, state_shapes
from rayserve_moe.execution.step.function import StepConfig, adjust_rows, run_step
from rayserve_moe.execution.step.inputs import InputLayout
from rayserve_moe.execution.step.pytrees import ModelWeights, StepShape
from rayserve_moe.execution.step.row_updates import ADJUSTMENT_SIZE
from rayserve_moe.execution.weights.migration import (
    expert_state,
    fetch,
    idle_vectors,
    read_counts,
    staging_shapes,
    swap,
)
from rayserve_moe.execution.weights.placing import first_placement, model_config, parameter_tree
from rayserve_moe.experts.slot_mapping import placement_arrays
from rayserve_moe.kernels.table import KERNELS
from rayserve_moe.model.families.qwen3_moe import spec_from_hf
from rayserve_moe.parallel.mesh import plan_for
from tests.support.models.core import CORE_CONFIG

BLOCKS = {
    *("unpack", "row_update", "embedding", "rotation", "norm", "attention", "dense_mlp"),
    *("router", "selection", "routing_capture", "dispatch", "experts", "combine", "shared_expert"),
    *("head", "log_probs", "adjustment", "sampling"),
}
ATTENTION = {"projections", "kv_update", "paged_attention", "output_product"}
"""Parts of attention where XLA computes it; the native kernel is one call."""


class Served:
    """The shapes of a small model with a shared expert on two data ranks of two devices, with redundant experts."""

    def __init__(self, kernels: str, backend: str) -> None:
        plan = plan_for(jax.devices()[:4], data_size=2)
        experts = ExpertSettings(backend, num_redundant=4)
        spec = spec_from_hf(CORE_CONFIG.hf_config("float32"))
        spec = replace(spec, experts=replace(spec.experts, shared="plain", shared_size=32))
        self.model = model_config(spec, plan, experts=experts, kernels=KERNELS[kernels])
        tree = parameter_tree(self.model, dtype="bfloat16")
        params = {
            group: {n: jax.ShapeDtypeStruct(p.shape, p.dtype) for n, p in of.items()} for group, of in tree.items()
        }
        self.weights = ModelWeights(params, placement_arrays(first_placement(self.model)))
        sizes = {"num_pages": 4, "page_size": 16, "num_rows": 4, "pages_per_row": 4}
        self.state = state_shapes(self.model, dtype="bfloat16", **sizes)

    def step(self) -> set[str]:
        config, shape = StepConfig(self.model, page_size=16, capture_routing=True), StepShape(4, 1, 32)
        layout = InputLayout(shape, num_rows=4)
        vectors = np.zeros((2, len(layout.padding)), np.int32)
        run = partial(run_step, layout=layout, config=config)
        return scopes_of(
            run, self.weights, self.state, vectors_NW=vectors, blocks=block_input_shapes(shape, self.model)
        )


def scopes_of(run, *args, **named) -> set[str]:
    """Every part of the names of operations in a lowered program."""
    text = jax.jit(run).lower(*args, **named).as_text(debug_info=True)
    return {part for name in re.findall(r'loc\("([^"]*)"', text) for part in re.split(r"[/()]", name)}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kernels", "backend", "blocks"),
    [
        ("cpu", "replicated", BLOCKS | ATTENTION),
        ("cpu", "fused", BLOCKS | ATTENTION),
        ("cpu_native", "all_to_all", BLOCKS),
    ],
)
def test_a_step_names_its_blocks(kernels, backend, blocks):
    assert blocks - Served(kernels, backend).step() == set()


def test_programs_beside_the_step_have_names():
    served = Served("cpu", "replicated")
    model, held = served.model, expert_state(served.weights, config=served.model)
    staging, (to_fetch, to_swap) = staging_shapes(model, dtype="bfloat16"), idle_vectors(model, slots_per_step=2)
    config = StepConfig(model, page_size=16, capture_routing=True)
    counts = jax.ShapeDtypeStruct((4, 8), jnp.int32)
    update = partial(adjust_rows, config=config)
    assert "row_update" in scopes_of(update, served.state, np.zeros(ADJUSTMENT_SIZE, np.int32))
    assert "expert_fetch" in scopes_of(partial(fetch, config=model), held, staging, vector=to_fetch)
    assert "expert_swap" in scopes_of(partial(swap, config=model), held, staging, vector=to_swap)
    assert "expert_counts" in scopes_of(partial(read_counts, config=model), counts)


def test_a_block_without_a_name_is_noticed():
    assert scopes_of(lambda values: values + 1, jnp.zeros(3)) & BLOCKS == set()
