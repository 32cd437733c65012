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
    """Of kernels that push no rows: what they lack for any sizes."""
    return f"there is no such kernel for rows of {sizes.width}"


@dataclass(frozen=True, repr=False)
class Kernels:
    """The functions of a step, each with the signature and the meaning of its reference.

    `norm`: `layers.rms_norm`. `rotation`: `layers.rotation_of`. `attention`: `attention_layer.attend_layer` with its
    two paged kernels bound, and its projection where that is another. `router_scores`: `layers.router_scores`.
    `expert_results`: `expert_products.multiply_in_blocks`. `expert_sums`: `expert_products.sum_results` with its
    product bound. `pushed_sums`: `pushed_experts.push_experts`, which computes what `expert_sums` does over all ranks,
    for sizes of which `push_lacks` says nothing. `mlp`: `layers.gated_mlp`. `head`: `layers.head_logits`. `tied_rows`:
    `layers.take_rows` of a table that is also the head. `masses`: `layers.masses_of`. `noise`: `layers.gumbel_noise`.
    `copy_pages`: `kv_pool.copy_pages`. `moves`: `kv_pool.move_rows`.

    `layouts` names how the weights of a parameter lie in memory (`cpu_native.layout.LAYOUTS`; `head` is the table that
    the head multiplies with). `multiples`: what the size of a logical axis on a device has to divide by; parameters are
    padded with zeros until it does. `dtype` is the only one that the kernels compute in; empty: any. `pool_dtypes` says
    which dtype holds keys and values of another (`kv_pool`). `has_flat_rows`: the pool's rows are those of `flat_rows`.
    `describe_singles` (`attention_ragged.describe_singles`): what the
    attention of single tokens derives of their positions, once for all layers; None: nothing. `choose_experts`
    (`top_experts.choose_experts`): a router and its choice at once, `add_norm` (`add_norm.add_and_norm`): a
    residual stream and its norm, `norm_and_project` (`streamed_heads.norm_and_project`): that ahead of attention, with
    queries, keys and values; where they are or give None, the parts are computed one after the other. `choose`: the
    best of the log-probabilities that truncation keeps with `noise`, without that of words that cannot be it.
    """

    name: str
    norm: Kernel
    rotation: Callable[..., layers.Rotation]
    attention: Callable[..., tuple[jax.Array, jax.Array]]
    router_scores: Kernel
    expert_results: Kernel
    expert_sums: Kernel
    mlp: Kernel
    head: Kernel
    tied_rows: Kernel
    masses: Callable[..., layers.WordMasses]
    noise: Kernel
    copy_pages: Kernel = kv_pool.copy_pages
    moves: Kernel = kv_pool.move_rows
    pushed_sums: Kernel = push_experts
    push_lacks: Callable[[PushSizes], str] = no_push
    layouts: Mapping[str, str] = field(default_factory=dict, hash=False)
    multiples: Mapping[str, int] = field(default_factory=dict, hash=False)
    dtype: str = ""
    pool_dtypes: Mapping[str, str] = field(default_factory=dict, hash=False)
    has_flat_rows: bool = False
    describe_singles: Callable[..., Mapping[int, Any]] | None = None
    choose_experts: Callable[..., tuple[jax.Array, jax.Array] | None] | None = None
    add_norm: Callable[..., tuple[jax.Array, jax.Array] | None] | None = None
    norm_and_project: Callable[..., tuple[jax.Array, jax.Array, jax.Array] | None] | None = None
    choose: Callable[..., tuple[jax.Array, jax.Array, jax.Array]] | None = None
    compiler_options: Mapping[str, str | bool] = field(default_factory=dict, hash=False)
    """Options of XLA for programs of these kernels, unless XLA_FLAGS sets them."""

    def __repr__(self) -> str:
        """The name: programs on disk are found by it, so it holds no address of a function."""
        return f"Kernels({self.name})"


CPU = Kernels(
    "cpu",
    norm=layers.rms_norm,
    rotation=layers.rotation_of,
    attention=partial(attend_layer, decode=attention_reference.attend, prefill=attention_reference.attend),
    router_scores=layers.router_scores,
    expert_results=expert_products.multiply_in_blocks,
    expert_sums=partial(expert_products.sum_results, multiply=expert_products.multiply_in_blocks),
    mlp=layers.gated_mlp,
    head=layers.head_logits,
    tied_rows=layers.take_rows,
    masses=layers.masses_of,
    noise=layers.gumbel_noise,
    pool_dtypes=kv_pool.BITS,
)
TPU = replace(
    CPU,
    name="tpu",
    attention=partial(
        attend_layer,
        decode=attention_ragged.attend_decode,
        prefill=attention_ragged.attend_prefill,
        project=project_rows_at_once,
    ),
    expert_results=multiply_grouped,
    expert_sums=partial(expert_products.sum_results, multiply=multiply_grouped),
    push_lacks=lacks,
    # XLA lays a table of other rows out by columns where that is smaller, and copies it to look rows up.
    multiples={"table_row": LANES},
    pool_dtypes={},
    describe_singles=attention_ragged.describe_singles,
    choose_experts=choose_experts,
    add_norm=add_and_norm,
)
CPU_NATIVE = Kernels(
    "cpu_native",
    norm=calls.rms_norm,
    rotation=calls.rotation_of,
    attention=calls.attend_layer,
    router_scores=calls.router_scores,
    expert_results=calls.expert_results,
    expert_sums=calls.expert_sums,
    mlp=calls.gated_mlp,
    head=calls.head_logits,
    tied_rows=take_columns,
    masses=calls.masses_of,
    noise=calls.gumbel_noise,
    choose=calls.choose,
    copy_pages=calls.copy_pages,
    moves=calls.move_rows,
    layouts=calls.LAYOUT_OF,
    multiples=calls.MULTIPLES,
    dtype="bfloat16",
    compiler_options={"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": "1"},
)
"""C++ for bfloat16 on a CPU (`cpu_native`). XLA has little left to fuse: without its emitters programs compile in a
third of the time, and run as fast."""

_FLAT: dict[str, Any] = {"has_flat_rows": True, "describe_singles": paged_attention.describe_singles}
_PAGED: dict[str, Callable[..., Any]] = {
    "decode": paged_attention.attend,
    "prefill": paged_attention.attend,
    "write_and_decode": paged_attention.attend_new,
}
LATENT_ATTENTION: dict[str, Mapping[str, Any]] = {
    "cpu": {
        "attention": partial(attend_latent_layer, decode=attention_reference.attend, prefill=attention_reference.attend)
    },
    "cpu_native": {"attention": calls.attend_latent_layer},
    "tpu": {"attention": partial(attend_latent_layer, **_PAGED, rows_of=flat_latents), **_FLAT},
}
"""What takes the place of fields where a model's attention is latent, by the name of the table."""
FLAT_ATTENTION: dict[str, Mapping[str, Any]] = {
    "tpu": {
        "attention": partial(attend_layer, **_PAGED, project=partial(project_rows_at_once, is_flat=True)),
        **_FLAT,
        "norm_and_project": norm_and_project,
    }
}
"""What takes the place of fields where a model has sinks, or heads that are no whole registers of a TPU, or where two
cores share a device: they share the work of the kernel of our own."""

KERNELS: dict[str, Kernels] = {kernels.name: kernels for kernels in (CPU, TPU, CPU_NATIVE)}
"""By name; the one that has the name of a platform is the platform's own."""
