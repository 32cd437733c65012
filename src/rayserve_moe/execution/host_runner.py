"""One host's share of the model: loads it, compiles the steps, runs them."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.checkpoints.files import open_checkpoint
from rayserve_moe.checkpoints.loader import load_parameters
from rayserve_moe.config import derive
from rayserve_moe.config.settings import CacheSettings, ModelSettings, ReplaySettings, SchedulerSettings, SettingsError
from rayserve_moe.execution import memory
from rayserve_moe.execution.buckets import step_shapes
from rayserve_moe.execution.compiled_steps import CompilationCount, compile_steps
from rayserve_moe.execution.pack import PackedStep, pack
from rayserve_moe.execution.routing_transfer import RoutingTransfer
from rayserve_moe.execution.row_state import RowState
from rayserve_moe.execution.step import KV_AXES
from rayserve_moe.execution.step_types import DeviceState, StepOutput, StepShape
from rayserve_moe.kernels.registry import KERNELS_OF_PLATFORM
from rayserve_moe.model.family_table import family_of, spec_from_config
from rayserve_moe.model.parameters import kv_repeats, parameter_specs
from rayserve_moe.model.spec import ModelSpec
from rayserve_moe.model.transformer import ModelRule, Parameters
from rayserve_moe.parallel.sharding import ParallelPlan
from rayserve_moe.scheduling.step_plan import StepPlan, StepResult, StepTimes


@dataclass(frozen=True)
class RunnerSettings:
    """The sections a host runner works from."""

    model: ModelSettings
    scheduler: SchedulerSettings
    cache: CacheSettings
    replay: ReplaySettings


class HostRunner:
    """Runs step plans on the devices of a mesh; in a multi-host group every host runs the same plans.

    `load`, then `prepare`, then `execute` from one thread.
    """

    def __init__(self, settings: RunnerSettings, plan: ParallelPlan) -> None:
        files = open_checkpoint(settings.model.path)
        spec = spec_from_config(files.config)
        check_divisible(spec, plan)
        platform = plan.mesh.devices.flat[0].platform
        self._settings, self._files = settings, files
        self.rule = ModelRule(spec, plan, KERNELS_OF_PLATFORM[platform])
        self.dtype = derive.compute_dtype(
            settings.model.dtype, platform=platform, checkpoint_dtype=spec.checkpoint_dtype
        )
        self._longest = derive.max_model_len(settings.model, spec.max_position_embeddings)
        self._shapes = step_shapes(settings.scheduler)
        self._compilations = CompilationCount()
        self._transfer = RoutingTransfer()

    def load(self) -> int:
        """Load the weights; return how many KV pages fit beside them on this host's devices."""
        spec, plan = self.rule.spec, self.rule.plan
        tree = parameter_specs(spec, dtype=self.dtype, tensor_size=plan.tensor_size)
        rules = family_of(self._files.config).CHECKPOINT_RULES
        params = load_parameters(self._files, tree, rules=rules, sharding_of=lambda p: plan.sharding(p.axes))
        self.params = cast(Parameters, params)
        cache, devices = self._settings.cache, list(plan.mesh.local_devices)
        return memory.num_pages_that_fit(
            cache,
            bytes_per_page=memory.page_bytes(spec, page_size=cache.page_size, dtype=self.dtype, plan=plan),
            free=memory.free_bytes(devices),
            most_useful=derive.most_useful_pages(self._settings.scheduler, cache, longest=self._longest),
        )

    def prepare(self, num_pages: int) -> None:
        """Allocate the pool, compile every step shape, and run each once as a real step of padding."""
        cache, scheduler = self._settings.cache, self._settings.scheduler
        pages_per_row = derive.pages_per_sequence(self._longest, cache.page_size)
        self._rows = RowState(
            num_rows=scheduler.max_running_requests, pages_per_row=pages_per_row, page_size=cache.page_size
        )
        self._state = self._allocate(num_pages)
        self._steps = compile_steps(
            self.params,
            self._state,
            shapes=self._shapes,
            rule=self.rule,
            capture_routing=self._settings.replay.enabled,
            pages_per_row=pages_per_row,
        )
        self._warm_up()
        self._compilations_of_start = self._compilations.total

    @property
    def num_compilations_since_start(self) -> int:
        """Programs compiled in this process after `prepare`; anything but zero is a fault."""
        return self._compilations.total - self._compilations_of_start

    def expert_counts(self) -> np.ndarray:
        """Tokens per MoE layer and expert since the start, int [M, E]; padding is not counted."""
        return np.asarray(self._state.expert_counts_ME)

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step; a plan without chunks only hands over routing that is still under way."""
        started = time.perf_counter()
        earlier_routing = self._transfer.collect()
        if plan.num_chunks == 0:
            none = np.zeros(0)
            return StepResult(plan.step_id, none.astype(np.int32), none, none.astype(bool), earlier_routing)
        self._rows.apply(plan)
        packed = pack(plan, self._rows, shapes=self._shapes)
        submitted = time.perf_counter()
        self._state, output = self._steps[packed.shape](self.params, self._state, packed.step_input)
        if plan.wants_routing and output.topk_ids_MTK is not None:
            self._transfer.start(plan.step_id, output.topk_ids_MTK, token_places=packed.token_places)
        ids, logprobs, finite = _sampled(packed, output)
        times = StepTimes(submitted - started, time.perf_counter() - submitted)
        return StepResult(plan.step_id, ids, logprobs, finite, earlier_routing, times)

    def _allocate(self, num_pages: int) -> DeviceState:
        spec, plan = self.rule.spec, self.rule.plan
        kv_heads = spec.attention.num_kv_heads * kv_repeats(spec, plan.tensor_size)
        kv_shape = (spec.num_layers * num_pages, self._rows.page_size, 2 * kv_heads, spec.attention.head_dim)
        counts_shape = (len(spec.moe_layer_ids), spec.router.num_experts)
        return DeviceState(
            jnp.zeros(kv_shape, self.dtype, device=plan.sharding(KV_AXES)),
            jnp.zeros(counts_shape, jnp.int32, device=plan.replicated()),
        )

    def _warm_up(self) -> None:
        """Run a real step of every shape on page 0, which belongs to nobody, then forget what it counted."""
        for shape in self._shapes:
            self.execute(self._filling_plan(shape))
        self._transfer.collect()
        self._state = replace(self._state, expert_counts_ME=jnp.zeros_like(self._state.expert_counts_ME))

    def _filling_plan(self, shape: StepShape) -> StepPlan:
        """A plan that needs exactly this shape: a chunk for every prefill block, else single tokens."""
        blocks = [min(shape.block_tokens, self._longest)] * shape.num_blocks
        lengths = np.asarray(blocks or [1] * shape.num_singles, np.int32)
        num_tokens, num_rows = int(lengths.sum()), len(self._rows.page_table)
        return StepPlan(
            step_id=-1,
            chunk_rows=np.arange(len(lengths), dtype=np.int32) % num_rows,
            chunk_starts=np.zeros(len(lengths), np.int32),
            chunk_lengths=lengths,
            token_ids=np.zeros(num_tokens, np.int32),
            chunk_samples=np.arange(len(lengths)) == 0,
            wants_routing=True,
        )


def _sampled(packed: PackedStep, output: StepOutput) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Wait for the samples and bring them into the order of the plan's chunks; -1 where a chunk has none."""
    ids, logprobs, finite = jax.device_get((output.token_ids_S, output.logprobs_S, output.finite_S))
    places = packed.sample_places
    return np.where(places >= 0, ids[places], -1), logprobs[places], finite[places] | (places < 0)


def check_divisible(spec: ModelSpec, plan: ParallelPlan) -> None:
    """Refuse a model that cannot be spread evenly over the mesh, naming what does not divide."""
    tensor, kv_heads = plan.tensor_size, spec.attention.num_kv_heads
    sizes = {
        "num_attention_heads": (spec.attention.num_heads, tensor),
        "num_key_value_heads": (kv_heads * kv_repeats(spec, tensor), tensor),
        "num_experts": (spec.router.num_experts, plan.num_expert_ranks),
        "vocab_size": (spec.vocab_size, tensor),
        "intermediate_size": (spec.dense_intermediate_size if spec.dense_layer_ids else tensor, tensor),
    }
    for name, (size, parts) in sizes.items():
        if size % parts:
            raise SettingsError(f"{name} {size} does not divide over {parts} devices; choose a divisor of {size}")
