"""The tables of kernels: for each operation of a step (`operations`) the candidates that may compute it.

A step is built from one table. `CPU` is the reference, `TPU`, `GPU` and `CPU_NATIVE` follow. An `Operation` has
candidates in order of preference. The first candidate without an `unsupported_reason` for the shapes of a call computes
it, and the server logs the choices at its start. Fields with a plain function have a single implementation. A new
kernel is a function with the signature of its reference and a candidate here (docs/add_a_kernel.md). How tokens reach
experts on other devices is chosen in the same way from `experts.backends.EXPERT_BACKENDS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from rayserve_moe.kernels import kv_pool, packed_blocks
from rayserve_moe.kernels.attention_heads import project_packed_rows, project_rows
from rayserve_moe.kernels.attention_layer import attend_layer
from rayserve_moe.kernels.block_index import choose_layer_blocks
from rayserve_moe.kernels.candidates import Candidate, Function, Operation, bound, operation
from rayserve_moe.kernels.cpu_native import calls, delta_call, index_call, mamba2_call, sampling_call
from rayserve_moe.kernels.cpu_native.layout import take_columns
from rayserve_moe.kernels.gpu import paged_attention as gpu_attention
from rayserve_moe.kernels.gpu.row import gpu_kernels, gpu_latents
from rayserve_moe.kernels.invariant import BLOCKS, LATENTS, SPARSE_LATENTS, invariant, invariant_on_tpus
from rayserve_moe.kernels.latent_attention import absorb, attend_by_choice, attend_latent_layer, expand
from rayserve_moe.kernels.operations import (
    ADVANCE,
    AttentionKernels,
    ExpertKernels,
    HeadKernels,
    Kernels,
    ParameterLayout,
    PoolKernels,
    RecurrenceKernels,
    SamplingKernels,
    products,
)
from rayserve_moe.kernels.reference import attention as attention_reference
from rayserve_moe.kernels.reference import block_index, expert_products, layers, token_index
from rayserve_moe.kernels.reference.device_sums import DeviceSumKernels
from rayserve_moe.kernels.token_index import choose_layer_tokens
from rayserve_moe.kernels.tpu import (
    add_norm,
    chosen_attention,
    delta_rule,
    device_rows,
    device_sums,
    dispatch_sizes,
    grouped_ffn,
    latent_heads,
    low_latency_dispatch,
    paged_attention,
    rotary_heads,
    streamed_heads,
    top_experts,
)
from rayserve_moe.kernels.tpu import token_index as paged_index
from rayserve_moe.kernels.tpu.packed_rows import LANES, packed_latents


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
CPU_INVARIANT = invariant(CPU, name="cpu_invariant")
"""XLA on a CPU, with the same bits for a row in any step (`invariant`)."""
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


def latent_products(*, interpret: Any = False) -> dict[str, Operation]:
    """Return the products per head of latent attention by name; `interpret` (see `pallas_call`) needs no TPU."""
    kernels: dict[str, Function] = {
        "absorb": Candidate("absorb_queries", latent_heads.absorb, latent_heads.unsupported_absorb),
        "expand": Candidate("expand_values", latent_heads.expand, latent_heads.unsupported_expand),
    }
    by_xla: dict[str, Function] = {"absorb": Candidate("xla", absorb), "expand": Candidate("xla", expand)}
    return {name: Operation((bound(kernels[name], interpret=interpret), by_xla[name])) for name in kernels}


LATENT_PRODUCTS = latent_products()
PAGED_LATENTS = AttentionKernels(
    partial(
        attend_latent_layer,
        decode=paged_attention.attend,
        prefill=paged_attention.attend,
        write_and_decode=paged_attention.attend_new,
        rows_of=packed_latents,
        **LATENT_PRODUCTS,
    ),
    describe_singles=paged_attention.describe_singles,
    **LATENT_PRODUCTS,
    has_packed_rows=True,
)
"""Latent attention of TPUs."""


def sparse_latents(*, interpret: Any = False) -> AttentionKernels:
    """Return sparse latent attention of TPUs; `interpret` (see `pallas_call`) runs its kernels without one."""
    sparse = partial(
        attend_latent_layer,
        decode=partial(chosen_attention.attend_all_or_chosen, interpret=interpret),
        prefill=partial(chosen_attention.attend_prompts, interpret=interpret),
        rows_of=packed_latents,
        **latent_products(interpret=interpret),
    )
    choose = Operation(
        (
            bound(
                Candidate("token_index", paged_index.choose_tokens, paged_index.unsupported_reason), interpret=interpret
            ),
            Candidate("xla", token_index.choose_tokens),
        )
    )
    return replace(
        PAGED_LATENTS,
        attend=partial(attend_by_choice, dense=PAGED_LATENTS.attend, sparse=sparse),
        choose_tokens=partial(choose_layer_tokens, choose=choose, rows_of=packed_latents),
    )


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
        carries_ranks=True,
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
        tile=(8, LANES),
    ),
    pool=PoolKernels(dtypes={"float8_e4m3fn": kv_pool.PAIRED}),
    # XLA lays out a table of other widths by columns if that is smaller, and copies it to look up rows; so it does
    # logits and histories of other shares of the vocabulary. Experts with a single width of whole lanes it lays out
    # likewise, and copies those of all layers for a grouped product.
    parameters=ParameterLayout(
        multiples={"table_row": LANES, "expert_inner": LANES, "vocabulary": LANES},
        padded_beside={"expert_inner": "model"},
    ),
    add_norm=Operation(
        (
            Candidate("add_norm", add_norm.add_and_norm, add_norm.unsupported_reason),
            Candidate("xla", layers.add_and_norm),
        )
    ),
)
TPU_INVARIANT = invariant_on_tpus(TPU, name="tpu_invariant")
"""TPUs with the same bits for a row in any step, for models and layouts of `execution.tpu_invariance`."""
GPU = gpu_kernels(CPU)
"""Kernels of Triton, and XLA."""
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
        total=layers.total_in_order,
    ),
    head=HeadKernels(calls.head_logits, tied_rows=take_columns),
    sampling=SamplingKernels(
        calls.masses_of,
        noise=calls.gumbel_noise,
        choose=calls.choose,
        last_kept=sampling_call.last_kept,
        kept_words=sampling_call.kept_words,
    ),
    recurrence=RecurrenceKernels(
        advance_layer=delta_call.advance_layer, advance_mamba2_layer=mamba2_call.advance_layer
    ),
    pool=PoolKernels(calls.copy_pages, calls.put_pages),
    parameters=ParameterLayout(calls.LAYOUT_OF, calls.MULTIPLES),
    add_norm=operation("cpu_native", calls.add_and_norm),
    dtype="bfloat16",
    compiler_options={"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": "1"},
)
"""C++ for bfloat16 on a CPU (`cpu_native`).

XLA has little left to fuse: without its emitters programs compile in a third of the time and run equally fast.
"""
XLA_LATENTS = AttentionKernels(
    partial(attend_latent_layer, decode=attention_reference.attend, prefill=attention_reference.attend),
    choose_tokens=partial(choose_layer_tokens, choose=token_index.choose_tokens),
)
CHOOSE_BLOCKS = partial(choose_layer_blocks, choose=block_index.choose_blocks)
AttentionCandidates = tuple[Candidate[AttentionKernels], ...]
"""Their reasons take the `PoolFormat` of a server."""
GROUPED_ATTENTION: dict[str, AttentionCandidates] = {
    "tpu": (Candidate("paged", PAGED, paged_attention.unsupported_reason),),
    "tpu_invariant": (Candidate("paged", TPU_INVARIANT.attention, paged_attention.unsupported_reason),),
    "gpu": (
        Candidate("triton", GPU.attention, gpu_attention.unsupported_reason),
        Candidate("xla", CPU.attention),
    ),
}
"""Candidates for grouped-query attention by name of a table; other tables have their own `attention` only."""
LATENT_ATTENTION: dict[str, AttentionCandidates] = {
    "cpu": (Candidate("xla", XLA_LATENTS),),
    "cpu_invariant": (Candidate("xla", LATENTS),),
    "cpu_native": (Candidate("cpu_native", AttentionKernels(calls.attend_latent_layer)),),
    "tpu": (Candidate("paged", PAGED_LATENTS, paged_attention.unsupported_latents),),
    "gpu": (
        Candidate("triton", gpu_latents(), gpu_attention.unsupported_latents),
        Candidate("xla", XLA_LATENTS),
    ),
}
"""Candidates for latent attention by name of a table."""

SPARSE_ATTENTION: dict[str, AttentionCandidates] = {
    "cpu": (Candidate("xla", XLA_LATENTS),),
    "cpu_invariant": (Candidate("xla", SPARSE_LATENTS),),
    "cpu_native": (
        Candidate(
            "cpu_native",
            AttentionKernels(calls.attend_latent_layer, choose_tokens=index_call.choose_layer_tokens),
        ),
    ),
    "tpu": (Candidate("paged", sparse_latents(), paged_attention.unsupported_latents),),
    "gpu": (
        Candidate("triton to index_topk tokens, then xla", gpu_latents(), gpu_attention.unsupported_latents),
        Candidate("xla", XLA_LATENTS),
    ),
}
"""Candidates for sparse latent attention by name of a table.

On a TPU it is dense, by the kernel of latent attention, for tokens that see no more than are chosen. Beyond them a
kernel chooses the tokens, and another copies them for single tokens and for long prompts. The tokens of other prompts
share the pages that they read, and are attended by the dense kernel under a mask (`tpu.paged_choice`).
"""


def _sparse_blocks(*, decode: Callable[..., jax.Array], prefill: Callable[..., jax.Array]) -> AttentionKernels:
    """Return block-sparse attention of TPUs: dense by the paged kernel, or by these functions to chosen blocks."""
    sparse = partial(attend_layer, decode=decode, prefill=prefill, project=PAGED.project)
    return replace(
        PAGED,
        attend=partial(attend_by_choice, dense=PAGED.attend, sparse=sparse),
        choose_blocks=partial(choose_layer_blocks, choose=block_index.choose_blocks, rows_of=packed_latents),
    )


BLOCK_ATTENTION: dict[str, AttentionCandidates] = {
    "cpu": (Candidate("xla", replace(CPU.attention, choose_blocks=CHOOSE_BLOCKS)),),
    "cpu_invariant": (Candidate("xla", BLOCKS),),
    "cpu_native": (
        Candidate("cpu_native", replace(CPU_NATIVE.attention, choose_blocks=index_call.choose_layer_blocks)),
    ),
    "gpu": (
        Candidate(
            "triton to index_topk_blocks blocks, then xla",
            replace(GPU.attention, choose_blocks=CHOOSE_BLOCKS),
            gpu_attention.unsupported_reason,
        ),
        Candidate("xla", replace(CPU.attention, choose_blocks=CHOOSE_BLOCKS)),
    ),
    "tpu": (
        Candidate(
            "paged",
            _sparse_blocks(decode=packed_blocks.attend_single_tokens, prefill=paged_attention.attend),
            packed_blocks.unsupported_by_kernel,
        ),
        Candidate(
            "paged to index_topk_blocks blocks, then xla",
            _sparse_blocks(decode=packed_blocks.attend_chosen_blocks, prefill=packed_blocks.attend_chosen_blocks),
            packed_blocks.unsupported_blocks,
        ),
    ),
}
"""Candidates for block-sparse grouped attention by name of a table, which also compute the model's dense layers.

On a TPU as `SPARSE_ATTENTION`, but XLA chooses the blocks. For sizes without a kernel XLA also attends to them, once a
context has more blocks than are chosen.
"""

KERNELS: dict[str, Kernels] = {
    kernels.name: kernels for kernels in (CPU, CPU_INVARIANT, TPU, TPU_INVARIANT, GPU, CPU_NATIVE)
}
"""By name; the table with the name of a platform is the platform's own."""
