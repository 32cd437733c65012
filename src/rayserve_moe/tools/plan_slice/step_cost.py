"""Cost of a step without compiling it: operations, HBM, links, ops and waits, at peak and calibrated."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import jax.numpy as jnp
import numpy as np

from rayserve_moe.execution.kernel_report import device_shapes, expert_shapes, shaped
from rayserve_moe.execution.weights.placing import parameter_tree
from rayserve_moe.experts.backends import DEVICE_SUMS, LOW_LATENCY, choose_backend
from rayserve_moe.experts.tokens import chunk_tokens
from rayserve_moe.kernels.tpu import device_sums
from rayserve_moe.kernels.tpu.dispatch_sizes import unsupported_reason, usable_bytes
from rayserve_moe.kernels.tpu.paged_sizes import NUM_BUFFERS
from rayserve_moe.model.layers.attention import GroupedAttention
from rayserve_moe.model.model_config import ModelConfig
from rayserve_moe.model.spec import NO_PART, MixerSpec, ModelSpec
from rayserve_moe.tools.estimate.chips import OVERHEAD_S, Chip, chip_of
from rayserve_moe.tools.estimate.links import Slice
from rayserve_moe.tools.estimate.rates import STEP_SPREAD, calibrated
from rayserve_moe.tools.estimate.step_work import StepWork
from rayserve_moe.tools.estimate.workload import StepSizes, devices_of_token, step_work

LAYER_OPS, SHARED_LAYER_OPS, TENSOR_OPS = 4, 23, 5
"""Ops of a layer without its exchange; the same if cores share a device and the exchange is not a kernel; more of a
layer whose heads devices share."""
RECURRENT_OPS, LATENT_OPS, PLAIN_OPS, SHARED_EXPERT_OPS, CHOICE_OPS = 60, 40, 24, 4, 9
"""More ops of a recurrent layer, of latent keys, of projections without a kernel, of a shared expert, and of a choice
of experts without a kernel."""
PUSH_OPS, GATHER_OPS, SEND_OPS, CHUNK_OPS, SUMS_OPS, REST_OPS = 4, 26, 44, 74, 31, 96
"""Ops of an exchange by a kernel, of one that gathers, of one that sends rows at once, of a chunk of a chunked
exchange, of a chunk with sums of devices, and of the rest of a step."""
CHOICE_LANES, HEAD_WIDTH = 128, 128
"""Experts and elements of a head in whole registers: what the kernels of choices and of projections take."""
EXCHANGE_COLLECTIVES = 3
"""Collectives of XLA in a chunk of an exchange: of counts or choices, of rows, and of results."""
PUSH_PASSES, DECODE_PASSES, PREFILL_PASSES, SUMS_PASSES = 8, 16, 31, 8
"""Reads or writes of expert rows by a step's ops: in a kernel, in a single chunk of few rows, in chunks of many, and in
chunks whose experts are added up on their device; the last without those that the exchange of other chunks hides."""


MIXER_ENDS_S, DISPATCH_ENDS_S = 9e-6, 4.5e-6
"""Seconds of a layer before kernels' first copies and after their last ones: of a mixer with norms and routing, and of
an exchange by a kernel. From the compiled steps too."""
REST_COLLECTIVES = 4
"""Collectives of a step outside its layers: sampling and the head."""


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step on a device by cause, at the peaks of the specification; `seconds` is calibrated."""

    flops_s: float
    hbm_s: float
    link_s: float
    ops_s: float
    backend: str
    """Expert back end."""
    waits_s: float = 0.0
    """Waits for copies and for starts of collectives."""
    hbm_share: float = 1.0
    matrix_share: float = 1.0
    """With `hbm_share` the shares of the peaks that published device times support."""

    @property
    def seconds(self) -> float:
        """Return the total; ops, and links outside a kernel, are assumed not to overlap with the rest."""
        return self._total(self.flops_s / self.matrix_share, self.hbm_s / self.hbm_share) + self.waits_s

    @property
    def peak_seconds(self) -> float:
        """Return the total at the peaks of the specification."""
        return self._total(self.flops_s, self.hbm_s)

    @property
    def min_seconds(self) -> float:
        """Return the lower end of the range that published device times leave."""
        return self.seconds * STEP_SPREAD.min_ratio

    @property
    def max_seconds(self) -> float:
        """Return the upper end of the range that published device times leave."""
        return self.seconds * STEP_SPREAD.max_ratio

    def _total(self, flops_s: float, hbm_s: float) -> float:
        if self.backend == LOW_LATENCY:
            return max(flops_s, hbm_s, self.link_s) + self.ops_s
        return max(flops_s, hbm_s) + self.link_s + self.ops_s


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

        max(operations / peak, HBM bytes / bandwidth) + link bytes + ops x overhead + waits

    The most loaded rank has `imbalance` times the mean of expert rows. Passes, numbers of ops and ends come from steps
    that libtpu compiled (`benchmarks/results/step_estimate.json`); nothing was measured.
    """
    chip, spec, plan = chip_of(topology), model.spec, model.plan
    sizes = StepSizes(topology, tokens.sequences, tokens.context, kv_dtype=kv_dtype)
    work = step_work(model, sizes, prompt_tokens=tokens.prompt)
    row_bytes = spec.exchanged_width * jnp.dtype(sizes.dtype).itemsize
    per_device = math.ceil((tokens.sequences + tokens.prompt) / plan.tensor_size)
    backend = _backend_for(model, tokens.sequences + tokens.prompt, chip=chip)
    exchanges, num_layers = backend in (LOW_LATENCY, DEVICE_SUMS, "all_to_all", "fused"), len(spec.moe_layer_ids)
    if backend == DEVICE_SUMS:
        chunk = _tokens_of_sums(model)
    else:
        chunk = chunk_tokens(per_device, top_k=spec.router.top_k, row_bytes=row_bytes, overlapped=backend == "fused")
    num_chunks = math.ceil(per_device / chunk) if exchanges and backend != LOW_LATENCY else 1
    expert_bytes = _expert_elements(model, sizes.dtype) * 2 * work.used_slots / model.experts.num_local_slots
    passes = PREFILL_PASSES if num_chunks > 1 else PUSH_PASSES if backend == LOW_LATENCY else DECODE_PASSES
    passes = SUMS_PASSES if backend == DEVICE_SUMS else passes
    moved = work.expert_rows * imbalance * row_bytes * passes * num_layers
    hbm_bytes = work.hbm_bytes + (num_chunks - 1) * expert_bytes + moved
    expert_flops = 2 * work.expert_rows / model.experts.num_local_slots * _expert_elements(model, sizes.dtype)
    layer_ops = LAYER_OPS if chip.cores_per_device == 1 or backend == LOW_LATENCY else SHARED_LAYER_OPS
    waits = _waits_s(model, work, tokens, backend=backend, num_chunks=num_chunks, chip=chip)
    layer_ops += TENSOR_OPS if plan.tensor_size > 1 else 0
    num_ops = spec.num_layers * (layer_ops + _exchange_ops(backend, num_chunks)) + _extra_ops(spec) + REST_OPS
    return StepCost(
        (work.flops + (imbalance - 1) * expert_flops) / chip.device_flops,
        hbm_bytes / chip.device_hbm_bytes,
        link_seconds(
            model,
            tokens,
            topology=topology,
            rows_sent=_rows_sent(model, backend=backend) if exchanges else None,
            imbalance=imbalance,
        ),
        num_ops * OVERHEAD_S,
        backend,
        waits_s=waits,
        hbm_share=chip.hbm_share,
        matrix_share=calibrated(chip).matrix_share,
    )


def _waits_s(
    model: ModelConfig, work: StepWork, tokens: StepTokens, *, backend: str, num_chunks: int, chip: Chip
) -> float:
    """Return a step's waits: for expert slots, sequences, the exposed part of attention, and collectives.

    Attention has copies into all its buffers but one in flight; these share the wait of a sequence.
    """
    spec, rates = model.spec, calibrated(chip)
    slots_s = work.used_slots * rates.wait_s + (DISPATCH_ENDS_S if backend == LOW_LATENCY else 0.0)
    of_singles = (attention for attention in work.attention.values() if not attention.is_of_prompts)
    kv_bytes = sum(attention.kv_bytes * attention.num_layers for attention in of_singles)
    kv_s = kv_bytes / chip.device_hbm_bytes / rates.hbm_share
    mixer_s = MIXER_ENDS_S + 2 * tokens.sequences * rates.wait_s / (NUM_BUFFERS - 1)
    starts = REST_COLLECTIVES + spec.num_layers * _collectives(model, backend=backend, num_chunks=num_chunks)
    starts_s = starts * (rates.collective_s - OVERHEAD_S)
    return len(spec.moe_layer_ids) * slots_s + spec.num_layers * mixer_s + rates.exposed_share * kv_s + starts_s


def _collectives(model: ModelConfig, *, backend: str, num_chunks: int) -> int:
    """Return the collectives of XLA in a layer among more than two devices."""
    plan = model.plan
    of_tensor = 2 if plan.tensor_size > 2 else 0
    if backend == LOW_LATENCY or plan.num_expert_ranks <= 2:
        return of_tensor
    return of_tensor + EXCHANGE_COLLECTIVES * num_chunks


def _backend_for(model: ModelConfig, tokens: int, *, chip: Chip) -> str:
    """Return the name of the expert backend for `tokens` of a data rank (`experts.backends.choose_backend`)."""
    experts = model.kernels.experts
    reason = partial(unsupported_reason, core_bytes=usable_bytes(chip.core_vmem))
    low_latency = replace(experts.low_latency, unsupported_reason=reason)
    reason = partial(device_sums.unsupported_reason, num_cores=chip.cores_per_device, core_bytes=chip.core_vmem)
    sums = replace(experts.device_sums, unsupported_reason=reason)
    kernels = replace(model.kernels, experts=replace(experts, low_latency=low_latency, device_sums=sums))
    hidden_TD = shaped(tokens, model.spec.exchanged_width, dtype="bfloat16")
    shapes = expert_shapes(hidden_TD, device_shapes(model, dtype="bfloat16")["experts"], config=model)
    return choose_backend(*shapes, config=replace(model.experts, kernels=kernels)).name


def _extra_ops(spec: ModelSpec) -> int:
    """Return the number of a model's ops that no kernel takes in, beyond `LAYER_OPS`."""
    of_mixers = sum(_mixer_ops(spec.mixer(layer.mixer)) for layer in spec.layers if layer.mixer != NO_PART)
    of_experts = SHARED_EXPERT_OPS if spec.experts.shared != "none" else 0
    of_experts += CHOICE_OPS if spec.router.num_experts % CHOICE_LANES or spec.router.num_groups > 1 else 0
    return of_mixers + len(spec.moe_layer_ids) * of_experts


def _mixer_ops(mixer: MixerSpec) -> int:
    shape = mixer.score_shape()
    if shape is None:
        return RECURRENT_OPS
    if shape.values_are_keys:
        return LATENT_OPS
    is_streamed = (
        isinstance(mixer, GroupedAttention)
        and mixer.head_dim == HEAD_WIDTH
        and mixer.qk_norm == "head"
        and not mixer.bias
        and mixer.output_gate == "none"
    )
    return 0 if is_streamed else PLAIN_OPS


def _tokens_of_sums(model: ModelConfig) -> int:
    """Return the tokens of a chunk of `device_sums`: as many as may all have an expert on one device."""
    max_rows = model.kernels.experts.device_sums.run.max_rows
    *_, width, inner = device_shapes(model, dtype="bfloat16")["experts"]["up_MPDF"].shape
    return max_rows(width, inner, model.spec.router.top_k) // model.plan.num_expert_ranks


def _exchange_ops(backend: str, num_chunks: int) -> int:
    """Return the number of ops of a layer's exchange, experts included."""
    if backend == DEVICE_SUMS:
        return SUMS_OPS * num_chunks
    if num_chunks > 1:
        return CHUNK_OPS * num_chunks
    return {LOW_LATENCY: PUSH_OPS, "all_to_all": SEND_OPS, "fused": SEND_OPS}.get(backend, GATHER_OPS)


def _rows_sent(model: ModelConfig, *, backend: str) -> float:
    """Return the rows that a token sends out, and gets back: one for each expert, or for each device with one."""
    top_k = model.spec.router.top_k
    if backend != DEVICE_SUMS:
        return top_k
    return devices_of_token(model.experts.num_slots, model.plan.num_expert_ranks, top_k=top_k)


def link_seconds(
    model: ModelConfig, tokens: StepTokens, *, topology: str, rows_sent: float | None, imbalance: float = 1.0
) -> float:
    """Return the seconds of a step's collectives over the narrowest cut of the slice.

    A token sends `rows_sent` rows to experts; None: every device gathers all tokens.
    """
    spec, plan = model.spec, model.plan
    devices, tensor = plan.mesh.devices, plan.tensor_size
    place = Slice(chip_of(topology), tuple(tuple(device.coords) for device in devices.flat))
    numbers = np.arange(devices.size).reshape(devices.shape)
    over_data, over_tensor = numbers.T.tolist(), numbers.tolist()
    everywhere = [numbers.reshape(-1).tolist()]
    rows = tokens.sequences + tokens.prompt
    row_bytes, hidden_bytes = spec.exchanged_width * 2, spec.hidden_size * 2
    if rows_sent is not None:
        sent = round(math.ceil(rows / tensor) * rows_sent * row_bytes)
        layer = 2 * imbalance * place.seconds("ragged-all-to-all", sent, groups=everywhere)
        layer += place.seconds("all-gather", math.ceil(rows / tensor) * row_bytes, groups=over_tensor)
    else:
        layer = place.seconds("all-gather", rows * row_bytes, groups=over_data)
        layer += place.seconds("reduce-scatter", rows * plan.data_size * 2 * row_bytes, groups=over_data)
        layer += place.seconds("all-reduce", rows * row_bytes, groups=over_tensor)
    attention = place.seconds("all-reduce", rows * hidden_bytes, groups=over_tensor)
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
