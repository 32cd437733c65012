"""Programs that move experts over the whole mesh, and the int32 vectors that they take."""

# L layers   P slots of all ranks   S slots of a rank in a layer   E experts   R ranks   B slots fetched per rank
# W words of a vector

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from rayserve_moe.balancing.migration import FailedFetch, LayerSwap, MigrationPiece, SlotFetch
from rayserve_moe.execution.step.pytrees import ExpertState, ModelWeights
from rayserve_moe.execution.weights.placing import parameter_tree
from rayserve_moe.experts.migration import SlotArrays, SwappedLayer, fetch_slots, swap_layer
from rayserve_moe.experts.slot_mapping import PlacementArrays, experts_of_slots, placement_arrays
from rayserve_moe.model.layers.moe import slot_specs
from rayserve_moe.model.model_config import ModelConfig
from rayserve_moe.model.param_spec import ParamSpec

NO_LAYER = -1


def staging_shapes(config: ModelConfig, *, dtype: str) -> SlotArrays:
    """Return the shapes of the staging area, in which fetched slots of a layer wait for its swap."""
    shapes = {
        name: jax.ShapeDtypeStruct(spec.shape[1:], spec.dtype, sharding=config.plan.sharding(spec.axes[1:]))
        for name, spec in parameter_tree(config, dtype=dtype)["experts"].items()
        if spec.num_experts
    }
    return cast(SlotArrays, shapes)


class MigrationPrograms(NamedTuple):
    """Compiled programs of a migration."""

    fetch: Callable[..., SlotArrays]
    """Compiled `fetch`; donates the staging area."""
    swap: Callable[..., ExpertState]
    """Compiled `swap`; donates the weights."""


class MigrationVectors(NamedTuple):
    """Program inputs for a piece of a migration; None for a program that does not run."""

    fetch: np.ndarray | None
    swap: np.ndarray | None
    version: int = 0
    """Version of the migration."""


def idle_vectors(config: ModelConfig, *, slots_per_step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs of fetch and swap with which they change nothing."""
    num_ranks, experts = config.plan.num_expert_ranks, config.experts
    fetch_words = 1 + 2 * num_ranks * slots_per_step
    swap_words = 1 + 3 * experts.num_slots + experts.router.num_experts * num_ranks
    return np.full(fetch_words, NO_LAYER, np.int32), np.full(swap_words, NO_LAYER, np.int32)


def expert_state(weights: ModelWeights, *, config: ModelConfig) -> ExpertState:
    """Return the weights that a migration changes; they must have maps."""
    assert weights.maps is not None, "experts only move with maps"
    experts = weights.params["experts"]
    return ExpertState({name: experts[name] for name in _slot_specs(config)}, weights.maps)


class MigrationRunner:
    """Runner of migration pieces. After a failed fetch it skips the rest of the migration, and reports the failure."""

    def __init__(self, config: ModelConfig, *, dtype: str, slots_per_step: int) -> None:
        self._config, self._dtype = config, dtype
        self.staging, self.slots_per_step = allocate_staging(config, dtype=dtype), slots_per_step
        self.failed_fetch: FailedFetch | None = None

    def move(self, weights: ModelWeights, vectors: MigrationVectors, *, programs: MigrationPrograms) -> ModelWeights:
        """Run a piece: donates the weights and returns their replacement.

        A fetch that cannot be launched, for example for lack of memory, leaves the weights unchanged and ends the
        migration.

        Raises: RuntimeError for that on several hosts, because the others wait for the fetch.
        """
        if self.failed_fetch is not None and self.failed_fetch.version == vectors.version:
            return weights
        self.failed_fetch = None
        if vectors.fetch is not None:
            try:
                self.staging = programs.fetch(
                    expert_state(weights, config=self._config), self.staging, vector=vectors.fetch
                )
            except jax.errors.JaxRuntimeError as error:
                layer = int(vectors.fetch[0])
                if self._config.plan.mesh.is_multi_process:
                    raise RuntimeError(f"the slots of layer {layer} cannot be fetched") from error
                self.failed_fetch = FailedFetch(vectors.version, layer)
                self.staging = allocate_staging(self._config, dtype=self._dtype)
                return weights
        if vectors.swap is None:
            return weights
        held = programs.swap(expert_state(weights, config=self._config), self.staging, vector=vectors.swap)
        experts = {**weights.params["experts"], **held.weights}
        return replace(weights, params={**weights.params, "experts": experts}, maps=held.maps)


def allocate_staging(config: ModelConfig, *, dtype: str) -> SlotArrays:
    """Return the staging area, zeroed."""
    shapes = staging_shapes(config, dtype=dtype)
    return {name: jnp.zeros(shape.shape, shape.dtype, device=shape.sharding) for name, shape in shapes.items()}


def fetch(held: ExpertState, staging: SlotArrays, *, vector: jax.Array, config: ModelConfig) -> SlotArrays:
    """Fetch the slots of a `fetch_vector`; return the staging area, [P, ...] over all devices."""

    def on_device(weights: SlotArrays, staging: SlotArrays, vector: jax.Array) -> SlotArrays:
        layer, moves = vector[0], vector[1:].reshape(2, config.plan.num_expert_ranks, -1)
        return fetch_slots(
            _flat(weights), staging, layer=layer, sources_RB=moves[0], places_RB=moves[1], config=config.experts
        )

    weights, staged = _partitions(config, num_dropped=0), _partitions(config, num_dropped=1)
    inputs = (weights, staged, PartitionSpec())
    run = jax.shard_map(on_device, mesh=config.plan.mesh, in_specs=inputs, out_specs=staged, check_vma=False)
    return run(held.weights, staging, vector)


def swap(held: ExpertState, staging: SlotArrays, *, vector: jax.Array, config: ModelConfig) -> ExpertState:
    """Swap the layer of a `swap_vector`; return all weights and maps."""

    def on_device(held: ExpertState, staging: SlotArrays, vector: jax.Array) -> ExpertState:
        swapped = _swapped(vector, held.maps)
        weights, maps = swap_layer(
            _flat(held.weights), held.maps, staging=staging, swapped=swapped, config=config.experts
        )
        shaped = {name: flat.reshape(held.weights[name].shape) for name, flat in weights.items()}
        return ExpertState(shaped, maps)

    weights, staged = _partitions(config, num_dropped=0), _partitions(config, num_dropped=1)
    parts = ExpertState(weights, cast(PlacementArrays, PartitionSpec()))
    inputs = (parts, staged, PartitionSpec())
    run = jax.shard_map(on_device, mesh=config.plan.mesh, in_specs=inputs, out_specs=parts, check_vma=False)
    return run(held, staging, vector)


@jax.named_scope("expert_counts")
def read_counts(counts_ME: jax.Array, *, config: ModelConfig) -> jax.Array:
    """Return tokens per MoE layer and expert, summed over data ranks, int32 [M, E] on every device."""
    by_rank = counts_ME.reshape(config.plan.data_size, -1, counts_ME.shape[1])
    return jax.lax.with_sharding_constraint(jnp.sum(by_rank, axis=0, dtype=jnp.int32), config.plan.replicated())


def vectors_of(piece: MigrationPiece) -> MigrationVectors:
    """Return the vectors of a piece, which share no memory with it."""
    fetch, swap = piece.fetch, piece.swap
    return MigrationVectors(
        None if fetch is None else fetch_vector(fetch), None if swap is None else swap_vector(swap), piece.version
    )


def fetch_vector(fetch: SlotFetch) -> np.ndarray:
    """Return layer, sources and places, int32 [1 + 2 * R * B]."""
    return np.concatenate([[fetch.layer], fetch.sources.reshape(-1), fetch.places.reshape(-1)]).astype(np.int32)


def swap_vector(swap: LayerSwap) -> np.ndarray:
    """Return the layer, its moved slots, and the rows of its maps, int32 [1 + 3 * P + E * R]."""
    maps = placement_arrays(swap.placement)
    rows = (np.asarray(array).reshape(-1) for array in (maps.bounds_LP, maps.slots_LP, maps.slot_for_LER))
    return np.concatenate([[swap.layer], swap.is_moved, *rows]).astype(np.int32)


def swapped_experts(vector: np.ndarray, *, num_slots: int) -> tuple[int, np.ndarray]:
    """Return the layer of a `swap_vector`, and the expert of each of its slots, int32 [P]."""
    _, bounds, slots = vector[1 : 1 + 3 * num_slots].reshape(3, num_slots)
    return int(vector[0]), experts_of_slots(bounds, slots)


def _swapped(vector: jax.Array, maps: PlacementArrays) -> SwappedLayer:
    num_slots, shape = maps.slots_LP.shape[1], maps.slot_for_LER.shape[1:]
    moved, bounds, slots, slot_for = jnp.split(vector[1:], [num_slots, 2 * num_slots, 3 * num_slots])
    return SwappedLayer(vector[0], moved, PlacementArrays(bounds, slots, slot_for.reshape(shape)))


def _flat(weights: SlotArrays) -> SlotArrays:
    return {name: held.reshape(-1, *held.shape[2:]) for name, held in weights.items()}


def _partitions(config: ModelConfig, *, num_dropped: int) -> SlotArrays:
    """Return the partitions of the arrays of expert slots, without their first `num_dropped` dimensions."""
    parts = {name: config.plan.partition(spec.axes[num_dropped:]) for name, spec in _slot_specs(config).items()}
    return cast(SlotArrays, parts)


def _slot_specs(config: ModelConfig) -> dict[str, ParamSpec]:
    """Return the specs of all arrays that move with an expert, including scales of quantised weights."""
    return slot_specs(config.spec, expert_dtype=config.experts.weight_dtype)
