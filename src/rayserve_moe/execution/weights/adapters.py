"""Adapters of this host: all of them in host memory by key, some of them resident on the devices."""

# L layers   S resident adapters   R rank   I inputs   O outputs

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from rayserve_moe.checkpoints.adapters.unmerged import HeldAdapter, held_adapter
from rayserve_moe.checkpoints.bucket import adapter_in
from rayserve_moe.checkpoints.header import CheckpointError
from rayserve_moe.execution.served_model import ServedModel, resident_adapters, single_adapter
from rayserve_moe.execution.weights.placing import parameter_tree
from rayserve_moe.execution.weights.staged import refusing
from rayserve_moe.kernels.adapters import AdapterPair
from rayserve_moe.model.adapters import adapted_matrices, adapter_partitions
from rayserve_moe.model.model_config import AdapterStacks, ModelConfig
from rayserve_moe.model.parameters import parameters_in_files

PutAdapter = Callable[..., AdapterStacks]
"""`put_adapter` as compiled; it donates the resident adapters."""


def put_adapter(
    stacks: AdapterStacks, *, adapter: AdapterStacks, slot: jax.Array, config: ModelConfig
) -> AdapterStacks:
    """Return the resident adapters with an adapter in a slot, on every device of the mesh."""

    def on_device(stacks: AdapterStacks, adapter: AdapterStacks, slot: jax.Array) -> AdapterStacks:
        def put(stack: jax.Array, own: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_index_in_dim(stack, own, slot, axis=1)

        return jax.tree.map(put, stacks, adapter)

    parts = adapter_partitions(config)
    return jax.shard_map(
        on_device,
        mesh=config.plan.mesh,
        in_specs=(parts, adapter_partitions(config, is_single=True), PartitionSpec()),
        out_specs=parts,
        check_vma=False,
    )(stacks, adapter, slot)


class HostAdapters:
    """Adapters of a served model in host memory by key, and the resident stacks.

    `add` and `remove` may be called beside the steps.
    """

    def __init__(
        self,
        served: ServedModel,
        *,
        rules: Mapping[str, str],
    ) -> None:
        config, self._rules, self._settings = served.config, rules, served.settings.adapters
        self._single, self._shapes = single_adapter(served), resident_adapters(served)
        tree = parameter_tree(config, dtype=served.dtype)
        self._tree = parameters_in_files(tree, rules, spec=config.spec)
        self._matrices = list(adapted_matrices(tree, config.spec))
        self._held: dict[str, HeldAdapter] = {}
        self.stacks: AdapterStacks = {}
        """On the devices; empty until `allocate`."""

    def allocate(self) -> None:
        """Allocate the resident stacks, all zero."""
        self.stacks = jax.tree.map(lambda shape: _on_devices(np.zeros(shape.shape, shape.dtype), shape), self._shapes)

    def add(self, key: str, body: np.ndarray) -> None:
        """Hold an adapter by its key, `SentAdapter.body`.

        Raises: WeightsRefusedError, in a single line, for an adapter that has no place beside the weights.
        """
        with refusing():
            config, tensors = adapter_in(body)
            if config is None:
                raise CheckpointError("the bucket holds no adapter")
            self._held[key] = held_adapter(
                config, tensors, matrices=self._matrices, tree=self._tree, rules=self._rules, settings=self._settings
            )

    def remove(self, key: str) -> None:
        """Drop an adapter from host memory."""
        self._held.pop(key, None)

    def put(self, loads: Iterable[tuple[int, str]], *, program: PutAdapter | None) -> None:
        """Make adapters resident: pairs of a slot and a key."""
        assert program is not None, "the server has programs for adapters"
        for slot, key in loads:
            self.stacks = program(self.stacks, adapter=self._on_devices(self._held[key]), slot=np.int32(slot))

    def put_nothing(self, *, program: PutAdapter | None) -> None:
        """Run the program of `put` once with an adapter that changes nothing."""
        assert program is not None, "the server has programs for adapters"
        self.stacks = program(self.stacks, adapter=self._on_devices({}), slot=np.int32(0))

    def _on_devices(self, held: HeldAdapter) -> AdapterStacks:
        """Return an adapter as arrays on the devices."""

        def of(group: str, name: str, pair: AdapterPair) -> AdapterPair:
            arrays = held.get((group, name)) or tuple(np.zeros(shape.shape, shape.dtype) for shape in pair)
            return AdapterPair(*(_on_devices(array, shape) for array, shape in zip(arrays, pair, strict=True)))

        return {
            group: {name: of(group, name, pair) for name, pair in pairs.items()}
            for group, pairs in self._single.items()
        }


def _on_devices(array: np.ndarray, shape: Any) -> jax.Array:
    """Return this process's part of an array on its devices, with the sharding of `shape`."""
    return jax.make_array_from_callback(array.shape, shape.sharding, lambda index: array[index])
