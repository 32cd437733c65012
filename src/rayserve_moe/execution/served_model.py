"""A model laid out for serving: its computation, and the shapes of all device arrays. No devices are needed."""

from __future__ import annotations

import logging
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import cached_property

from rayserve_moe.balancing.placement import ExpertPlacement
from rayserve_moe.config import derive
from rayserve_moe.config.adapters import AdapterSettings
from rayserve_moe.config.replay_settings import ReplaySettings
from rayserve_moe.config.settings import (
    BalancingSettings,
    CacheSettings,
    CompileSettings,
    ExpertSettings,
    LoggingSettings,
    ModelSettings,
    SchedulerSettings,
    Settings,
    SettingsError,
    SpeculationSettings,
    StructuredSettings,
    UpdateSettings,
)
from rayserve_moe.decoding.logit_processors import LogitProcessor
from rayserve_moe.execution.drafts.model import draft_config, draft_shapes, draft_state_shapes
from rayserve_moe.execution.drafts.parts import scratch_pages
from rayserve_moe.execution.memory import EntrySizes, LayerSize, PoolSizes, largest_8_bit, page_bytes
from rayserve_moe.execution.native_kernels import choose_kernels, dtype_for
from rayserve_moe.execution.processor_module import load_processors
from rayserve_moe.execution.programs.buckets import step_cost, step_shapes
from rayserve_moe.execution.step.device_state import state_shapes
from rayserve_moe.execution.step.inputs import num_columns
from rayserve_moe.execution.step.pytrees import DeviceState, ModelWeights, StepConfig, StepShape
from rayserve_moe.execution.weights.migration import staging_shapes
from rayserve_moe.execution.weights.placing import first_placement, model_config, parameter_tree, weight_shapes
from rayserve_moe.experts.migration import SlotArrays
from rayserve_moe.kernels.attention_config import PoolFormat
from rayserve_moe.model.adapters import adapter_shapes
from rayserve_moe.model.draft_layer import DraftConfig
from rayserve_moe.model.draft_spec import DraftSpec
from rayserve_moe.model.layers.index_rows import STATE as INDEX_KEYS
from rayserve_moe.model.layers.index_rows import index_layout
from rayserve_moe.model.model_config import AdapterStacks, Captures, ModelConfig
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.model.states import KeptState, entry_states, layer_pages_of, states_of, states_within, token_states
from rayserve_moe.parallel.sharding import ParallelPlan

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunnerSettings:
    """Sections of the settings that a host runner uses."""

    model: ModelSettings
    scheduler: SchedulerSettings
    cache: CacheSettings
    replay: ReplaySettings
    experts: ExpertSettings = field(default_factory=ExpertSettings)
    compile: CompileSettings = field(default_factory=CompileSettings)
    balancing: BalancingSettings = field(default_factory=BalancingSettings)
    updates: UpdateSettings = field(default_factory=UpdateSettings)
    logging: LoggingSettings = field(default_factory=LoggingSettings)
    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    structured: StructuredSettings = field(default_factory=StructuredSettings)
    adapters: AdapterSettings = field(default_factory=AdapterSettings)
    processors_digest: str = ""
    """Digest of the source of the logit processors, equal on every host."""

    @property
    def pool_format(self) -> PoolFormat:
        """Return the format of the pool that the choice of attention depends on."""
        return PoolFormat(self.cache.page_size, is_8_bit=self.cache.kv_dtype == "fp8")


def runner_settings(settings: Settings, model: ModelSettings) -> RunnerSettings:
    """Return the sections for a host runner that serves `model`."""
    return RunnerSettings(
        model,
        settings.scheduler,
        settings.cache,
        settings.replay,
        settings.experts,
        settings.compile,
        settings.balancing,
        settings.updates,
        settings.logging,
        settings.speculation,
        settings.structured,
        settings.adapters,
    )


@dataclass(frozen=True)
class ServedModel:
    """Layout derived from settings, model and mesh; the devices may belong to a topology that is not present.

    `placement` is the initial placement of experts. `shapes` are the step shapes to compile, those without adapters
    first; with a draft model, they are repeated for steps that no drafts follow. Weights, staging area and state are
    shapes with shardings.
    """

    settings: RunnerSettings
    config: ModelConfig
    dtype: str
    placement: ExpertPlacement
    shapes: tuple[StepShape, ...]
    draft: DraftConfig | None = None
    processors: tuple[LogitProcessor, ...] = ()

    @property
    def longest(self) -> int:
        """Return the maximum number of tokens of a sequence."""
        return derive.max_model_len(self.settings.model, self.config.spec.max_position_embeddings)

    @property
    def kv_dtype(self) -> str:
        """Return the dtype of keys and values."""
        return derive.kv_dtype(self.settings.cache, dtype=self.dtype)

    @property
    def expert_dtype(self) -> str:
        """Return the storage dtype of expert weights."""
        return derive.expert_dtype(self.settings.experts, dtype=self.dtype)

    @property
    def num_rows(self) -> int:
        """Return the number of rows of a data rank."""
        return self.settings.scheduler.max_running_requests

    @cached_property
    def pool(self) -> PoolSizes:
        """Return the division of memory between layers and states."""
        size, plan = self.settings.cache.page_size, self.config.plan
        layers = tuple(
            LayerSize(window, size * state.row_bytes(plan, dtype=self.kv_dtype))
            for state in self._paged
            for window in state.windows
        )
        return PoolSizes(layers, self.settings.scheduler, self.settings.cache, self._entry_sizes())

    @cached_property
    def _paged(self) -> tuple[KeptState, ...]:
        """Return the states on pages, with 0 for windows that cover every sequence."""
        return states_within(self.config, max_tokens=self.longest)

    def _entry_sizes(self) -> tuple[EntrySizes, ...]:
        plan, dtype = self.config.plan, self.kv_dtype
        of_page = page_bytes(token_states(self.config), page_size=self.settings.cache.page_size, dtype=dtype, plan=plan)
        return tuple(
            EntrySizes(
                state.kind,
                state.num_layers * state.row_bytes(plan, dtype=dtype),
                state.num_layers * state.ring_bytes(plan, dtype=dtype),
                of_page,
            )
            for state in entry_states(self.config)
        )

    @property
    def num_tables(self) -> int:
        """Return the number of page tables of a row."""
        return len({layer.window for layer in self.pool.layers})

    @property
    def moves_experts(self) -> bool:
        return self.settings.balancing.enabled

    @cached_property
    def weights(self) -> ModelWeights:
        shapes = weight_shapes(self.config, dtype=self.dtype, placement=self.placement, may_change=self.moves_experts)
        return replace(shapes, draft=None if self.draft is None else draft_shapes(self.draft, dtype=self.dtype))

    @cached_property
    def staging(self) -> SlotArrays | None:
        """Return the staging area for moving experts, or None if they never move."""
        return staging_shapes(self.config, dtype=self.dtype) if self.moves_experts else None

    def num_pages_within(self, free: int) -> int:
        """Return the pages of a data rank if a device has `free` bytes beside weights and staging area.

        Raises: NoPagesError if fewer than two fit; SettingsError if the kernels cannot address the pages that are set.
        """
        size, plan, of_draft = self.settings.cache.page_size, self.config.plan, 0
        if self.draft is not None:
            of_draft = page_bytes(states_of(self.draft.layer), page_size=size, dtype=self.kv_dtype, plan=plan)
            free -= of_draft * self.num_rows * self._scratch_pages
        return self._addressable(self.pool.num_pages_within(free, extra_page_bytes=of_draft, longest=self.longest))

    def _addressable(self, num_pages: int) -> int:
        """Return the pages, or fewer that the kernels can address; a number that is set is kept or an error."""
        first, last = self.config.kernels.pool.unreachable_bytes
        size = largest_8_bit(self.state(num_pages).pools) if last else 0
        if not first < size <= last:
            return num_pages
        fewer = bisect_right(range(num_pages), first, key=lambda n: largest_8_bit(self.state(n).pools)) - 1
        more = last * num_pages // size + 1
        sizes = f"up to {first / 1e9:.2f} GB, or more than {last / 1e9:.2f} GB"
        pool = f"a pool of {size / 1e9:.2f} GB in 8 bits: the kernels address {sizes}"
        if self.settings.cache.num_pages:
            raise SettingsError(f"num_pages {num_pages}: {pool}; set at most {fewer}, or at least {more}")
        log.warning("%s; it gets %d of %d pages: num_pages from %d on is possible", pool, fewer, num_pages, more)
        return fewer

    @property
    def _scratch_pages(self) -> int:
        return scratch_pages(self._num_ahead, self.settings.cache.page_size)

    @property
    def _num_ahead(self) -> int:
        """Return the number of a row's drafts that the draft model reads to draft further."""
        return self.settings.speculation.max_drafts - 1

    def step_config(self, num_pages: int) -> StepConfig:
        layer_pages = layer_pages_of(self._paged, self.pool.groups(num_pages))
        return StepConfig(
            self.config,
            self.settings.cache.page_size,
            self.settings.replay.enabled,
            captures_of(self.settings.replay),
            layer_pages=layer_pages,
            max_drafts=self.settings.speculation.max_drafts,
            num_columns=num_columns(self.config),
            holds_samples=self.settings.structured.enabled,
            draft=self.draft,
            shows_hidden=self.settings.replay.shows_hidden,
            audits=self.settings.replay.audits,
            state_layers=self.settings.replay.state_layers,
            processors=self.processors,
        )

    def state(self, num_pages: int) -> DeviceState:
        step = self.step_config(num_pages)
        state = state_shapes(
            self.config,
            num_pages=self.pool.groups(num_pages)[0].num_pages,
            page_size=step.page_size,
            dtype=self.kv_dtype,
            num_rows=self.num_rows,
            pages_per_row=derive.pages_per_sequence(self.longest, step.page_size),
            layer_pages=step.layer_pages,
            num_entries=sum(group.num_entries for group in self.pool.entry_groups(num_pages)),
            num_columns=num_columns(self.config),
        )
        if self.draft is None:
            return state
        own = draft_state_shapes(
            self.draft,
            num_pages=num_pages,
            page_size=step.page_size,
            num_rows=self.num_rows,
            num_ahead=self._num_ahead,
            num_drafts=step.max_drafts,
            dtypes=(self.dtype, self.kv_dtype),
        )
        return replace(state, draft=own)


def captures_of(replay: ReplaySettings) -> Captures:
    """Return the decisions that steps return beside the routing."""
    return Captures(index=replay.shows_index, gates=replay.shows_gates)


def resident_adapters(served: ServedModel) -> AdapterStacks | None:
    """Return the shapes of the resident adapters; None on a server without."""
    num_slots = served.settings.adapters.num_slots
    return _adapter_shapes(served, num_slots) if num_slots else None


def single_adapter(served: ServedModel) -> AdapterStacks:
    """Return the shapes of an adapter."""
    return _adapter_shapes(served, None)


def beside_weights(served: ServedModel) -> tuple[SlotArrays | None, AdapterStacks | None]:
    """Return the arrays on the devices besides weights and state."""
    return served.staging, resident_adapters(served)


def _adapter_shapes(served: ServedModel, num_slots: int | None) -> AdapterStacks:
    tree, rank = parameter_tree(served.config, dtype=served.dtype), served.settings.adapters.compiled_rank
    return adapter_shapes(tree, served.config, dtype=served.dtype, rank=rank, num_slots=num_slots)


def draft_sizes(served: ServedModel) -> tuple[int, ...]:
    """Return the numbers of rows that draft programs are compiled for, ascending; empty without a draft model.

    The last number holds all rows.
    """
    if served.draft is None:
        return ()
    sizes = {shape.num_singles for shape in served.shapes if not shape.num_blocks}
    return (*sorted(size for size in sizes if size < served.num_rows), served.num_rows)


def probed_sizes(served: ServedModel) -> tuple[int, ...]:
    """Return the numbers of tokens of a data rank in steps that return hidden states to probe, ascending.

    These are the steps with prefill blocks, and all steps if clients may request hidden states.
    """
    shows_hidden = served.settings.replay.shows_hidden
    return tuple(sorted({shape.num_tokens for shape in served.shapes if shape.num_blocks or shows_hidden}))


def served_model(
    spec: ModelSpec,
    plan: ParallelPlan,
    *,
    settings: RunnerSettings,
    draft: DraftSpec | None = None,
    placement: ExpertPlacement | None = None,
) -> ServedModel:
    """Lay out a model on a mesh, with its draft model. Experts are in their own order, or as `placement` says.

    Raises: SettingsError or UnsupportedModelError if they do not fit together.
    """
    kernels = choose_kernels(spec, plan, model=settings.model, compiling=settings.compile, cache=settings.cache)
    plan = replace(plan, adds_in_order=kernels.adds_devices_in_order)
    config = model_config(spec, plan, experts=settings.experts, kernels=kernels, pool=settings.pool_format)
    longest = derive.max_model_len(settings.model, spec.max_position_embeddings)
    page_size = settings.cache.page_size
    config = replace(
        config,
        table_tokens=derive.pages_per_sequence(longest, page_size) * page_size,
        state_dtypes=_state_dtypes(config, settings.cache),
        adapts_experts=settings.adapters.experts,
        shares_outer=settings.adapters.shares_outer,
    )
    dtype = dtype_for(spec, plan, model=settings.model, kernels=kernels)
    verify_rows = derive.verify_rows(settings.scheduler, settings.speculation)
    shapes = step_shapes(settings.scheduler, step_cost(config, dtype=dtype), verify_rows=verify_rows)
    if num_adapters := settings.adapters.num_per_step:
        shapes = (*shapes, *(replace(shape, num_adapters=num_adapters) for shape in shapes))
    if draft is not None:
        num_singles = shapes[-1].num_singles
        shapes = (*shapes, *(replace(s, drafts_rest=True) for s in shapes if s.num_singles <= num_singles))
    of_draft = None if draft is None else draft_config(draft, config, pool=settings.pool_format)
    processors = load_processors(settings.structured.processors, digest=settings.processors_digest)
    placement = placement or first_placement(config)
    served = ServedModel(settings, config, dtype, placement, shapes, of_draft, processors)
    _check_entries(served)
    derive.expert_dtype(settings.experts, dtype=dtype)  # refuses what is not held
    return served


def _state_dtypes(config: ModelConfig, cache: CacheSettings) -> tuple[tuple[str, str], ...]:
    """Return `ModelConfig.state_dtypes`. Raises: SettingsError for keys of an index that cannot be stored so."""
    if cache.index_dtype == "auto":
        return ()
    layout = index_layout(config.spec)
    if layout is None or layout.block_size > 1:
        raise SettingsError(f"index_cache_dtype: {config.spec.family} has no sparse attention with an index of tokens")
    if config.kernels.attention.has_packed_rows:
        raise SettingsError(f"index_cache_dtype {cache.index_dtype}: the {config.kernels.name} kernels do not store it")
    return ((INDEX_KEYS, "float8_e4m3fn"),)


def _check_entries(served: ServedModel) -> None:
    """Raise SettingsError if page size or state interval do not align with the entries of recurrent layers."""
    cache = served.settings.cache
    for state in entry_states(served.config):
        tokens = state.kind.entry_tokens
        if tokens % cache.page_size and cache.page_size % tokens:
            raise SettingsError(
                f"page_size {cache.page_size}: the states of recurrent layers are kept every {tokens} tokens, take a "
                "divisor or a multiple of that"
            )
        if cache.state_interval % tokens:
            raise SettingsError(f"state_interval {cache.state_interval} must be a multiple of {tokens}")


def sampler_sizes(served: ServedModel) -> list[tuple[int, bool]]:
    """Return the single tokens of a step, and whether evidence is computed, per program that draws deferred samples.

    The list is empty if no samples are deferred.
    """
    sizes = sorted({shape.num_singles for shape in served.shapes})
    return [(size, finds) for size in sizes for finds in (False, True)] if served.settings.structured.enabled else []
