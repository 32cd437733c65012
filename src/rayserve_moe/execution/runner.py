"""Host runner: loads a host's share of the model, compiles its steps and runs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.balancing.migration import MigrationPiece
from rayserve_moe.balancing.placement import ExpertPlacement
from rayserve_moe.checkpoints.files import open_checkpoint
from rayserve_moe.checkpoints.open_shares import AnyShare, WeightShare
from rayserve_moe.config.given_files import Reach
from rayserve_moe.decoding.masks import mask_words
from rayserve_moe.execution import memory
from rayserve_moe.execution.drafts.model import draft_of, open_draft, spec_of
from rayserve_moe.execution.drafts.rows import DraftRows, drafting_of, with_drafts
from rayserve_moe.execution.kernel_report import kernel_report
from rayserve_moe.execution.memory_plan import check_memory
from rayserve_moe.execution.page_store import PageStore
from rayserve_moe.execution.programs.buckets import filling_plan
from rayserve_moe.execution.programs.cache import kept_programs
from rayserve_moe.execution.programs.compiled import (
    CompilationCount,
    CompiledPrograms,
    CompiledUpdate,
    LaterShapes,
    Launch,
    Launched,
    compile_served,
    first_shapes,
    launch_for,
)
from rayserve_moe.execution.served_model import RunnerSettings, ServedModel, captures_of, draft_sizes, served_model
from rayserve_moe.execution.step.device_state import BlockInputSource, allocate, no_choices
from rayserve_moe.execution.step.pack import PackedStep, Packer
from rayserve_moe.execution.step.page_copies import no_copies
from rayserve_moe.execution.step.probe import ProbeRun, probe_runs
from rayserve_moe.execution.step.pytrees import DeviceState, ModelWeights, StepOutput
from rayserve_moe.execution.step.results import only_wanted, start_copies, step_result, wanted_outputs
from rayserve_moe.execution.step.row_updates import no_adjustment, updates_of
from rayserve_moe.execution.step.samples import HeldInputs, HeldSamples, held_of, held_plans
from rayserve_moe.execution.tpu_invariance import check_invariance
from rayserve_moe.execution.weights.adapters import HostAdapters
from rayserve_moe.execution.weights.migration import MigrationRunner, MigrationVectors, idle_vectors, vectors_of
from rayserve_moe.execution.weights.placing import load_weights, open_model, with_capacity
from rayserve_moe.execution.weights.share import read_share, read_spread
from rayserve_moe.execution.weights.staged import StagedWeights
from rayserve_moe.execution.weights.tensor_staging import TensorStaging
from rayserve_moe.model.family_table import rules_of, spec_from_config
from rayserve_moe.model.layers.index_rows import index_layout
from rayserve_moe.model.model_config import ModelConfig
from rayserve_moe.parallel.mesh import platform_of
from rayserve_moe.parallel.sharding import ParallelPlan
from rayserve_moe.scheduling.step_plan import PageMoves, StartReport, StepPlan, StepResult


class HostRunner:
    """Runner of step plans on the devices of a mesh; in a multi-host group every host runs the same plans.

    Call `load`, then `prepare`, then `execute` from a single thread. `staged` reads other weights, from any other
    thread. Experts are loaded in their own order, or as `placement` says.
    """

    def __init__(
        self, settings: RunnerSettings, plan: ParallelPlan, *, placement: ExpertPlacement | None = None
    ) -> None:
        self._files = open_model(settings.model)
        spec = spec_from_config(self._files.config)
        self._draft = open_draft(settings.speculation, spec, files=self._files, model=settings.model)
        """Files of the draft model, or None."""
        self.served = served_model(spec, plan, settings=settings, draft=spec_of(self._draft), placement=placement)
        check_invariance(self.served)
        self.weights = ModelWeights({}, None)
        """Current weights; empty until `load`."""
        self.staged = _staging_for(self.served)
        """Weights that replace the current weights next."""
        self.tensors = TensorStaging(self.staged, self.served, files=self._files, weights=lambda: self.weights)
        """Writes sent weights into `staged`."""
        self._mover = _mover_for(self.served)
        """Moves experts between slots; None on a server whose experts never move."""
        self.adapters = _adapters_for(self.served, rules_of(self._files.config, self._files.tensors))
        """Adapters beside the weights; None on a server without."""
        self._packer = _packer_for(self.served)
        replay, no_index = self.served.settings.replay, cache(partial(no_choices, self.config))
        source = partial(BlockInputSource, captures=captures_of(replay), no_choices=no_index)
        self._block_inputs = {s: source(s, self.config) for s in self.served.shapes if s.num_blocks}
        self._state: DeviceState | None = None
        self._programs: CompiledPrograms | None = None
        self.later: LaterShapes | None = None
        """Compiles the shapes that `compile` leaves out, beside the steps."""
        self._compilations = CompilationCount()
        self._launches = _Launches.of(plan)
        self.pages: PageStore | None = None
        """Evicted pages in host memory; None without `host_cache_mib`."""
        self._report = self.tensors.unstarted()

    @property
    def config(self) -> ModelConfig:
        """Return the model's layout on its mesh."""
        return self.served.config

    @property
    def placement(self) -> ExpertPlacement:
        """Return the placement of the experts at the start."""
        return self.served.placement

    def load(self, source: str = "", *, share: WeightShare | None = None, spread: Sequence[AnyShare] = ()) -> int:
        """Load the weights; return the number of KV pages of a data rank that fit beside them on this host's devices.

        They come from a `share`, or from `spread`, the shares of a group of another size, or from the checkpoint
        `source` in place of the model's own.

        Raises: SettingsError before anything is read if memory cannot hold it.
        """
        check_memory(self.served, list(self.config.plan.mesh.local_devices))
        started = time.perf_counter()
        kept = read_share(share, self.served) if share else read_spread(spread, self.served) if spread else None
        loaded = kept or self._read(source)
        self.weights = with_capacity(loaded, self.served.settings.experts.capacity_factor, config=self.config)
        self.weights = replace(self.weights, draft=draft_of(self._draft, self.served.draft, dtype=self.served.dtype))
        if self.adapters is not None:
            self.adapters.allocate(self.weights.maps)
        self._report = replace(self._report, load_s=time.perf_counter() - started)
        return self.served.num_pages_within(memory.free_bytes(list(self.config.plan.mesh.local_devices)))

    def _read(self, source: str) -> ModelWeights:
        files = open_checkpoint(source, Reach(self.served.settings.updates.weight_roots)) if source else self._files
        served = self.served
        return load_weights(
            files, served.config, dtype=served.dtype, placement=served.placement, may_change=served.moves_experts
        )

    def prepare(self, num_pages: int) -> StartReport:
        """Allocate the pool, compile every step shape, and run each once."""
        self.compile(num_pages)
        return self.warm_up()

    def compile(self, num_pages: int) -> None:
        """Allocate the pool and compile all programs that are not found on disk. Waits for no other host."""
        self._state = allocate(self.served.state(num_pages))
        kept = kept_programs(self.served.settings.compile, self.config.plan)
        shapes = first_shapes(self.served)
        self._programs = compile_served(self.served, num_pages=num_pages, kept=kept, shapes=shapes)
        self._packer.use(shapes)
        self.later = LaterShapes(self._programs, self.served, num_pages=num_pages, kept=kept, count=self._compilations)
        times = self._programs.times
        if self.served.settings.cache.host_mib:
            self.pages = PageStore(self.served, num_pages)
            self._report = replace(self._report, host=self.pages.sizes)
        self._report = replace(
            self._report,
            num_pages=num_pages,
            page_groups=self.served.pool.groups(num_pages),
            entry_groups=self.served.pool.entry_groups(num_pages),
            compile_s=times.wall_s,
            compile_sum_s=times.sum_s,
            num_programs=times.num_programs,
            num_programs_found=times.num_found,
            kernels=kernel_report(self.served),
        )

    def warm_up(self) -> StartReport:
        """Run every shape once as a real step of padding, at the same time as all other hosts."""
        started = time.perf_counter()
        self._run_each_once()
        self._compilations.reset()
        assert self.later is not None, "no programs are compiled yet"
        self.later.begin(self._packer.use)
        return replace(self._report, first_run_s=time.perf_counter() - started)

    @property
    def programs(self) -> CompiledPrograms:
        """Return the compiled programs; only after `compile`."""
        assert self._programs is not None, "no programs are compiled yet"
        return self._programs

    @property
    def state(self) -> DeviceState:
        """Return the state on the devices; only after `compile`."""
        assert self._state is not None, "no state is allocated yet"
        return self._state

    @property
    def num_compilations_since_start(self) -> int:
        """Return the number of programs compiled in this process after `prepare`; must be zero."""
        return self._compilations.total

    def expert_counts(self) -> np.ndarray:
        """Return tokens per MoE layer and expert since the start, without padding, int [M, E]. Call while idle."""
        counts = np.asarray(self.state.expert_counts_ME)
        return counts.reshape(self.config.plan.data_size, -1, counts.shape[1]).sum(axis=0)

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Launch the plan's step, if any; then wait for the previous step, if any, and return its result."""
        launches = self._launches
        assert plan.num_chunks or plan.migration is None, "a piece of a migration goes with a step"
        if num_drafts := plan.chunks.max_drafts:
            max_drafts = self.served.settings.speculation.max_drafts
            assert num_drafts <= max_drafts, "steps are compiled for fewer drafts"
        if plan.takes_staged_weights:
            assert launches.step is None, "weights change while no step is in flight"
            self.weights = self.staged.take(self.weights)
            if self.adapters is not None:
                self.adapters.replace_weights(self.weights.maps, programs=self.programs.adapters)
            memory.FREED_MEMORY.request()
            return None
        if launches.held is not None:
            held, launches.held = launches.held, None
            inputs = held.inputs(plan.masks, num_words=mask_words(self.config.spec.vocab_size))
            held.drawn = launches.launch(partial(self._draw, held, inputs))
        moved = None if self.pages is None else launches.launch(partial(self._move_pages, plan.moves, plan.step_id))
        before, launches.step = launches.step, self._launch_step(plan) if plan.num_chunks else None
        result = before() if before is not None else None
        if moved is not None:
            moved()  # raises its error
        return result

    def move_experts(self, piece: MigrationPiece) -> None:
        """Run a piece of a migration without a step. Call while idle."""
        self._move(vectors_of(piece))

    def _launch_step(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Launch a step and return a call that waits for its result. The plan is not kept: a channel reuses it."""
        started, packer = time.perf_counter(), self._packer
        fits = packer.fits(plan)
        packed = packer.pack(plan, with_changes=fits)
        updates = [] if fits else list(updates_of(plan, self.programs.changes, rows_per_rank=packer.rows_per_rank))
        moves = None if plan.migration is None else vectors_of(plan.migration)
        wanted = wanted_outputs(plan)
        held = held_of(packed, plan, processors=self.served.processors) if plan.holds_samples else None
        drafting = drafting_of(plan, self.served) if plan.wants_drafts else None
        probes = list(probe_runs(plan.probe, packed)) if plan.probe is not None else []
        later = _Later(held, drafting, probes)
        loads = () if plan.adapters is None else plan.adapters.loads
        run = partial(self._run, packed, updates, wanted=wanted, moves=moves, loads=loads, later=later)
        pack_s = time.perf_counter() - started
        self._launches.held = held
        return partial(self._collect, self._launches.launch(run), packed=packed, pack_s=pack_s, later=later)

    def _draw(self, held: HeldSamples, inputs: HeldInputs) -> StepOutput:
        self._state, output = held.draw(self.programs.samplers, self.state, inputs=inputs)
        return start_copies(output, is_needed=self._launches.copies_to_host)

    def _run(
        self,
        packed: PackedStep,
        updates: list[tuple[CompiledUpdate, np.ndarray]],
        *,
        wanted: frozenset[str],
        moves: MigrationVectors | None,
        loads: tuple[tuple[int, str], ...],
        later: _Later,
    ) -> StepOutput:
        state, shape = self.state, packed.shape
        if moves is not None:
            self._move(moves)
        if self.adapters is not None:
            self.adapters.put(loads, programs=self.programs.adapters)
        for update, vector in updates:
            state = update(state, vector)
        blocks = self._block_inputs[shape].inputs(packed.blocks) if shape.num_blocks else None
        step = self.programs.steps[shape]
        if shape.num_adapters and self.adapters is not None:
            step = partial(step, adapters=self.adapters.stacks)
        self._state, output = step(self.weights, state, vectors_NW=packed.vectors, blocks=blocks)
        for vector in packed.copies:
            self._state = self.programs.copy(self._state, vector)
        if later.held is not None:
            later.held.logits = output.logits_AV
        if "expert_counts_ME" in wanted:
            output = replace(output, expert_counts_ME=self.programs.read_counts(self._state.expert_counts_ME))
        hidden_TD, output = output.hidden_TD, only_wanted(output, wanted)
        if later.probes:
            output = replace(output, probed=self._probe(hidden_TD, later.probes, shape.num_tokens))
        if later.drafting is not None:
            output = replace(output, drafts_NSK=self._draft_ahead(later.drafting.rows_NS))
        return start_copies(output, is_needed=self._launches.copies_to_host)

    def _probe(
        self, hidden_TD: jax.Array | None, probes: list[ProbeRun], num_tokens: int
    ) -> tuple[dict[str, jax.Array], ...]:
        assert hidden_TD is not None, "probed tokens are in prefill blocks, or the server shows hidden states"
        gather, probe = self.programs.gathers[num_tokens], self.programs.probe
        return tuple(run.found(self.weights, hidden_TD, gather=gather, probe=probe) for run in probes)

    def _draft_ahead(self, rows_NS: np.ndarray) -> jax.Array:
        program = self.programs.drafts[rows_NS.shape[1]]
        self._state, drafts_NSK = program(self.weights, self.state, rows_NS=rows_NS)
        return drafts_NSK

    def _move_pages(self, moves: PageMoves | None, step_id: int) -> None:
        programs = self.programs.pages
        assert self.pages is not None and programs is not None, "no pages are kept in host memory"
        self._state = self.pages.move(self.state, moves, programs=programs, step_id=step_id)

    def _move(self, vectors: MigrationVectors) -> None:
        programs = self.programs.migration
        assert self._mover is not None and programs is not None, "experts do not move on this server"
        maps, self.weights = self.weights.maps, self._mover.move(self.weights, vectors, programs=programs)
        if self.adapters is not None and vectors.swap is not None and self.weights.maps is not maps:
            self.adapters.follow(vectors.swap, programs=self.programs.adapters)

    def _collect(self, launched: Launched, *, packed: PackedStep, pack_s: float, later: _Later) -> StepResult:
        started = time.perf_counter()
        output = launched() if later.held is None else later.held.complete(launched())
        output.sampled_N3S.block_until_ready()
        device_s = time.perf_counter() - started
        failed_fetch = None if self._mover is None else self._mover.failed_fetch
        result = step_result(output, packed=packed, pack_s=pack_s, device_s=device_s, failed_fetch=failed_fetch)
        if self.pages is not None:
            result = self.pages.timed(result)
        return result if later.drafting is None else with_drafts(result, output, drafting=later.drafting)

    def _run_each_once(self) -> None:
        """Run a real step of every shape on page 0, which belongs to no sequence, then reset the expert counts."""
        self._state = self.programs.copy(self.programs.adjust(self.state, no_adjustment()), no_copies())
        if self._mover is not None:
            self._move(MigrationVectors(*idle_vectors(self.config, slots_per_step=self._mover.slots_per_step)))
        if self.adapters is not None:
            self.adapters.put_nothing(programs=self.programs.adapters)
        self.programs.read_counts(self.state.expert_counts_ME)
        if self.pages is not None:
            for moves in (self.pages.nothing(), None):
                self._move_pages(moves, -1)
        num_rows, shows_hidden = self.served.num_rows, self.served.settings.replay.shows_hidden
        for shape in self._packer.shapes:
            is_probed = shape.num_blocks > 0 or shows_hidden
            plan = filling_plan(shape, max_model_len=self.served.longest, num_rows=num_rows, is_probed=is_probed)
            plan = replace(plan, wants_drafts=self.served.draft is not None and not shape.drafts_rest)
            for each in (plan, *(held_plans(plan) if self.served.settings.structured.enabled else ())):
                self.execute(each)
        self.execute(StepPlan(step_id=-1))
        for size in draft_sizes(self.served):
            self._draft_ahead(np.full((self.config.plan.data_size, size), num_rows, np.int32))
        self._state = replace(self.state, expert_counts_ME=jnp.zeros_like(self.state.expert_counts_ME))
        jax.block_until_ready(self._state)


@dataclass
class _Launches:
    """Launch function of steps, and the last launched step."""

    launch: Launch
    copies_to_host: bool
    """True if results are copied to the host; on CPUs they are in host memory."""
    step: Callable[[], StepResult] | None = None
    """Waits for the result of the step launched last; None if it is collected."""
    held: HeldSamples | None = None
    """Deferred samples of the step launched last."""

    @classmethod
    def of(cls, plan: ParallelPlan) -> _Launches:
        return cls(launch_for(list(plan.mesh.local_devices)), platform_of(plan.mesh) != "cpu")


class _Later(NamedTuple):
    """Work after a step: deferred samples, drafts, and probes of its tokens."""

    held: HeldSamples | None
    drafting: DraftRows | None
    probes: list[ProbeRun]


def _mover_for(served: ServedModel) -> MigrationRunner | None:
    if not served.moves_experts:
        return None
    slots_per_step = served.settings.balancing.slots_per_step
    return MigrationRunner(served.config, dtype=served.dtype, slots_per_step=slots_per_step)


def _adapters_for(served: ServedModel, rules: Mapping[str, str]) -> HostAdapters | None:
    return HostAdapters(served, rules=rules) if served.settings.adapters.num_slots else None


def _packer_for(served: ServedModel) -> Packer:
    return Packer(
        served.shapes,
        rows_per_rank=served.num_rows,
        num_data_ranks=served.config.plan.data_size,
        num_tables=served.num_tables,
        tells_nexts=served.draft is not None,
        index=index_layout(served.config.spec) if served.settings.replay.shows_index else None,
    )


def _staging_for(served: ServedModel) -> StagedWeights:
    return StagedWeights(
        served.config,
        dtype=served.dtype,
        first_placement=served.placement,
        roots=served.settings.updates.weight_roots,
        draft=served.draft,
    )
