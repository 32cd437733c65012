"""Adapters of this host: all of them in host memory by key, some of them resident on the devices."""

# L layers   S resident adapters   R rank   I inputs   O outputs   E experts   P expert slots

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from rayserve_moe.checkpoints.adapters.unmerged import HeldAdapter, held_adapter
from rayserve_moe.checkpoints.bucket import adapter_in
from rayserve_moe.checkpoints.header import CheckpointError
from rayserve_moe.execution.served_model import ServedModel, resident_adapters, single_adapter
from rayserve_moe.execution.weights.migration import swapped_experts
from rayserve_moe.execution.weights.placing import parameter_tree
from rayserve_moe.execution.weights.staged import refusing
from rayserve_moe.experts.slot_mapping import PlacementArrays, experts_of_slots
from rayserve_moe.kernels.adapters import AdapterPair
from rayserve_moe.model.adapters import adapter_partitions, config_matrices
from rayserve_moe.model.model_config import AdapterStacks, ModelConfig
from rayserve_moe.model.parameters import parameters_in_files

EXPERTS = "experts"
"""Group of the matrices that move with their experts."""


class AdapterPrograms(NamedTuple):
    """Compiled programs that change the resident adapters, which they donate."""

    put: Callable[..., AdapterStacks]
    """Compiled `put_adapter`."""
    put_layer: Callable[..., dict[str, AdapterPair]] | None = None
    """Compiled `put_layer`; None if no adapters move."""


def put_adapter(
    stacks: AdapterStacks, *, adapter: AdapterStacks, slot: jax.Array, config: ModelConfig
) -> AdapterStacks:
    """Return the resident adapters with an adapter in a slot, on every device of the mesh."""

    def on_device(stacks: AdapterStacks, adapter: AdapterStacks, slot: jax.Array) -> AdapterStacks:
        def put(stack: jax.Array, own: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_index_in_dim(stack, own, slot, axis=own.ndim - 2)

        return jax.tree.map(put, stacks, adapter)

    parts = adapter_partitions(config)
    return jax.shard_map(
        on_device,
        mesh=config.plan.mesh,
        in_specs=(parts, adapter_partitions(config, is_single=True), PartitionSpec()),
        out_specs=parts,
        check_vma=False,
    )(stacks, adapter, slot)


def put_layer(
    experts: dict[str, AdapterPair], *, rows: dict[str, AdapterPair], layer: jax.Array, config: ModelConfig
) -> dict[str, AdapterPair]:
    """Replace a layer of the resident adapters of experts by `rows` [P, S, R, ...], on every device of the mesh."""

    def on_device(
        experts: dict[str, AdapterPair], rows: dict[str, AdapterPair], layer: jax.Array
    ) -> dict[str, AdapterPair]:
        def put(stack: jax.Array, own: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_index_in_dim(stack, own, layer, axis=0)

        return jax.tree.map(put, experts, rows)

    parts = adapter_partitions(config)[EXPERTS]
    of_layer = jax.tree.map(_without_layers, parts, is_leaf=_is_partition)
    return jax.shard_map(
        on_device,
        mesh=config.plan.mesh,
        in_specs=(parts, of_layer, PartitionSpec()),
        out_specs=parts,
        check_vma=False,
    )(experts, rows, layer)


def layer_shapes(served: ServedModel) -> dict[str, AdapterPair] | None:
    """Return the shapes of a layer's resident adapters of experts; None if no adapters move."""
    stacks = (resident_adapters(served) or {}).get(EXPERTS)
    if stacks is None or not served.moves_experts:
        return None

    def of_layer(shape: Any) -> Any:
        sharding = NamedSharding(served.config.plan.mesh, _without_layers(shape.sharding.spec))
        return jax.ShapeDtypeStruct(shape.shape[1:], shape.dtype, sharding=sharding)

    return jax.tree.map(of_layer, stacks)


def _without_layers(partition: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(*tuple(partition)[1:])


def _is_partition(each: Any) -> bool:
    return isinstance(each, PartitionSpec)


class HostAdapters:
    """Adapters of a served model in host memory by key, and the resident stacks.

    `add` and `remove` may be called while steps run. Matrices of experts lie in the slots of their experts: after a
    swap of experts, `follow` writes the layer again from host memory.
    """

    def __init__(
        self,
        served: ServedModel,
        *,
        rules: Mapping[str, str],
    ) -> None:
        config, self._rules, self._settings = served.config, rules, served.settings.adapters
        self._single, self._shapes = single_adapter(served), resident_adapters(served)
        self._layer, self._dtype = layer_shapes(served), served.dtype
        tree = parameter_tree(config, dtype=served.dtype)
        self._tree = parameters_in_files(tree, rules, spec=config.spec)
        self._matrices = list(config_matrices(tree, config))
        self._held: dict[str, HeldAdapter] = {}
        self._resident: dict[int, str] = {}
        """Key of the adapter in each slot."""
        self._expert_of_slot = served.placement.expert_of_slot
        self.stacks: AdapterStacks = {}
        """On the devices; empty until `allocate`."""

    def allocate(self, maps: PlacementArrays | None) -> None:
        """Allocate the resident stacks, all zero, for experts placed by `maps`."""
        self.stacks = jax.tree.map(lambda shape: _on_devices(np.zeros(shape.shape, shape.dtype), shape), self._shapes)
        self._resident.clear()
        self._place(maps)

    def add(self, key: str, body: np.ndarray) -> None:
        """Hold an adapter by its key, `SentAdapter.body`.

        Raises: WeightsRefusedError, in a single line, for an adapter that has no place beside the weights.
        """
        with refusing():
            config, tensors = adapter_in(body)
            if config is None:
                raise CheckpointError("the bucket holds no adapter")
            self._held[key] = held_adapter(
                config,
                tensors,
                matrices=self._matrices,
                tree=self._tree,
                rules=self._rules,
                settings=self._settings,
                dtype=self._dtype,
            )

    def remove(self, key: str) -> None:
        """Drop an adapter from host memory."""
        self._held.pop(key, None)

    def put(self, loads: Iterable[tuple[int, str]], *, programs: AdapterPrograms | None) -> None:
        """Make adapters resident: pairs of a slot and a key."""
        assert programs is not None, "the server has programs for adapters"
        for slot, key in loads:
            self._resident[slot] = key
            self.stacks = programs.put(self.stacks, adapter=self._on_devices(self._held[key]), slot=np.int32(slot))

    def put_nothing(self, *, programs: AdapterPrograms | None) -> None:
        """Run every program once with adapters that change nothing."""
        assert programs is not None, "the server has programs for adapters"
        self.stacks = programs.put(self.stacks, adapter=self._on_devices({}), slot=np.int32(0))
        if self._layer is not None:
            self._put_layer(0, programs)

    def follow(self, swap: np.ndarray, *, programs: AdapterPrograms | None) -> None:
        """Move the adapters of a layer's experts after a swap, given its vector."""
        if self._layer is None or programs is None:
            return
        layer, experts = swapped_experts(swap, num_slots=self._expert_of_slot.shape[1])
        if layer < 0:
            return
        self._expert_of_slot = self._expert_of_slot.copy()
        self._expert_of_slot[layer] = experts
        self._put_layer(layer, programs)

    def replace_weights(self, maps: PlacementArrays | None, *, programs: AdapterPrograms | None) -> None:
        """Write the resident adapters again if the `maps` of new weights place experts differently."""
        before = self._expert_of_slot
        self._place(maps)
        if EXPERTS in self.stacks and not np.array_equal(before, self._expert_of_slot):
            held = [(slot, key) for slot, key in self._resident.items() if key in self._held]
            self.put(held, programs=programs)

    def _place(self, maps: PlacementArrays | None) -> None:
        if maps is not None:
            self._expert_of_slot = experts_of_slots(np.asarray(maps.bounds_LP), np.asarray(maps.slots_LP))

    def _put_layer(self, layer: int, programs: AdapterPrograms) -> None:
        """Write a layer of the resident adapters of experts from host memory."""
        assert self._layer is not None and programs.put_layer is not None, "the adapters of experts move"

        def of(name: str, part: int, shape: Any) -> jax.Array:
            def rows(index: tuple[slice, ...] | None) -> np.ndarray:
                assert index is not None, "the stacks have dimensions"
                held = {slot: self._held.get(key, {}).get((EXPERTS, name)) for slot, key in self._resident.items()}
                arrays = {slot: pair[part][layer] for slot, pair in held.items() if pair is not None}
                if len(index) == 3:  # the experts share it
                    own = np.zeros(shape.shape, shape.dtype)
                    for slot, array_RI in arrays.items():
                        own[slot] = array_RI
                    return own[index]
                experts = self._expert_of_slot[layer, index[0]]
                own = np.zeros((len(experts), *shape.shape[1:]), shape.dtype)
                for slot, array_ERI in arrays.items():
                    own[:, slot] = array_ERI[experts]
                return own[:, *index[1:]]

            return jax.make_array_from_callback(shape.shape, shape.sharding, rows)

        rows = {
            name: AdapterPair(*(of(name, part, shape) for part, shape in enumerate(pair)))
            for name, pair in self._layer.items()
        }
        moved = programs.put_layer(self.stacks[EXPERTS], rows=rows, layer=np.int32(layer))
        self.stacks = {**self.stacks, EXPERTS: moved}

    def _on_devices(self, held: HeldAdapter) -> AdapterStacks:
        """Return an adapter as arrays on the devices."""

        def of(group: str, name: str, pair: AdapterPair) -> AdapterPair:
            if (arrays := held.get((group, name))) is None:
                return AdapterPair(*(_on_devices(np.zeros(shape.shape, shape.dtype), shape) for shape in pair))
            return AdapterPair(*(self._placed(array, shape) for array, shape in zip(arrays, pair, strict=True)))

        return {
            group: {name: of(group, name, pair) for name, pair in pairs.items()}
            for group, pairs in self._single.items()
        }

    def _placed(self, array: np.ndarray, shape: Any) -> jax.Array:
        """Return an array of an adapter with the sharding of `shape`; of experts, [L, E, ...] as [L, P, ...]."""
        if array.ndim == 3:
            return _on_devices(array, shape)

        def rows(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None, "the stacks have dimensions"
            layers, experts = np.arange(len(array))[index[0]], self._expert_of_slot[index[:2]]
            return array[layers[:, None], experts][:, :, *index[2:]]

        return jax.make_array_from_callback(shape.shape, shape.sharding, rows)


def _on_devices(array: np.ndarray, shape: Any) -> jax.Array:
    """Return this process's part of an array on its devices, with the sharding of `shape`."""
    return jax.make_array_from_callback(array.shape, shape.sharding, lambda index: array[index])
