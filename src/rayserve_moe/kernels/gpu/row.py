"""The row of GPUs in the table of kernels: Triton kernels, with XLA for the sizes that they do not take."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from rayserve_moe.kernels.candidates import Candidate, Function, Operation, bound
from rayserve_moe.kernels.gpu import attention_layer, fused_heads, grouped_experts, stacked_products, top_experts
from rayserve_moe.kernels.gpu.blocks import UNREACHABLE_BYTES
from rayserve_moe.kernels.gpu.paged_attention import attend_or_choose
from rayserve_moe.kernels.latent_attention import attend_latent_layer
from rayserve_moe.kernels.operations import (
    DEVICE_SUMS,
    AttentionKernels,
    ExpertKernels,
    Kernels,
    PoolKernels,
    products,
)
from rayserve_moe.kernels.reference import device_sums, expert_products, layers, token_index
from rayserve_moe.kernels.token_index import choose_layer_tokens

TRITON, XLA = "triton", "xla"


def gpu_kernels(reference: Kernels, *, interpret: bool = False) -> Kernels:
    """Return the table of GPUs; operations without a kernel are those of `reference`. `interpret` needs no GPU."""
    multiply: Function = Candidate(TRITON, grouped_experts.multiply_grouped, grouped_experts.unsupported_reason)
    results, sums = products(bound(multiply, interpret=interpret), Candidate(XLA, expert_products.multiply_in_blocks))
    stacked = gpu_products(interpret=interpret)
    choose: Function = Candidate(
        "top_experts", partial(top_experts.choose_experts, products=stacked), top_experts.unsupported_reason
    )
    sums_of_device = replace(DEVICE_SUMS.run, sum_experts=partial(device_sums.sum_experts, multiply=results))
    return replace(
        reference,
        name="gpu",
        attention=gpu_heads(interpret=interpret),
        experts=ExpertKernels(
            layers.router_scores,
            results,
            sums,
            choose=Operation((bound(choose, interpret=interpret),)),
            device_sums=replace(DEVICE_SUMS, run=sums_of_device),
        ),
        pool=PoolKernels(unreachable_bytes=UNREACHABLE_BYTES),
    )


def gpu_products(*, interpret: bool = False) -> Operation:
    """Return products with a layer of stacked matrices."""
    in_place: Function = Candidate(TRITON, stacked_products.multiply_stacked, stacked_products.unsupported_reason)
    return Operation((bound(in_place, interpret=interpret), Candidate(XLA, stacked_products.multiply_copied)))


def gpu_heads(*, interpret: bool = False) -> AttentionKernels:
    """Return grouped-query attention. XLA attends to chosen blocks."""
    fused: Function = Candidate("fused_heads", fused_heads.project_and_write, fused_heads.unsupported_reason)
    project_and_write = Operation((bound(fused, interpret=interpret),))
    in_stacks = gpu_products(interpret=interpret)
    attend_layer = partial(
        attention_layer.attend_layer,
        attend=partial(attend_or_choose, interpret=interpret),
        project_and_write=project_and_write,
        products=in_stacks,
    )
    return AttentionKernels(attend_layer, project_and_write=project_and_write, products=in_stacks)


def gpu_latents(*, interpret: bool = False) -> AttentionKernels:
    """Return latent attention, and sparse latent attention, whose tokens XLA chooses and attends."""
    attend = partial(attend_or_choose, interpret=interpret)
    return AttentionKernels(
        partial(attend_latent_layer, decode=attend, prefill=attend),
        choose_tokens=partial(choose_layer_tokens, choose=token_index.choose_tokens),
    )
