"""Ways to serve a model on a slice: topology, split, rows and redundant experts, with estimated memory and speed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np

from rayserve_moe.balancing.placement import MAX_REDUNDANT, identity_placement
from rayserve_moe.balancing.planner import plan
from rayserve_moe.config.settings import ExpertSettings, SettingsError
from rayserve_moe.config.topology import FLAT, GENERATIONS, SMALL_CUBES, generation_name, num_chips
from rayserve_moe.execution.memory import bytes_on_device
from rayserve_moe.execution.weights.migration import staging_shapes
from rayserve_moe.execution.weights.placing import first_placement, model_config, weight_shapes
from rayserve_moe.kernels.attention_config import PoolFormat
from rayserve_moe.model.layers.choice import divided_sizes
from rayserve_moe.model.model_config import ModelConfig
from rayserve_moe.model.spec import ModelSpec, UnsupportedModelError
from rayserve_moe.model.states import entry_states, token_states, windows_within
from rayserve_moe.parallel.mesh import plan_for
from rayserve_moe.tools.estimate.chips import chip_of
from rayserve_moe.tools.plan_slice.options import Assumptions, Traffic
from rayserve_moe.tools.plan_slice.step_cost import StepCost, StepTokens, step_cost
from rayserve_moe.tools.served_cases import TopologyError, devices_of

CUBES = ("4x4x4", "4x4x8", "4x8x8", "8x8x8")
"""Larger three-dimensional topologies that are considered."""
MEM_FRACTION = 0.8
"""Share of the free memory for pages, as the setting's default; the rest is for temporaries."""
WEIGHTS_DTYPE = "bfloat16"
SAMPLED_LAYERS, SEED = 8, 0


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
    prompt_tokens: int = 0
    """Prompt tokens of a data rank in a prefill step."""

    @property
    def per_chip(self) -> float:
        """Return output tokens per second and chip."""
        return self.tokens_per_s / self.chips

    def first_token_s(self, traffic: Traffic) -> float:
        """Return the seconds until the first token of a request whose prompt is computed at once."""
        prompt = min(traffic.prompt, self.prompt_tokens)
        return math.ceil(traffic.prompt / prompt) * self.prefill.seconds

    @property
    def token_s(self) -> float:
        """Return the seconds between tokens of a request while all are served, prompts of others included."""
        return self.served / self.tokens_per_s


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
        prompt,
    )


def eplb_headroom(spec: ModelSpec, one: Candidate, *, traffic: Traffic, given: Assumptions) -> float:
    """Return the share of tokens per second that experts of equal load would add to a split without replicas."""
    plain = replace(one.split, redundant=-spec.router.num_experts % (one.split.dp * one.split.tp))
    found = (candidate(spec, plain, traffic=traffic, given=replace(given, skew=skew)) for skew in (given.skew, 0.0))
    skewed, even = found
    return even.tokens_per_s / skewed.tokens_per_s - 1 if skewed is not None and even is not None else 0.0


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
