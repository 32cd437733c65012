"""The operations of a step: what a table of kernels has, each with the signature and the meaning of its reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax

from rayserve_moe.kernels import kv_pool
from rayserve_moe.kernels.candidates import NO_CANDIDATES, Candidate, Function, Operation, operation, supports_all
from rayserve_moe.kernels.reference import device_sums as reference_sums
from rayserve_moe.kernels.reference import expert_products, gated_delta, layers, short_conv
from rayserve_moe.kernels.reference.device_sums import DeviceSumKernels
from rayserve_moe.kernels.row_blocks import ByRows, at_once
from rayserve_moe.kernels.tpu import low_latency_dispatch
from rayserve_moe.kernels.tpu.dispatch_sizes import DispatchSizes

Kernel = Callable[..., jax.Array]


def no_low_latency(_: DispatchSizes) -> str:
    """Return the reason of tables without low-latency dispatch."""
    return "TPUs only"


NO_LOW_LATENCY: Function = Candidate("low_latency_dispatch", low_latency_dispatch.dispatch_experts, no_low_latency)
DEVICE_SUMS: Candidate[DeviceSumKernels] = Candidate(
    "xla",
    DeviceSumKernels(
        reference_sums.place_rows,
        partial(reference_sums.sum_experts, multiply=expert_products.multiply_in_blocks),
        reference_sums.add_rows,
        reference_sums.max_rows,
    ),
)
"""An exchange with a row for each token and device, by XLA."""
ADD_NORM = operation("xla", layers.add_and_norm)
"""The sum of a stream and its norm by XLA."""
ADVANCE = operation("xla", gated_delta.advance)
"""The recurrence by XLA."""


@dataclass(frozen=True)
class AttentionKernels:
    """The attention of a layer, and the parts that depend on its pool and its queries."""

    attend: Callable[..., tuple[jax.Array, jax.Array]]
    """`attention_layer.attend_layer` with its paged kernels bound, and `project` if it is another function."""
    describe_singles: Callable[..., Mapping[int, Any]] | None = None
    """Derives from the positions of single tokens, once for all layers, the input of `attend`. May be absent."""
    norm_and_project: Operation = NO_CANDIDATES
    """Fused: `add_norm`, then queries, keys and values (`streamed_heads.norm_and_project`)."""
    project: Operation = NO_CANDIDATES
    """`attention_heads.project_rows`, bound in `attend`; empty if `attend` projects by itself."""
    project_and_write: Operation = NO_CANDIDATES
    """Fused: `project`, then `kv_pool.write_rows` (`gpu.fused_heads.project_and_write`); bound in `attend`."""
    products: Operation = NO_CANDIDATES
    """Products with a layer of stacked matrices (`gpu.stacked_products.multiply_stacked`); bound in `attend`."""
    absorb: Operation = NO_CANDIDATES
    """`latent_attention.absorb`, bound in `attend`."""
    expand: Operation = NO_CANDIDATES
    """`latent_attention.expand`, bound in `attend`."""
    has_packed_rows: bool = False
    """True if the pool has the rows of `packed_rows`."""
    choose_tokens: Callable[..., tuple[jax.Array, jax.Array]] | None = None
    """`token_index.choose_layer_tokens` with its kernel bound, for sparse attention."""
    choose_blocks: Callable[..., tuple[jax.Array, jax.Array]] | None = None
    """`block_index.choose_layer_blocks` with its kernel bound, for block-sparse attention."""


@dataclass(frozen=True)
class ExpertKernels:
    """The router of a MoE layer and its experts."""

    router_scores: Kernel
    """`layers.router_scores`."""
    results: Operation
    """`expert_products.multiply_in_blocks`."""
    sums: Operation
    """`expert_products.sum_results` with its product bound."""
    total: Kernel = layers.total_of
    """`layers.total_of`."""
    carries_ranks: bool = False
    """True if `results` and `sums` take tokens with ranks of adapters beside them (`adapters.carry_ranks`)."""
    choose: Operation = NO_CANDIDATES
    """Fused: `router_scores` and `experts.routing.select_top_k` (`top_experts.choose_experts`)."""
    low_latency: Function = NO_LOW_LATENCY
    """`sums` over the experts of all ranks (`low_latency_dispatch.dispatch_experts`); its reason takes the sizes."""
    device_sums: Candidate[DeviceSumKernels] = DEVICE_SUMS
    """The parts of an exchange of a row for each token and device; its reason takes tokens and weights."""


@dataclass(frozen=True)
class HeadKernels:
    """The head, and the lookup of its table."""

    logits: Kernel
    """`layers.head_logits`."""
    tied_rows: Kernel
    """`layers.take_rows` of a table that is also the head."""


@dataclass(frozen=True)
class SamplingKernels:
    """The choice of tokens by their logits."""

    masses: Callable[..., layers.WordMasses]
    """`layers.masses_of`."""
    noise: Kernel
    """`layers.gumbel_noise`."""
    choose: Callable[..., tuple[jax.Array, jax.Array, jax.Array]] | None = None
    """The limits of truncation, once computed, `noise` and the maximum at once (`cpu_native.calls.choose`). May be
    absent."""
    last_kept: Callable[..., tuple[jax.Array, jax.Array]] | None = None
    """Truncation on a device that holds the whole vocabulary (`cpu_native.sampling_call.last_kept`). May be absent."""
    kept_words: Callable[..., tuple[jax.Array, jax.Array]] | None = None
    """Sampling masks there (`cpu_native.sampling_call.kept_words`). May be absent."""


@dataclass(frozen=True)
class RecurrenceKernels:
    """Layers with a recurrent state."""

    short_conv: Kernel = short_conv.short_conv
    """`short_conv.short_conv`."""
    advance: Operation = ADVANCE
    """`gated_delta.advance`."""
    advance_layer: Callable[..., tuple[jax.Array, gated_delta.DeltaPools]] | None = None
    """The whole layer: projections, both functions above and the output product
    (`cpu_native.delta_call.advance_layer`). May be absent."""
    advance_mamba2_layer: Callable[..., tuple[jax.Array, gated_delta.DeltaPools]] | None = None
    """The whole Mamba-2 layer (`cpu_native.mamba2_call.advance_layer`). May be absent."""
    decay_places: int = 0
    """Places of a head in a ring of decays [R, H, places]; 0 for rings [R, C, H, 1] (`gated_delta.DeltaPools`)."""
    tile: tuple[int, int] | None = None
    """Rows and lanes of a tile. Pools of Mamba-2 layers pack values of several heads into rows of this width, and pad
    each device's inputs of the convolution to a multiple of this many rows, so that their shape depends on the number
    of tensor parallel devices. None: a row for a head, and for a group."""


@dataclass(frozen=True)
class PoolKernels:
    """The pool of keys and values."""

    copy_pages: Kernel = kv_pool.copy_pages
    """`kv_pool.copy_pages`."""
    put_pages: Kernel = kv_pool.put_pages
    """`kv_pool.put_pages`."""
    dtypes: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Dtype of the pool by dtype of keys and values, if they differ (`kv_pool`)."""
    unreachable_bytes: tuple[int, int] = (0, 0)
    """Size range (exclusive, inclusive) of 8-bit pools that the kernels cannot address to their end."""


@dataclass(frozen=True)
class ParameterLayout:
    """The memory layout and padding of parameters."""

    layouts: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Layout of a parameter's weights (`cpu_native.layout.LAYOUTS`); `head` is the table of the head."""
    multiples: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Divisor of a logical axis's size on a device; parameters are padded with zeros to it."""
    padded_beside: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Second axis by padded axis: without a second axis that is a multiple of the same divisor, nothing is padded."""


@dataclass(frozen=True, repr=False)
class Kernels:
    """The operations of a step, each with the signature and the meaning of its reference."""

    name: str
    """Names the table in settings, logs and programs on disk."""
    norm: Kernel
    """`layers.rms_norm`."""
    rotation: Callable[..., layers.Rotation]
    """`layers.rotation_of`."""
    mlp: Kernel
    """`layers.gated_mlp`."""
    attention: AttentionKernels
    """Replaced for a model by a candidate of `GROUPED_ATTENTION` or `LATENT_ATTENTION`."""
    experts: ExpertKernels
    """Router and experts of a layer."""
    head: HeadKernels
    """From the last hidden states to logits."""
    sampling: SamplingKernels
    """From logits to tokens."""
    recurrence: RecurrenceKernels = RecurrenceKernels()
    """Layers with a recurrent state."""
    pool: PoolKernels = PoolKernels()
    """Copies within the pool, and its dtypes."""
    parameters: ParameterLayout = ParameterLayout()
    """Layout of the parameters that the kernels read."""
    add_norm: Operation = ADD_NORM
    """`layers.add_and_norm`."""
    by_rows: ByRows = at_once
    """Applies functions that treat rows independently and are not operations of this table."""
    adds_devices_in_order: bool = False
    """True if the sums of devices are exchanged and added up in their order (`ParallelPlan.adds_in_order`)."""
    dtype: str = ""
    """The only dtype that the kernels compute in; empty: any."""
    compiler_options: Mapping[str, str | bool] = field(default_factory=dict, hash=False)
    """Options of XLA for programs of these kernels, unless XLA_FLAGS sets them."""

    def __repr__(self) -> str:
        """Return the name, which identifies programs on disk and so includes no address of a function."""
        return f"Kernels({self.name})"


def products(*candidates: Function) -> tuple[Operation, Operation]:
    """Return `results` and `sums` of `ExpertKernels` by candidates for the product of `results`."""
    sums = (
        replace(
            each,
            run=partial(expert_products.sum_results, multiply=each.run),
            unsupported_reason=each.unsupported_reason
            if each.unsupported_reason is supports_all
            else partial(_reason_against_sums, each.unsupported_reason),
        )
        for each in candidates
    )
    return Operation(candidates), Operation(tuple(sums))


def _reason_against_sums(
    reason: Callable[..., str],
    hidden_TD: jax.Array,
    slots_TK: jax.Array,
    gates_TK: jax.Array,
    experts: expert_products.LayerExperts,
    **named: Any,
) -> str:
    """Return why the product of a sum does not take its call; gates do not matter to it."""
    return reason(hidden_TD, slots_TK, experts, **named)
