"""The tables of kernels: the operations of a step, and for each the candidates that may compute it.

A step is built from one table. `CPU` is the reference, `TPU` and `CPU_NATIVE` follow. An `Operation` has candidates in
order of preference. The first candidate without an `unsupported_reason` for the shapes of a call computes it, and the
server logs the choices at its start. Fields with a plain function have a single implementation. A new kernel is a
function with the signature of its reference and a candidate here (docs/add_a_kernel.md). How tokens reach experts on
other devices is chosen in the same way from `experts.backends.EXPERT_BACKENDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax

from rayserve_moe.kernels import kv_pool
from rayserve_moe.kernels.attention_heads import project_packed_rows, project_rows
from rayserve_moe.kernels.attention_layer import attend_layer
from rayserve_moe.kernels.candidates import NO_CANDIDATES, Candidate, Function, Operation, operation, supports_all
from rayserve_moe.kernels.cpu_native import calls, index_call
from rayserve_moe.kernels.cpu_native.layout import take_columns
from rayserve_moe.kernels.latent_attention import attend_by_choice, attend_chosen, attend_latent_layer
from rayserve_moe.kernels.reference import attention as attention_reference
from rayserve_moe.kernels.reference import device_sums as reference_sums
from rayserve_moe.kernels.reference import expert_products, gated_delta, layers, token_index
from rayserve_moe.kernels.reference.device_sums import DeviceSumKernels
from rayserve_moe.kernels.token_index import choose_layer_tokens
from rayserve_moe.kernels.tpu import (
    add_norm,
    delta_rule,
    device_rows,
    device_sums,
    dispatch_sizes,
    grouped_ffn,
    low_latency_dispatch,
    paged_attention,
    rotary_heads,
    streamed_heads,
    top_experts,
)
from rayserve_moe.kernels.tpu.dispatch_sizes import DispatchSizes
from rayserve_moe.kernels.tpu.packed_rows import LANES, packed_latents

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
    has_packed_rows: bool = False
    """True if the pool has the rows of `packed_rows`."""
    choose_tokens: Callable[..., tuple[jax.Array, jax.Array]] | None = None
    """`token_index.choose_layer_tokens` with its kernel bound, for sparse attention."""


@dataclass(frozen=True)
class ExpertKernels:
    """The router of a MoE layer and its experts."""

    router_scores: Kernel
    """`layers.router_scores`."""
    results: Operation
    """`expert_products.multiply_in_blocks`."""
    sums: Operation
    """`expert_products.sum_results` with its product bound."""
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


@dataclass(frozen=True)
class RecurrenceKernels:
    """Layers with a recurrent state."""

    short_conv: Kernel = gated_delta.short_conv
    """`gated_delta.short_conv`."""
    advance: Operation = ADVANCE
    """`gated_delta.advance`."""
    advance_layer: Callable[..., tuple[jax.Array, gated_delta.DeltaPools]] | None = None
    """The whole layer: projections, both functions above and the output product
    (`cpu_native.calls.advance_layer`). May be absent."""
    decay_places: int = 0
    """Places of a head in a ring of decays [R, H, places]; 0 for rings [R, C, H, 1] (`gated_delta.DeltaPools`)."""


@dataclass(frozen=True)
class PoolKernels:
    """The pool of keys and values."""

    copy_pages: Kernel = kv_pool.copy_pages
    """`kv_pool.copy_pages`."""
    dtypes: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Dtype of the pool by dtype of keys and values, if they differ (`kv_pool`)."""


@dataclass(frozen=True)
class ParameterLayout:
    """The memory layout and padding of parameters."""

    layouts: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Layout of a parameter's weights (`cpu_native.layout.LAYOUTS`); `head` is the table of the head."""
    multiples: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Divisor of a logical axis's size on a device; parameters are padded with zeros to it."""


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


def grouped_attention(*, project: Operation, **paged: Callable[..., Any]) -> AttentionKernels:
    """Return `attend_layer` with its paged kernels and its projection bound."""
    return AttentionKernels(partial(attend_layer, project=project, **paged), project=project)


CPU = Kernels(
    "cpu",
    norm=layers.rms_norm,
    rotation=layers.rotation_of,
    mlp=layers.gated_mlp,
    attention=grouped_attention(
        decode=attention_reference.attend,
        prefill=attention_reference.attend,
        project=operation("xla", project_rows),
    ),
    experts=ExpertKernels(layers.router_scores, *products(Candidate("xla", expert_products.multiply_in_blocks))),
    head=HeadKernels(layers.head_logits, tied_rows=layers.take_rows),
    sampling=SamplingKernels(layers.masses_of, noise=layers.gumbel_noise),
    pool=PoolKernels(dtypes=kv_pool.BITS),
)
PAGED = replace(
    grouped_attention(
        decode=paged_attention.attend,
        prefill=paged_attention.attend,
        write_and_decode=paged_attention.attend_new,
        project=Operation(
            (
                Candidate("rotary_heads", rotary_heads.project_rows_at_once, rotary_heads.unsupported_reason),
                Candidate("xla", project_packed_rows),
            ),
        ),
    ),
    describe_singles=paged_attention.describe_singles,
    norm_and_project=Operation(
        (Candidate("streamed_heads", streamed_heads.norm_and_project, streamed_heads.unsupported_reason),)
    ),
    has_packed_rows=True,
)
"""Grouped-query attention of TPUs. The kernel writes new rows, and reads the pages of a sequence once."""
PAGED_LATENTS = AttentionKernels(
    partial(
        attend_latent_layer,
        decode=paged_attention.attend,
        prefill=paged_attention.attend,
        write_and_decode=paged_attention.attend_new,
        rows_of=packed_latents,
    ),
    describe_singles=paged_attention.describe_singles,
    has_packed_rows=True,
)
"""Latent attention of TPUs."""
TPU = replace(
    CPU,
    name="tpu",
    attention=PAGED,
    experts=ExpertKernels(
        layers.router_scores,
        *products(
            Candidate("grouped_ffn", grouped_ffn.multiply_grouped, grouped_ffn.unsupported_reason),
            Candidate("ragged_dot", expert_products.multiply_by_ragged_dot),
        ),
        choose=Operation((Candidate("top_experts", top_experts.choose_experts, top_experts.unsupported_reason),)),
        low_latency=Candidate(
            "low_latency_dispatch", low_latency_dispatch.dispatch_experts, dispatch_sizes.unsupported_reason
        ),
        device_sums=Candidate(
            "device_sums",
            DeviceSumKernels(
                device_rows.place_rows, device_sums.sum_experts, device_rows.add_rows, device_sums.max_rows
            ),
            device_sums.unsupported_reason,
        ),
    ),
    recurrence=RecurrenceKernels(
        advance=ADVANCE.with_first(Candidate("delta_rule", delta_rule.advance_tokens, delta_rule.unsupported_reason)),
        decay_places=LANES,
    ),
    pool=PoolKernels(dtypes={"float8_e4m3fn": kv_pool.PAIRED}),
    # XLA lays out a table of other widths by columns if that is smaller, and copies it to look up rows.
    parameters=ParameterLayout(multiples={"table_row": LANES}),
    add_norm=Operation(
        (
            Candidate("add_norm", add_norm.add_and_norm, add_norm.unsupported_reason),
            Candidate("xla", layers.add_and_norm),
        )
    ),
)
CPU_NATIVE = Kernels(
    "cpu_native",
    norm=calls.rms_norm,
    rotation=calls.rotation_of,
    mlp=calls.gated_mlp,
    attention=AttentionKernels(calls.attend_layer),
    experts=ExpertKernels(
        calls.router_scores,
        results=operation("cpu_native", calls.expert_results),
        sums=operation("cpu_native", calls.expert_sums),
    ),
    head=HeadKernels(calls.head_logits, tied_rows=take_columns),
    sampling=SamplingKernels(calls.masses_of, noise=calls.gumbel_noise, choose=calls.choose),
    recurrence=RecurrenceKernels(advance_layer=calls.advance_layer),
    pool=PoolKernels(calls.copy_pages),
    parameters=ParameterLayout(calls.LAYOUT_OF, calls.MULTIPLES),
    add_norm=operation("cpu_native", calls.add_and_norm),
    dtype="bfloat16",
    compiler_options={"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": "1"},
)
"""C++ for bfloat16 on a CPU (`cpu_native`).

XLA has little left to fuse: without its emitters programs compile in a third of the time and run equally fast.
"""

AttentionCandidates = tuple[Candidate[AttentionKernels], ...]
"""Their reasons take the `PoolFormat` of a server."""
GROUPED_ATTENTION: dict[str, AttentionCandidates] = {
    "tpu": (Candidate("paged", PAGED, paged_attention.unsupported_reason),),
}
"""Candidates for grouped-query attention by name of a table; other tables have their own `attention` only."""
LATENT_ATTENTION: dict[str, AttentionCandidates] = {
    "cpu": (
        Candidate(
            "xla",
            AttentionKernels(
                partial(attend_latent_layer, decode=attention_reference.attend, prefill=attention_reference.attend)
            ),
        ),
    ),
    "cpu_native": (Candidate("cpu_native", AttentionKernels(calls.attend_latent_layer)),),
    "tpu": (Candidate("paged", PAGED_LATENTS, paged_attention.unsupported_latents),),
}
"""Candidates for latent attention by name of a table."""

SPARSE_ATTENTION: dict[str, AttentionCandidates] = {
    "cpu": (
        Candidate(
            "xla",
            AttentionKernels(
                partial(attend_latent_layer, decode=attention_reference.attend, prefill=attention_reference.attend),
                choose_tokens=partial(choose_layer_tokens, choose=token_index.choose_tokens),
            ),
        ),
    ),
    "cpu_native": (
        Candidate(
            "cpu_native",
            AttentionKernels(calls.attend_latent_layer, choose_tokens=index_call.choose_layer_tokens),
        ),
    ),
    "tpu": (
        Candidate(
            "paged to index_topk tokens, then xla",
            replace(
                PAGED_LATENTS,
                attend=partial(
                    attend_by_choice,
                    dense=PAGED_LATENTS.attend,
                    sparse=partial(
                        attend_latent_layer, decode=attend_chosen, prefill=attend_chosen, rows_of=packed_latents
                    ),
                ),
                choose_tokens=partial(choose_layer_tokens, choose=token_index.choose_tokens, rows_of=packed_latents),
            ),
            paged_attention.unsupported_latents,
        ),
    ),
}
"""Candidates for sparse latent attention by name of a table.

On a TPU it is dense, by the kernel, if `max_model_len` is at most the number of chosen tokens. For longer contexts no
kernel exists yet: XLA scores every key and masks dense attention, so a token costs as much as in dense attention.
"""

KERNELS: dict[str, Kernels] = {kernels.name: kernels for kernels in (CPU, TPU, CPU_NATIVE)}
"""By name; the table with the name of a platform is the platform's own."""
