"""All logits of a sequence, from the same pure functions that the compiled steps are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from rayserve_moe.execution.runner import HostRunner
from rayserve_moe.execution.step.function import step_logits
from rayserve_moe.execution.step.pytrees import ModelWeights, StepShape
from rayserve_moe.kernels.attention_layer import TokenBatch
from rayserve_moe.model.model_config import Captures
from rayserve_moe.model.param_spec import ParamSpec
from rayserve_moe.model.parameters import parameter_specs
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.model.states import PoolCounts, pool_shapes

BLOCK = PAGE = 16


def prompt_logits_of(
    runner: HostRunner, *, longest: int, spec: ModelSpec | None = None
) -> Callable[[Sequence[int]], np.ndarray]:
    """Return a function from the ids of one sequence (up to `longest`) to its logits, float32 [T, V].

    As `prompt_outputs_of` does.
    """
    outputs_of = prompt_outputs_of(runner, longest=longest, spec=spec)
    return lambda token_ids: outputs_of(token_ids).logits_TV


class PromptOutputs(NamedTuple):
    """Outputs of every position of a sequence."""

    logits_TV: np.ndarray
    ids_MTK: np.ndarray
    """Experts of each layer that routes."""
    gates_MTK: np.ndarray
    """Weights of these experts."""
    chosen_ITK: np.ndarray | None
    """Positions that each token sees, of each layer with an index (`sparse_latent.CHOSEN`)."""


def with_offset(array: jax.Array, loaded: ParamSpec, wanted: ParamSpec) -> jax.Array:
    """Return the scales of a norm with another offset than they were loaded with, and any other array as it is."""
    added = wanted.file.offset - loaded.file.offset
    return array + added if added else array


def prompt_outputs_of(
    runner: HostRunner, *, longest: int, spec: ModelSpec | None = None
) -> Callable[[Sequence[int]], PromptOutputs]:
    """Return a function from the ids of one sequence (up to `longest`) to its outputs.

    One device; every position is sampled from, in one step over an empty pool. Compiled once, for the weights that the
    runner has when it is called. `spec` computes another model from the same weights.
    """
    spec, experts = spec or runner.config.spec, runner.config.experts
    config = replace(
        runner.config, spec=spec, experts=replace(experts, router=spec.router, activation=spec.experts.gating())
    )
    tree = parameter_specs(spec, dtype="float32", expert_dtype=experts.weight_dtype)
    loaded = parameter_specs(runner.config.spec, dtype="float32", expert_dtype=experts.weight_dtype)
    num_blocks = -(-longest // BLOCK)
    shape = StepShape(0, num_blocks, BLOCK)
    page_table = np.tile(np.arange(1, num_blocks + 1, dtype=np.int32), (num_blocks, 1))
    pools = pool_shapes(
        config, PoolCounts(num_blocks + 1, num_entries=2, num_rows=1), page_size=PAGE, dtype=runner.served.dtype
    )

    def all_logits(weights: ModelWeights, batch: TokenBatch) -> tuple[jax.Array | None, ...]:
        everywhere, empty = jnp.arange(shape.num_tokens), jax.tree.map(lambda of: jnp.zeros(of.shape, of.dtype), pools)
        out, logits_TV = step_logits(
            weights,
            empty,
            batch=batch,
            sample_places_S=everywhere,
            config=config,
            captures=Captures(index=True, gates=True),
        )
        return logits_TV, out.topk_ids_MTK, out.gates_MTK, out.chosen_ITK

    parts = PartitionSpec()
    sharded = jax.shard_map(all_logits, mesh=runner.config.plan.mesh, in_specs=parts, out_specs=parts, check_vma=False)
    compiled = jax.jit(sharded)

    def of(token_ids: Sequence[int]) -> PromptOutputs:
        count = len(token_ids)
        ids, positions, slots = np.zeros((3, shape.num_tokens), np.int32)
        positions[:] = -1
        ids[:count], positions[:count] = token_ids, np.arange(count)
        slots[:count] = PAGE + np.arange(count)
        params = runner.weights.params
        needed = {
            group: {name: with_offset(params[group][name], loaded[group][name], specs[name]) for name in specs}
            for group, specs in tree.items()
        }
        weights = replace(runner.weights, params=needed)
        # One row, whose own entry is 1, begins at the entry of zeros.
        rows, entries = np.zeros(num_blocks, np.int32), np.tile(np.array([[1, 0, 0]], np.int32), (num_blocks, 1))
        batch = TokenBatch(ids, positions, slots, page_table, num_singles=0, rows_B=rows, entries_B3=entries)
        logits_TV, *of_layers = compiled(weights, batch)
        routed = (None if each is None else np.asarray(each)[:, :count] for each in of_layers)
        return PromptOutputs(np.asarray(logits_TV)[:count], *routed)

    return of
