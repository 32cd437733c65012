"""Resident adapters as arrays: a pair of stacks for every adapted matrix."""

# L layers   S resident adapters   R rank   I inputs   O outputs   P expert slots

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, cast

import jax

from rayserve_moe.kernels.adapters import AdapterPair
from rayserve_moe.model.layers.table import FFNS, MIXERS
from rayserve_moe.model.model_config import AdapterStacks, ModelConfig
from rayserve_moe.model.param_spec import ParamSpec
from rayserve_moe.model.parameters import parameter_specs
from rayserve_moe.model.spec import ModelSpec

ParameterTree = Mapping[str, Mapping[str, ParamSpec]]


class AdaptedMatrix(NamedTuple):
    """A matrix that adapters may change, over the layers of its group."""

    group: str
    name: str
    spec: ParamSpec
    shared_part: int | None = None
    """The part of a pair that all experts of a layer share, 0 for A or 1 for B; None if each expert has both."""

    def slots(self, part: int) -> tuple[tuple[int, str], ...]:
        """Return size and logical axis of the expert slots of a part of the pair; nothing if it has no slots."""
        has_slots = self.spec.num_experts and part != self.shared_part
        return ((self.spec.shape[1], "expert_slots"),) if has_slots else ()

    @property
    def inputs(self) -> tuple[int, str | None]:
        """Return size and logical axis of the inputs."""
        place = -2 if self.spec.column_dim == -1 else -1
        return self.spec.shape[place], self.spec.axes[place]

    @property
    def outputs(self) -> tuple[int, str | None]:
        """Return size and logical axis of the outputs."""
        place = -1 if self.spec.column_dim == -1 else -2
        return self.spec.shape[place], self.spec.axes[place]


def adapted_matrices(
    tree: ParameterTree, spec: ModelSpec, *, experts: bool = False, shares_outer: bool = False
) -> Iterator[AdaptedMatrix]:
    """Yield the matrices of a model's tree of parameters that adapters may change, `experts` included if requested.

    With `shares_outer` the experts of a layer share the matrices on the model's side: A of gate and up, B of down.
    """
    names: dict[str, tuple[str, ...]] = {own.kind: MIXERS[own.kind].adapted for own in spec.mixers}
    for ffn in FFNS.values():
        names |= ffn.adapted
    for group, of_group in names.items():
        for name in of_group:
            param = tree.get(group, {}).get(name)
            if param is None or (param.num_experts and not experts):
                continue
            shared = int(param.role == "expert_down") if shares_outer and param.num_experts else None
            yield AdaptedMatrix(group, name, param, shared)


def config_matrices(tree: ParameterTree, config: ModelConfig) -> Iterator[AdaptedMatrix]:
    """Return the `adapted_matrices` of a served model."""
    return adapted_matrices(tree, config.spec, experts=config.adapts_experts, shares_outer=config.shares_outer)


def adapter_shapes(
    tree: ParameterTree, config: ModelConfig, *, dtype: str, rank: int, num_slots: int | None = None
) -> AdapterStacks:
    """Return shapes and shardings of `num_slots` resident adapters, or without that dimension of a single one.

    They are [L, S, R, I] and [L, S, R, O], or [L, P, S, R, ...] for experts, except for a part that experts share.
    Expert slots, inputs and outputs are sharded like the matrix.
    """
    stacks: AdapterStacks = {}
    resident = () if num_slots is None else ((num_slots, None),)
    for matrix in config_matrices(tree, config):
        layers = len(matrix.spec.layers), None
        pair = []
        for part, own in enumerate((matrix.inputs, matrix.outputs)):
            sizes, axes = zip(layers, *matrix.slots(part), *resident, (rank, None), own, strict=True)
            pair.append(jax.ShapeDtypeStruct(sizes, dtype, sharding=config.plan.sharding(axes)))
        stacks.setdefault(matrix.group, {})[matrix.name] = AdapterPair(*cast(list[jax.Array], pair))
    return stacks


def adapter_partitions(config: ModelConfig, *, is_single: bool = False) -> AdapterStacks:
    """Return the tree of `adapter_shapes` with partitions in place of arrays; `is_single` for a single adapter."""
    tree = parameter_specs(config.spec, dtype="float32", expert_dtype=config.experts.weight_dtype)
    shapes = adapter_shapes(tree, config, dtype="float32", rank=1, num_slots=None if is_single else 1)
    return cast(AdapterStacks, jax.tree.map(lambda shape: shape.sharding.spec, shapes))
