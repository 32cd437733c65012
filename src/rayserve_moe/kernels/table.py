"""The tables of kernels: each is one record of functions, and a step is built from one of them.

A step that is being built takes its kernels from the table alone, so a new kernel is a function with the signature of
its reference and one entry here (docs/add_a_kernel.md). The entries of `cpu` are the reference for all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax

from rayserve_moe.kernels import kv_pool
from rayserve_moe.kernels.attention_layer import attend_layer
from rayserve_moe.kernels.cpu_native import calls
from rayserve_moe.kernels.cpu_native.layout import take_columns
from rayserve_moe.kernels.latent_attention import attend_latent_layer
from rayserve_moe.kernels.reference import attention as attention_reference
from rayserve_moe.kernels.reference import expert_products, layers
from rayserve_moe.kernels.tpu import attention_ragged, paged_attention
from rayserve_moe.kernels.tpu.add_norm import add_and_norm
from rayserve_moe.kernels.tpu.flat_rows import LANES, flat_latents
from rayserve_moe.kernels.tpu.grouped_ffn import multiply_grouped
from rayserve_moe.kernels.tpu.pushed_experts import push_experts
from rayserve_moe.kernels.tpu.pushed_sizes import PushSizes, lacks
from rayserve_moe.kernels.tpu.rotary_heads import project_rows_at_once
from rayserve_moe.kernels.tpu.streamed_heads import norm_and_project
from rayserve_moe.kernels.tpu.top_experts import choose_experts

Kernel = Callable[..., jax.Array]


def no_push(sizes: PushSizes) -> str:
    """Return the reason for kernels that push no rows."""
    return f"there is no such kernel for rows of {sizes.width}"


@dataclass(frozen=True)
class AttentionKernels:
    """The attention of a layer, and what belongs to its pool and its queries."""

    attend: Callable[..., tuple[jax.Array, jax.Array]]
    """`attention_layer.attend_layer` with its paged kernels bound, and its projection where that is another."""
    describe_singles: Callable[..., Mapping[int, Any]] | None = None
    """What `attend` derives of the positions of single tokens, once for all layers; may be absent."""
    norm_and_project: Callable[..., tuple[jax.Array, jax.Array, jax.Array] | None] | None = None
    """`add_norm` ahead of attention with queries, keys and values (`streamed_heads`); may be absent, or give None."""
    has_flat_rows: bool = False
    """The pool's rows are those of `flat_rows`."""


@dataclass(frozen=True)
class ExpertKernels:
    """The router of a MoE layer and its experts."""

    router_scores: Kernel
    """`layers.router_scores`."""
    results: Kernel
    """`expert_products.multiply_in_blocks`."""
    sums: Kernel
    """`expert_products.sum_results` with its product bound."""
    choose: Callable[..., tuple[jax.Array, jax.Array] | None] | None = None
    """A router and its choice at once (`top_experts.choose_experts`); may be absent, or give None."""
    pushed_sums: Kernel = push_experts
    """`sums` over all ranks (`pushed_experts.push_experts`), for sizes that `push_lacks` accepts."""
    push_lacks: Callable[[PushSizes], str] = no_push
    """Why `pushed_sums` is not for some sizes (`pushed_sizes.lacks`); empty if it is."""


@dataclass(frozen=True)
class HeadKernels:
    """The head, and the lookup of its table."""

    logits: Kernel
    """`layers.head_logits`."""
    tied_rows: Kernel
    """`layers.take_rows` of a table that is also the head."""


@dataclass(frozen=True)
class SamplingKernels:
    """The choice of words by their logits."""

    masses: Callable[..., layers.WordMasses]
    """`layers.masses_of`."""
    noise: Kernel
    """`layers.gumbel_noise`."""
    choose: Callable[..., tuple[jax.Array, jax.Array, jax.Array]] | None = None
    """The best of the log-probabilities that truncation keeps with `noise`, which skips words that cannot be the best;
    may be absent."""


@dataclass(frozen=True)
class PoolKernels:
    """The pool of keys and values."""

    copy_pages: Kernel = kv_pool.copy_pages
    """`kv_pool.copy_pages`."""
    dtypes: Mapping[str, str] = field(default_factory=dict, hash=False)
    """The dtype that holds keys and values of another (`kv_pool`)."""


@dataclass(frozen=True)
class ParameterLayout:
    """The memory layout and padding of parameters."""

    layouts: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Layout of a parameter's weights (`cpu_native.layout.LAYOUTS`); `head` is the table of the head."""
    multiples: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Divisor of a logical axis's size on a device; parameters are padded with zeros to it."""


@dataclass(frozen=True, repr=False)
class Kernels:
    """The functions of a step, each with the signature and the meaning of its reference.

    Where one that may be absent is absent or gives None, its parts are computed one after the other.
    """

    name: str
    """Names the table in settings, logs and programs on disk."""
    norm: Kernel
    """`layers.rms_norm`."""
    rotation: Callable[..., layers.Rotation]
    """`layers.rotation_of`."""
    mlp: Kernel
    """`layers.gated_mlp`."""
    attention: AttentionKernels
    """Replaced for a model with another kind of attention (`LATENT_ATTENTION`, `FLAT_ATTENTION`)."""
    experts: ExpertKernels
    """Router and experts of a layer."""
    head: HeadKernels
    """From the last hidden states to logits."""
    sampling: SamplingKernels
    """From logits to words."""
    pool: PoolKernels = PoolKernels()
    """Copies within the pool, and its dtypes."""
    parameters: ParameterLayout = ParameterLayout()
    """Layout of the parameters that the kernels read."""
    add_norm: Callable[..., tuple[jax.Array, jax.Array] | None] | None = None
    """A residual stream and its norm at once (`add_norm.add_and_norm`); may be absent, or give None."""
    dtype: str = ""
    """The only dtype that the kernels compute in; empty: any."""
    compiler_options: Mapping[str, str | bool] = field(default_factory=dict, hash=False)
    """Options of XLA for programs of these kernels, unless XLA_FLAGS sets them."""

    def __repr__(self) -> str:
        """Return the name: programs on disk are found by it, so it holds no address of a function."""
        return f"Kernels({self.name})"


CPU = Kernels(
    "cpu",
    norm=layers.rms_norm,
    rotation=layers.rotation_of,
    mlp=layers.gated_mlp,
    attention=AttentionKernels(
        partial(attend_layer, decode=attention_reference.attend, prefill=attention_reference.attend)
    ),
    experts=ExpertKernels(
        router_scores=layers.router_scores,
        results=expert_products.multiply_in_blocks,
        sums=partial(expert_products.sum_results, multiply=expert_products.multiply_in_blocks),
    ),
    head=HeadKernels(layers.head_logits, tied_rows=layers.take_rows),
    sampling=SamplingKernels(layers.masses_of, noise=layers.gumbel_noise),
    pool=PoolKernels(dtypes=kv_pool.BITS),
)
TPU = replace(
    CPU,
    name="tpu",
    attention=AttentionKernels(
        partial(
            attend_layer,
            decode=attention_ragged.attend_decode,
            prefill=attention_ragged.attend_prefill,
            project=project_rows_at_once,
        ),
        describe_singles=attention_ragged.describe_singles,
    ),
    experts=ExpertKernels(
        router_scores=layers.router_scores,
        results=multiply_grouped,
        sums=partial(expert_products.sum_results, multiply=multiply_grouped),
        choose=choose_experts,
        push_lacks=lacks,
    ),
    pool=PoolKernels(),
    # XLA lays a table of other rows out by columns where that is smaller, and copies it to look rows up.
    parameters=ParameterLayout(multiples={"table_row": LANES}),
    add_norm=add_and_norm,
)
CPU_NATIVE = Kernels(
    "cpu_native",
    norm=calls.rms_norm,
    rotation=calls.rotation_of,
    mlp=calls.gated_mlp,
    attention=AttentionKernels(calls.attend_layer),
    experts=ExpertKernels(calls.router_scores, results=calls.expert_results, sums=calls.expert_sums),
    head=HeadKernels(calls.head_logits, tied_rows=take_columns),
    sampling=SamplingKernels(calls.masses_of, noise=calls.gumbel_noise, choose=calls.choose),
    pool=PoolKernels(calls.copy_pages),
    parameters=ParameterLayout(calls.LAYOUT_OF, calls.MULTIPLES),
    add_norm=calls.add_and_norm,
    dtype="bfloat16",
    compiler_options={"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": "1"},
)
"""C++ for bfloat16 on a CPU (`cpu_native`). XLA has little left to fuse: without its emitters programs compile in a
third of the time, and run as fast."""

LATENT_ATTENTION: dict[str, AttentionKernels] = {
    "cpu": AttentionKernels(
        partial(attend_latent_layer, decode=attention_reference.attend, prefill=attention_reference.attend)
    ),
    "cpu_native": AttentionKernels(calls.attend_latent_layer),
    "tpu": AttentionKernels(
        partial(
            attend_latent_layer,
            decode=paged_attention.attend,
            prefill=paged_attention.attend,
            write_and_decode=paged_attention.attend_new,
            rows_of=flat_latents,
        ),
        describe_singles=paged_attention.describe_singles,
        has_flat_rows=True,
    ),
}
"""The attention of a table, by its name, for a model whose attention is latent."""
FLAT_ATTENTION: dict[str, AttentionKernels] = {
    "tpu": AttentionKernels(
        partial(
            attend_layer,
            decode=paged_attention.attend,
            prefill=paged_attention.attend,
            write_and_decode=paged_attention.attend_new,
            project=partial(project_rows_at_once, is_flat=True),
        ),
        describe_singles=paged_attention.describe_singles,
        norm_and_project=norm_and_project,
        has_flat_rows=True,
    )
}
"""The attention of a table, by its name, with our own paged kernel: the default where keys and values are not of 8 bits
and pages divide by 16 tokens, and always for sinks and for heads that are no whole registers of a TPU."""

KERNELS: dict[str, Kernels] = {kernels.name: kernels for kernels in (CPU, TPU, CPU_NATIVE)}
"""By name; the one that has the name of a platform is the platform's own."""
