"""Ways to serve a model on a slice: topology, split, rows and redundant experts, with estimated memory and speed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import jax.numpy as jnp
import numpy as np

from rayserve_moe.balancing.placement import MAX_REDUNDANT, identity_placement
from rayserve_moe.balancing.planner import plan
from rayserve_moe.config.settings import ExpertSettings, SettingsError
from rayserve_moe.config.topology import FLAT, GENERATIONS, SMALL_CUBES, generation_name, num_chips
from rayserve_moe.execution.kernel_report import device_shapes, expert_shapes, shaped
from rayserve_moe.execution.memory import bytes_on_device
from rayserve_moe.execution.weights.migration import staging_shapes
from rayserve_moe.execution.weights.placing import first_placement, model_config, parameter_tree, weight_shapes
from rayserve_moe.experts.backends import LOW_LATENCY, choose_backend
from rayserve_moe.experts.tokens import chunk_tokens
from rayserve_moe.kernels.attention_config import PoolFormat
from rayserve_moe.kernels.tpu.dispatch_sizes import unsupported_reason, usable_bytes
from rayserve_moe.model.layers.choice import divided_sizes
from rayserve_moe.model.model_config import ModelConfig
from rayserve_moe.model.spec import ModelSpec, UnsupportedModelError
from rayserve_moe.model.states import entry_states, token_states, windows_within
from rayserve_moe.parallel.mesh import plan_for
from rayserve_moe.tools.estimate.chips import OVERHEAD_S, Chip, chip_of
from rayserve_moe.tools.estimate.links import Slice
from rayserve_moe.tools.estimate.workload import StepSizes, step_work
from rayserve_moe.tools.plan_slice.options import Assumptions, Traffic
from rayserve_moe.tools.served_cases import TopologyError, devices_of

CUBES = ("4x4x4", "4x4x8", "4x8x8", "8x8x8")
"""Larger three-dimensional topologies that are considered."""
MEM_FRACTION = 0.8
"""Share of the free memory for pages, as the setting's default; the rest is for temporaries."""
WEIGHTS_DTYPE = "bfloat16"
SAMPLED_LAYERS, SEED = 8, 0
LAYER_OPS, SHARED_LAYER_OPS, PUSH_OPS, GATHER_OPS, SEND_OPS, CHUNK_OPS, REST_OPS = 4, 23, 4, 26, 44, 74, 96
"""Numbers of ops, in order:

of a layer without its exchange; the same if cores share a device and the exchange is not a kernel; of an exchange by a
kernel; of a gathering exchange; of an exchange that sends rows at once; of each chunk of a chunked exchange; of the
rest of a step.
"""
PUSH_PASSES, DECODE_PASSES, PREFILL_PASSES = 8, 16, 11
"""Reads or writes of expert rows by a step's ops: in a kernel, in a single chunk of few rows, and in chunks of many."""


@dataclass(frozen=True)
class Split:
    """A slice with its parallelism."""

    topology: str
    dp: int
    """Data ranks."""
    tp: int
    """Tensor size."""
    redundant: int = 0
    """Redundant experts."""
    rows: int = 0
    """Rows of a data rank; 0: as the traffic requires."""


@dataclass(frozen=True)
class Candidate:
    """A split with its estimates. GB are 1e9 bytes of a device."""

    split: Split
    chips: int
    capacity_gb: float
    weights_gb: float
    kv_gb: float
    """For all `split.rows` at full length."""
    served: int
    """Concurrent requests."""
    imbalance: float
    """The most loaded device's expert rows over the mean, under the assumed skew."""
    decode: StepCost
    prefill: StepCost
    tokens_per_s: float
    """Output tokens, including the time for prompts."""

    @property
    def per_chip(self) -> float:
        """Return output tokens per second and chip."""
        return self.tokens_per_s / self.chips


def topologies(generation: str, *, max_chips: int) -> Iterator[str]:
    """Yield a generation's topologies that the TPU compiler knows, smallest first. Raises ValueError if unknown."""
    known = generation_name(generation)
    flat = GENERATIONS[known].num_dims == 2
    for shape in sorted(FLAT if flat else (*SMALL_CUBES, *CUBES), key=num_chips):
        topology = f"{'tpu7x' if known == 'v7x' else known}:{shape}"
        if num_chips(shape) <= max_chips and _is_known(topology):
            yield topology


def splits(spec: ModelSpec, topology: str) -> Iterator[Split]:
    """Yield all divisions of a slice into data and tensor ranks, without redundancy and with a slot more per device."""
    num_devices = len(devices_of(topology))
    min_redundant = -spec.router.num_experts % num_devices
    for tp in (size for size in range(1, num_devices + 1) if num_devices % size == 0):
        if not any(size % tp for size in divided_sizes(spec, tp).values()):
            for redundant in (min_redundant, min_redundant + num_devices):
                if redundant <= MAX_REDUNDANT:
                    yield Split(topology, num_devices // tp, tp, redundant)


def candidate(spec: ModelSpec, split: Split, *, traffic: Traffic, given: Assumptions) -> Candidate | None:
    """Estimate a split; None if weights and the KV of a row do not fit, or the model does not divide.

    Raises ValueError if the traffic's sequences exceed the model's positions, or the chip has no figures.
    """
    if traffic.length > spec.max_position_embeddings:
        raise ValueError(f"{traffic.length} tokens are more than the model's {spec.max_position_embeddings} positions")
    chip, devices = chip_of(split.topology), devices_of(split.topology)
    try:
        plan_of_slice = plan_for(devices, data_size=split.dp)
        experts = ExpertSettings(num_redundant=split.redundant, weight_dtype=given.expert_dtype)
        pool = PoolFormat(is_8_bit=given.kv_dtype != "bfloat16")
        model = model_config(spec, plan_of_slice, experts=experts, pool=pool)
    except (SettingsError, UnsupportedModelError):
        return None
    weights = _weight_bytes(model, moves=split.redundant > 0)
    row = row_bytes(model, traffic.length, kv_dtype=given.kv_dtype)
    wanted = math.ceil(traffic.concurrency / split.dp)
    wanted = min(wanted, split.rows) if split.rows else wanted
    rows = min(wanted, int((chip.device_capacity - weights) * MEM_FRACTION // row))
    if rows < 1:
        return None
    imbalance = imbalance_of(spec.router.num_experts, len(devices), redundant=split.redundant, skew=given.skew)
    cost = partial(step_cost, model, topology=split.topology, kv_dtype=given.kv_dtype, imbalance=imbalance)
    context = traffic.prompt + traffic.output // 2
    prompt = min(given.prefill_tokens, rows * traffic.prompt)
    decode = cost(StepTokens(rows, context))
    prefill = cost(StepTokens(rows, context, prompt))
    served = min(rows * split.dp, traffic.concurrency)
    return Candidate(
        replace(split, rows=rows),
        len({tuple(device.coords) for device in devices}),
        chip.device_capacity / 1e9,
        weights / 1e9,
        rows * row / 1e9,
        served,
        imbalance,
        decode,
        prefill,
        served * traffic.output / _seconds(rows, prompt, traffic, decode=decode.seconds, prefill=prefill.seconds),
    )


def row_bytes(model: ModelConfig, length: int, *, kv_dtype: str) -> int:
    """Return the bytes on a device that a sequence of `length` tokens keeps.

    Layers with a window keep only that, and recurrent layers two entries and a ring.
    """
    of_tokens = sum(
        state.row_bytes(model.plan, dtype=kv_dtype)
        * sum(window or length for window in windows_within(state.windows, max_tokens=length))
        for state in token_states(model)
    )
    return of_tokens + sum(
        state.num_layers
        * (2 * state.row_bytes(model.plan, dtype=kv_dtype) + state.ring_bytes(model.plan, dtype=kv_dtype))
        for state in entry_states(model)
    )


@lru_cache(maxsize=1024)
def imbalance_of(num_experts: int, num_devices: int, *, redundant: int, skew: float) -> float:
    """Return the most loaded device's expert rows over the mean, averaged over layers of seeded lognormal popularity.

    Without redundancy experts are in their own order, otherwise as the planner places them.
    """
    load = np.exp(np.random.default_rng(SEED).normal(0, skew, (SAMPLED_LAYERS, num_experts)))
    if redundant > -num_experts % num_devices:
        placed = plan(load, ep_size=num_devices, num_redundant=redundant)
    else:
        placed = identity_placement(SAMPLED_LAYERS, num_experts, ep_size=num_devices, num_redundant=redundant)
    of_slots = placed.share_of_slot * np.take_along_axis(load, placed.expert_of_slot, axis=1)
    of_devices = of_slots.reshape(SAMPLED_LAYERS, num_devices, -1).sum(axis=2)
    return float((of_devices.max(axis=1) / of_devices.mean(axis=1)).mean())


def _seconds(rows: int, prompt: int, traffic: Traffic, *, decode: float, prefill: float) -> float:
    """Return the time in which all rows of a data rank process a request from its first to its last token."""
    num_prefill = math.ceil(rows * traffic.prompt / prompt)
    num_decode = max(0, traffic.output - num_prefill)
    return num_prefill * prefill + num_decode * decode


def _weight_bytes(model: ModelConfig, *, moves: bool) -> int:
    weights = weight_shapes(model, dtype=WEIGHTS_DTYPE, placement=first_placement(model), may_change=moves)
    staging = bytes_on_device(staging_shapes(model, dtype=WEIGHTS_DTYPE)) if moves else 0
    return bytes_on_device(weights) + staging


def _is_known(topology: str) -> bool:
    try:
        return bool(devices_of(topology))
    except TopologyError:
        return False


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step on a device by cause."""

    flops_s: float
    hbm_s: float
    link_s: float
    ops_s: float
    backend: str
    """Expert back end."""

    @property
    def seconds(self) -> float:
        """Return the total; ops, and links outside a kernel, are assumed not to overlap with the rest."""
        if self.backend == LOW_LATENCY:
            return max(self.flops_s, self.hbm_s, self.link_s) + self.ops_s
        return max(self.flops_s, self.hbm_s) + self.link_s + self.ops_s


@dataclass(frozen=True)
class StepTokens:
    """A data rank's tokens in a step."""

    sequences: int
    """Decoding sequences."""
    context: int
    """Tokens of each sequence."""
    prompt: int = 0
    """Prompt tokens."""


def step_cost(
    model: ModelConfig, tokens: StepTokens, *, topology: str, kv_dtype: str = "bfloat16", imbalance: float = 1.0
) -> StepCost:
    """Return the cost of a step with bfloat16 weights without compiling it; experts have the model's dtype.

        max(operations / peak, HBM bytes / bandwidth) + link bytes over the narrowest cut + ops x overhead

    The most loaded rank has `imbalance` times the mean of expert rows. Passes and numbers of ops come from steps that
    libtpu compiled (`benchmarks/results/step_estimate.json`); nothing was measured.
    """
    chip, spec, plan = chip_of(topology), model.spec, model.plan
    sizes = StepSizes(topology, tokens.sequences, tokens.context, kv_dtype=kv_dtype)
    work = step_work(model, sizes, prompt_tokens=tokens.prompt)
    row_bytes = spec.hidden_size * jnp.dtype(sizes.dtype).itemsize
    per_device = math.ceil((tokens.sequences + tokens.prompt) / plan.tensor_size)
    backend = _backend_for(model, tokens.sequences + tokens.prompt, chip=chip)
    exchanges, num_layers = backend in (LOW_LATENCY, "all_to_all", "fused"), len(spec.moe_layer_ids)
    chunk = chunk_tokens(per_device, top_k=spec.router.top_k, row_bytes=row_bytes, overlapped=backend == "fused")
    num_chunks = math.ceil(per_device / chunk) if exchanges and backend != LOW_LATENCY else 1
    expert_bytes = _expert_elements(model, sizes.dtype) * 2 * work.used_slots / model.experts.num_local_slots
    passes = PREFILL_PASSES if num_chunks > 1 else PUSH_PASSES if backend == LOW_LATENCY else DECODE_PASSES
    moved = work.expert_rows * imbalance * row_bytes * passes * num_layers
    hbm_bytes = work.hbm_bytes - _unseen_bytes(model, tokens, kv_dtype) + (num_chunks - 1) * expert_bytes + moved
    expert_flops = 2 * work.expert_rows / model.experts.num_local_slots * _expert_elements(model, sizes.dtype)
    layer_ops = LAYER_OPS if chip.cores_per_device == 1 or backend == LOW_LATENCY else SHARED_LAYER_OPS
    num_ops = spec.num_layers * (layer_ops + _exchange_ops(backend, num_chunks)) + REST_OPS
    return StepCost(
        (work.flops + (imbalance - 1) * expert_flops) / chip.device_flops,
        hbm_bytes / chip.device_hbm_bytes,
        link_seconds(model, tokens, topology=topology, exchanges=exchanges, imbalance=imbalance),
        num_ops * OVERHEAD_S,
        backend,
    )


def _backend_for(model: ModelConfig, tokens: int, *, chip: Chip) -> str:
    """Return the name of the expert backend for `tokens` of a data rank (`experts.backends.choose_backend`)."""
    reason = partial(unsupported_reason, core_bytes=usable_bytes(chip.core_vmem))
    low_latency = replace(model.kernels.experts.low_latency, unsupported_reason=reason)
    kernels = replace(model.kernels, experts=replace(model.kernels.experts, low_latency=low_latency))
    hidden_TD = shaped(tokens, model.spec.hidden_size, dtype="bfloat16")
    shapes = expert_shapes(hidden_TD, device_shapes(model, dtype="bfloat16")["experts"], config=model)
    return choose_backend(*shapes, config=replace(model.experts, kernels=kernels)).name


def _exchange_ops(backend: str, num_chunks: int) -> int:
    """Return the number of ops of a layer's exchange, experts included."""
    if num_chunks > 1:
        return CHUNK_OPS * num_chunks
    return {LOW_LATENCY: PUSH_OPS, "all_to_all": SEND_OPS, "fused": SEND_OPS}.get(backend, GATHER_OPS)


def link_seconds(
    model: ModelConfig, tokens: StepTokens, *, topology: str, exchanges: bool, imbalance: float = 1.0
) -> float:
    """Return the seconds of a step's collectives over the narrowest cut of the slice."""
    spec, plan = model.spec, model.plan
    devices, tensor = plan.mesh.devices, plan.tensor_size
    place = Slice(chip_of(topology), tuple(tuple(device.coords) for device in devices.flat))
    numbers = np.arange(devices.size).reshape(devices.shape)
    over_data, over_tensor = numbers.T.tolist(), numbers.tolist()
    everywhere = [numbers.reshape(-1).tolist()]
    rows = tokens.sequences + tokens.prompt
    row_bytes = spec.hidden_size * 2
    if exchanges:
        sent = math.ceil(rows / tensor) * spec.router.top_k * row_bytes
        layer = 2 * imbalance * place.seconds("ragged-all-to-all", sent, groups=everywhere)
        layer += place.seconds("all-gather", math.ceil(rows / tensor) * row_bytes, groups=over_tensor)
    else:
        layer = place.seconds("all-gather", rows * row_bytes, groups=over_data)
        layer += place.seconds("reduce-scatter", rows * plan.data_size * 2 * row_bytes, groups=over_data)
        layer += place.seconds("all-reduce", rows * row_bytes, groups=over_tensor)
    attention = place.seconds("all-reduce", rows * row_bytes, groups=over_tensor)
    return len(spec.moe_layer_ids) * layer + spec.num_layers * attention


def _expert_elements(model: ModelConfig, dtype: str) -> int:
    """Return the number of elements of expert weights on a device, all layers."""
    shapes = (
        model.plan.sharding(param.axes).shard_shape(param.shape)
        for specs in parameter_tree(model, dtype=dtype).values()
        for param in specs.values()
        if param.num_experts
    )
    return sum(map(math.prod, shapes))


def _unseen_bytes(model: ModelConfig, tokens: StepTokens, kv_dtype: str) -> float:
    """Return the bytes of `step_work` that layers with a window do not read."""
    return tokens.sequences * sum(
        state.row_bytes(model.plan, dtype=kv_dtype)
        * sum(tokens.context - window for window in windows_within(state.windows, max_tokens=tokens.context) if window)
        for state in token_states(model)
    )
