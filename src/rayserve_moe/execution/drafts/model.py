"""Draft models: selection, layout on the target's mesh, and loading of weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import numpy as np

from rayserve_moe.checkpoints.files import CheckpointFiles, open_checkpoint
from rayserve_moe.checkpoints.header import CheckpointError
from rayserve_moe.checkpoints.loader import WeightSource, load_parameters
from rayserve_moe.config.load import checkpoint_cache
from rayserve_moe.config.settings import DRAFT_MODELS, ModelSettings, SettingsError, SpeculationSettings
from rayserve_moe.execution.drafts.parts import scratch_pages
from rayserve_moe.execution.drafts.steps import ARRAY_AXES
from rayserve_moe.execution.step.pytrees import DraftState
from rayserve_moe.execution.weights.placing import laid_out
from rayserve_moe.kernels.attention_config import PoolFormat
from rayserve_moe.kernels.cpu_native.layout import shape_problem
from rayserve_moe.kernels.table import CPU_NATIVE, KERNELS
from rayserve_moe.model.draft_layer import DraftConfig
from rayserve_moe.model.draft_spec import (
    EAGLE_IGNORED,
    MAP,
    DraftSpec,
    draft_parameters,
    eagle_rules,
    eagle_spec,
    prediction_spec,
)
from rayserve_moe.model.family_table import prediction_rules_of
from rayserve_moe.model.layers.choice import NO_POOL_LIMITS, divided_sizes, kernels_for, summed_widths
from rayserve_moe.model.model_config import ModelConfig, Parameters
from rayserve_moe.model.param_spec import ParamSpec
from rayserve_moe.model.parameters import parameters_in_files
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.model.states import PoolCounts, pool_shapes

EVERYTHING = ("*",)


@dataclass(frozen=True)
class OpenedDraft:
    """Draft model whose files are open."""

    spec: DraftSpec
    files: CheckpointFiles
    rules: Mapping[str, str]
    """Names of its tensors in the files."""
    ignored: tuple[str, ...]
    """Patterns of tensors that it does not use."""


def open_draft(
    settings: SpeculationSettings, target: ModelSpec, *, files: CheckpointFiles, model: ModelSettings
) -> OpenedDraft | None:
    """Open the draft model that the settings name for a target with `files`; return None if they name none.

    Raises: SettingsError, CheckpointError or UnsupportedModelError if it cannot be served.
    """
    if settings.algorithm not in DRAFT_MODELS:
        return None
    if target.has_windows:
        raise SettingsError(f"speculative_algorithm {settings.algorithm} does not support models with sliding windows")
    path = settings.draft_model_path
    opened = open_checkpoint(path, cache=checkpoint_cache(model.checkpoint_cache)) if path else files
    if settings.algorithm != "NEXTN":
        spec = eagle_spec(opened.config, target, algorithm=settings.algorithm, names=opened.tensors)
        return OpenedDraft(spec, opened, eagle_rules(opened.tensors), EAGLE_IGNORED)
    found = opened_prediction(opened, target)
    if found is None:
        wanted = prediction_rules_of(opened.config)["fc"]
        raise SettingsError(
            f"speculative_algorithm NEXTN: the checkpoint has no multi-token prediction layer (no tensor {wanted})"
        )
    return found


def opened_prediction(files: CheckpointFiles, target: ModelSpec) -> OpenedDraft | None:
    """Return the multi-token prediction layer of a checkpoint, or None."""
    rules = prediction_rules_of(files.config, files.tensors)
    if rules["fc"] not in files.tensors:
        return None
    return OpenedDraft(prediction_spec(target), files, rules, EVERYTHING)


def draft_config(draft: DraftSpec, target: ModelConfig, *, pool: PoolFormat = NO_POOL_LIMITS) -> DraftConfig:
    """Return how a draft model is computed, on the mesh and by the kernels of its target, for the same kind of pool.

    Its experts have no replicas.

    Raises: SettingsError if native kernels cannot compute it, or its heads do not divide over devices.
    """
    plan, spec = target.plan, draft.layer
    kernels = kernels_for(spec, KERNELS[target.kernels.name], pool=pool)
    depths = summed_widths(spec, plan.tensor_size)
    if kernels.name == CPU_NATIVE.name and (problem := shape_problem(depths)):
        raise SettingsError(f"cpu_kernels native cannot compute the draft model: {problem}; set cpu_kernels off")
    if any(size % plan.tensor_size for size in divided_sizes(spec, plan.tensor_size).values()):
        raise SettingsError(f"heads or MLP of the draft model do not divide over {plan.tensor_size} devices")
    experts = replace(
        target.experts,
        router=spec.router,
        kernels=kernels,
        num_redundant=0,
        slot_choice="first",
        selection="topk",
    )
    return DraftConfig(draft, ModelConfig(spec, experts), target)


def draft_tree(config: DraftConfig, *, dtype: str) -> dict[str, dict[str, ParamSpec]]:
    """Return the parameters of a draft model as laid out on the devices."""
    plan = config.layer.plan
    tree = draft_parameters(
        config.draft,
        dtype=dtype,
        expert_dtype=config.layer.experts.weight_dtype,
        tensor_size=plan.tensor_size,
        num_devices=plan.mesh.size,
    )
    return laid_out(tree, config.layer)


def draft_shapes(config: DraftConfig, *, dtype: str) -> Parameters:
    """Return the shapes of the parameters that `load_draft` returns."""
    plan = config.layer.plan
    params = {
        group: {
            name: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=plan.sharding(p.axes)) for name, p in specs.items()
        }
        for group, specs in draft_tree(config, dtype=dtype).items()
    }
    if config.draft.maps_words:
        num_words = (config.draft.layer.vocab_size,)
        params["draft"]["target_ids_V"] = jax.ShapeDtypeStruct(num_words, np.int32, sharding=plan.replicated())
    return cast(Parameters, params)


def spec_of(opened: OpenedDraft | None) -> DraftSpec | None:
    """Return the opened draft's spec, or None without a draft model."""
    return None if opened is None else opened.spec


def draft_of(opened: OpenedDraft | None, config: DraftConfig | None, *, dtype: str) -> Parameters | None:
    """Return the weights of the draft model, or None without a draft model."""
    return None if opened is None or config is None else cast(Parameters, load_draft(opened, config, dtype=dtype))


def load_draft(
    opened: OpenedDraft, config: DraftConfig, *, dtype: str, in_host_memory: bool = False, num_threads: int = 0
) -> dict[str, Any]:
    """Read a draft model's weights, laid out as its target's.

    Raises: CheckpointError.
    """
    plan = config.layer.plan
    tree = parameters_in_files(draft_tree(config, dtype=dtype), opened.rules, spec=config.draft.layer)
    params = load_parameters(
        WeightSource(opened.files, opened.rules, None, opened.ignored),
        tree,
        sharding_of=lambda spec: plan.sharding(spec.axes),
        in_host_memory=in_host_memory,
        num_threads=num_threads,
    )
    if config.draft.maps_words:
        ids_V = _target_ids(opened, num_words=config.target.spec.vocab_size)
        params["draft"]["target_ids_V"] = jax.device_put(ids_V, plan.replicated())
    return params


def _target_ids(opened: OpenedDraft, *, num_words: int) -> np.ndarray:
    """Return the target's id of each id of the draft, int32; files store the differences."""
    name = next(name for name in opened.files.tensors if name == MAP)
    offsets = opened.files.read_integers(name)
    ids_V = np.arange(opened.spec.layer.vocab_size) + offsets
    if offsets.shape != (opened.spec.layer.vocab_size,) or ids_V.min() < 0 or ids_V.max() >= num_words:
        raise CheckpointError(f"{opened.files.directory}: {name} does not map every id to an id of the target")
    return ids_V.astype(np.int32)


def draft_state_shapes(  # noqa: PLR0913 (sizes, all by keyword)
    config: DraftConfig,
    *,
    num_pages: int,
    page_size: int,
    num_rows: int,
    num_ahead: int,
    num_drafts: int,
    dtypes: tuple[str, str],
) -> DraftState:
    """Return the shapes of a draft's state for pages and rows of every data rank.

    `dtypes` are the dtypes of features and of the KV cache.
    """
    plan, spec = config.layer.plan, config.draft.layer
    dtype, kv_dtype = dtypes
    num_pages += num_rows * scratch_pages(num_ahead, page_size)
    pools = pool_shapes(config.layer, PoolCounts(num_pages), page_size=page_size, dtype=kv_dtype)
    shapes = (num_rows, spec.hidden_size), (num_rows,), (num_rows, num_drafts)
    of_rows = (
        jax.ShapeDtypeStruct((plan.data_size * shape[0], *shape[1:]), of, sharding=plan.sharding(axes))
        for shape, of, axes in zip(shapes, (dtype, "int32", "int32"), ARRAY_AXES, strict=True)
    )
    return DraftState(pools, *cast(Any, of_rows))
