"""Layout of a model on a mesh, and loading of its weights into their slots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import jax
import numpy as np

from rayserve_moe.balancing.placement import ExpertPlacement, PlacementError, identity_placement, lowered_redundancy
from rayserve_moe.checkpoints.files import CheckpointFiles, open_checkpoint
from rayserve_moe.checkpoints.loader import WeightSource, load_parameters
from rayserve_moe.config.load import checkpoint_cache
from rayserve_moe.config.settings import ExpertSettings, ModelSettings, SettingsError
from rayserve_moe.execution.step.pytrees import ModelWeights
from rayserve_moe.execution.weights.huge_pages import use_huge_pages
from rayserve_moe.experts.config import ExpertConfig
from rayserve_moe.experts.slot_mapping import PlacementArrays, placement_arrays
from rayserve_moe.kernels.attention_config import PoolFormat
from rayserve_moe.kernels.operations import Kernels
from rayserve_moe.kernels.table import KERNELS
from rayserve_moe.model.family_table import family_of, rules_of, spec_from_config
from rayserve_moe.model.layers.choice import NO_POOL_LIMITS, divided_sizes, kernels_for
from rayserve_moe.model.layers.moe import QUANTIZED
from rayserve_moe.model.model_config import ModelConfig, Parameters
from rayserve_moe.model.param_spec import ParamSpec
from rayserve_moe.model.parameters import parameter_specs, parameters_in_files
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.parallel.mesh import multiplies_e4m3, platform_of
from rayserve_moe.parallel.sharding import ParallelPlan, num_parts


def model_config(
    spec: ModelSpec,
    plan: ParallelPlan,
    *,
    experts: ExpertSettings,
    kernels: Kernels | None = None,
    pool: PoolFormat = NO_POOL_LIMITS,
) -> ModelConfig:
    """Return how a model is computed on a mesh, by `kernels` or the platform's, for a `pool`.

    The number of redundant experts is lowered until the slots of a layer divide by the devices.

    Raises: SettingsError with the size that does not divide over devices, UnsupportedModelError if the kernels have no
        attention for the model and the pool.
    """
    _check_divisible(spec, plan)
    if experts.backend == "local" and plan.num_expert_ranks > 1:
        raise SettingsError(f"expert_backend local needs a single device, not {plan.num_expert_ranks}; set auto")
    try:
        num_redundant = lowered_redundancy(
            spec.router.num_experts, ep_size=plan.num_expert_ranks, wanted=experts.num_redundant
        )
    except PlacementError as error:
        raise SettingsError(f"num_redundant_experts: {error}") from error
    selection = _selection(experts, num_redundant=num_redundant)
    config = ExpertConfig(
        spec.router,
        kernels_for(spec, kernels or KERNELS[platform_of(plan.mesh)], pool=pool),
        plan,
        num_redundant=num_redundant,
        backend=experts.backend,
        slot_choice="first" if selection == "topk" and num_redundant else experts.dispatch,
        selection=selection,
        capacity_scope=experts.capacity_scope,
        activation=spec.experts.gating(),
        weight_dtype=QUANTIZED.get(experts.weight_dtype, ""),
        narrows_rows=_narrows_rows(experts, plan, kernels=kernels),
    )
    return ModelConfig(spec, config)


def _narrows_rows(experts: ExpertSettings, plan: ParallelPlan, *, kernels: Kernels | None) -> bool:
    """Return True if products of experts round rows to e4m3. Raises SettingsError if weights or devices do not fit."""
    if experts.products == "auto":
        return False
    if experts.weight_dtype != "fp8":
        raise SettingsError(f"expert_products fp8 needs expert_dtype fp8, not {experts.weight_dtype}")
    if kernels is not None and kernels.name == "cpu_native":
        raise SettingsError("expert_products fp8: native CPU kernels do not round tokens; set cpu_kernels off")
    if platform_of(plan.mesh) == "gpu":
        raise SettingsError("expert_products fp8: kernels of GPUs multiply 8 bits as bfloat16; set auto")
    if not multiplies_e4m3(plan.mesh):
        raise SettingsError("expert_products fp8: TPUs before v7x do not multiply 8 bits; set auto")
    return True


def first_placement(config: ModelConfig) -> ExpertPlacement:
    """Return the initial placement: experts in their own order, redundant slots filled from the front."""
    spec = config.spec
    return identity_placement(
        len(spec.moe_layer_ids),
        spec.router.num_experts,
        ep_size=config.plan.num_expert_ranks,
        num_redundant=config.experts.num_redundant,
    )


def open_model(model: ModelSettings) -> CheckpointFiles:
    """Open the served checkpoint; data read from a remote checkpoint is cached by `checkpoint_cache`."""
    return open_checkpoint(model.path, cache=checkpoint_cache(model.checkpoint_cache))


def load_weights(
    files: CheckpointFiles, config: ModelConfig, *, dtype: str, placement: ExpertPlacement, may_change: bool = False
) -> ModelWeights:
    """Load this host's share of the weights, with experts in the slots of `placement`.

    Maps are included if the placement needs them, or if it `may_change`.

    Raises: CheckpointError.
    """
    tree, slots = parameter_tree(config, dtype=dtype), placement.expert_of_slot
    params = read_parameters(files, tree, plan=config.plan, expert_of_slot=slots)
    return ModelWeights(cast(Parameters, params), maps_on_devices(placement, config.plan, may_change=may_change))


def maps_on_devices(placement: ExpertPlacement, plan: ParallelPlan, *, may_change: bool) -> PlacementArrays | None:
    """Return the maps if the placement needs them or `may_change`, else None."""
    maps = _maps_of(placement, may_change=may_change)
    return jax.tree.map(lambda array: jax.device_put(array, plan.replicated()), maps)


def weight_shapes(
    config: ModelConfig, *, dtype: str, placement: ExpertPlacement, may_change: bool = False
) -> ModelWeights:
    """Return the shapes of the weights that `load_weights` and `with_capacity` return."""
    plan, tree = config.plan, parameter_tree(config, dtype=dtype)
    params = {
        group: {
            name: jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=plan.sharding(spec.axes))
            for name, spec in specs.items()
        }
        for group, specs in tree.items()
    }
    maps, factor = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=plan.replicated()),
        (_maps_of(placement, may_change=may_change), np.float32(0) if config.experts.limits_capacity else None),
    )
    return ModelWeights(cast(Parameters, params), maps, factor)


def read_parameters(
    files: CheckpointFiles,
    tree: dict[str, dict[str, ParamSpec]],
    *,
    plan: ParallelPlan,
    expert_of_slot: np.ndarray,
    in_host_memory: bool = False,
    num_threads: int = 0,
) -> dict[str, Any]:
    """Read a checkpoint by the rules of its family, laid out by a plan, on `num_threads` (0: one per core)."""
    rules, ignored = rules_of(files.config, files.tensors), getattr(family_of(files.config), "IGNORED", ())
    params = load_parameters(
        WeightSource(files, rules, expert_of_slot, ignored),
        parameters_in_files(tree, rules, spec=spec_from_config(files.config)),
        sharding_of=lambda spec: plan.sharding(spec.axes),
        in_host_memory=in_host_memory,
        num_threads=num_threads,
    )
    if not in_host_memory and platform_of(plan.mesh) == "cpu":
        use_huge_pages(jax.tree.leaves(params))
    return params


def with_capacity(weights: ModelWeights, factor: float, *, config: ModelConfig) -> ModelWeights:
    """Add the capacity factor of slots if the config limits capacity."""
    if not config.experts.limits_capacity:
        return weights
    return replace(weights, capacity_factor=jax.device_put(np.float32(factor), config.plan.replicated()))


def _selection(experts: ExpertSettings, *, num_redundant: int) -> str:
    """Resolve `expert_selection: auto`."""
    if experts.selection != "auto":
        return experts.selection
    return "replicas_only" if num_redundant else "topk"


def parameter_tree(config: ModelConfig, *, dtype: str) -> dict[str, dict[str, ParamSpec]]:
    """Return the parameters of a model as laid out on the devices of its mesh."""
    tree = parameter_specs(
        config.spec,
        dtype=dtype,
        expert_dtype=config.experts.weight_dtype,
        tensor_size=config.plan.tensor_size,
        num_devices=config.plan.mesh.size,
        num_redundant=config.experts.num_redundant,
    )
    return laid_out(tree, config)


def laid_out(tree: dict[str, dict[str, ParamSpec]], config: ModelConfig) -> dict[str, dict[str, ParamSpec]]:
    """Return the parameters padded and laid out in memory for the model's kernels."""
    layouts = {**config.kernels.parameters.layouts}
    layouts["table_VD" if config.spec.tie_embeddings else "head_VD"] = layouts.pop("head", "")
    multiples = _multiples(config)

    def held(name: str, spec: ParamSpec) -> ParamSpec:
        for axis, multiple in multiples.items():
            spec = spec.padded(axis, multiple)
        return replace(spec, layout=layouts.get(name, ""))

    return {group: {name: held(name, spec) for name, spec in specs.items()} for group, specs in tree.items()}


def _multiples(config: ModelConfig) -> dict[str, int]:
    """Return the divisor of each axis that is padded for the model's kernels."""
    layout, sizes = config.kernels.parameters, {"model": config.spec.hidden_size}
    return {
        axis: size * num_parts(config.plan, axis)
        for axis, size in layout.multiples.items()
        if axis not in layout.padded_beside or sizes[layout.padded_beside[axis]] % size == 0
    }


def _maps_of(placement: ExpertPlacement, *, may_change: bool) -> PlacementArrays | None:
    """Return the maps in host memory; None if every expert stays in the slot of its own number."""
    if (
        not may_change
        and placement.num_redundant == 0
        and (placement.expert_of_slot == np.arange(placement.num_experts)).all()
    ):
        return None
    return placement_arrays(placement)


def _check_divisible(spec: ModelSpec, plan: ParallelPlan) -> None:
    parts = plan.tensor_size
    for name, size in divided_sizes(spec, parts).items():
        if size % parts:
            raise SettingsError(f"{name} {size} does not divide over {parts} devices; choose a divisor of {size}")
