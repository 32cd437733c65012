"""`auto` gathers few tokens and exchanges many; a backend that is named is taken as it is."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import jax
import numpy as np
import pytest

from rayserve_moe.experts.backends import all_to_all_bytes, choose_backend, choose_between_slices, replicated_bytes
from rayserve_moe.experts.config import ExpertConfig
from rayserve_moe.experts.layer import backend_for
from rayserve_moe.experts.pushed import why_not_pushed
from rayserve_moe.experts.router_spec import RouterSpec
from rayserve_moe.kernels.reference.expert_products import ExpertWeights
from rayserve_moe.kernels.table import CPU, Kernels
from rayserve_moe.kernels.tpu.pushed_sizes import lacks
from tests.support.experts.moe_layer import plan_of

SIZES = {"top_k": 8, "row_bytes": 4096}
PUSHES = replace(CPU, experts=replace(CPU.experts, push_lacks=partial(lacks, interpret=True)))


@cache
def choose(tokens: int, ep_size: int, tensor_size: int = 1) -> str:
    return choose_backend(tokens, ep_size=ep_size, tensor_size=tensor_size, platform="tpu", **SIZES)


def test_few_tokens_or_ranks_are_gathered_and_the_rest_exchanged():
    assert choose(16, 1) == "local"
    assert choose(1, 8) == choose(512, 2) == choose(16, 2) == "replicated"
    assert choose(16, 8) == choose(16, 64) == choose(256, 8) == "all_to_all"
    assert choose(512, 8) == choose(8192, 64) == "fused"


def test_over_slices_the_way_that_sends_less_between_them_is_taken():
    """A gathered token crosses as three rows to each other slice, an exchanged one as two for each expert there."""
    for top_k in (1, 2, 4, 6, 8, 16):
        for slices in (2, 4, 8, 16):
            found = choose_between_slices(8192, num_slices=slices, top_k=top_k)
            gathered, exchanged = 3 * (slices - 1), 2 * top_k * (slices - 1) / slices
            assert found == ("replicated" if gathered <= exchanged else "fused")


def test_cpu_devices_gather():
    assert choose_backend(8192, ep_size=8, tensor_size=1, platform="cpu", **SIZES) == "replicated"


@pytest.mark.parametrize("tokens", [1, 4, 64, 1024])
@pytest.mark.parametrize(("ep_size", "tensor_size"), [(2, 1), (8, 1), (8, 8), (64, 8)])
def test_the_choice_is_the_way_with_fewer_bytes(tokens, ep_size, tensor_size):
    sizes = {"ep_size": ep_size, "tensor_size": tensor_size, "row_bytes": 4096}
    gathered, exchanged = replicated_bytes(tokens, **sizes), all_to_all_bytes(tokens, top_k=8, **sizes)
    assert (choose(tokens, ep_size, tensor_size) == "replicated") == (gathered <= exchanged)


def test_auto_counts_the_tokens_of_a_device_and_a_name_is_taken_as_it_is():
    config = ExpertConfig(RouterSpec(16, 4, True), CPU, plan_of(1, 1))
    hidden, weights = shapes_of(19, width=16)
    assert backend_for(hidden, weights, config=config) == "local"
    assert backend_for(hidden, weights, config=replace(config, plan=plan_of(2, 2))) == "replicated"
    assert backend_for(hidden, weights, config=replace(config, plan=plan_of(2, 2), backend="fused")) == "fused"


def shapes_of(num_tokens: int, *, width: int, dtype: str = "float32") -> tuple[jax.ShapeDtypeStruct, ExpertWeights]:
    shapes = (num_tokens, width), (2, width, 128), (2, width, 128), (2, 128, width)
    hidden, *weights = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    return hidden, ExpertWeights(*weights)


def reason(num_tokens: int = 2, *, width: int = 2048, dtype: str = "bfloat16", kernels: Kernels = PUSHES, **of) -> str:
    config = ExpertConfig(RouterSpec(8, 4, True), kernels, replace(plan_of(2, 2), num_slices=of.pop("num_slices", 1)))
    hidden, weights = shapes_of(num_tokens, width=width, dtype=dtype)
    return why_not_pushed(hidden, weights._replace(**of), config)


def test_rows_are_pushed_where_the_kernel_lacks_nothing():
    assert reason() == reason(64) == ""
    assert "no such kernel" in reason(kernels=CPU)
    assert "kernel is for bfloat16" in reason(dtype="float32")
    assert reason(gate_XDF=jax.ShapeDtypeStruct((2, 2048, 128), np.int8)) == ""
    assert "weights float32" in reason(gate_XDF=jax.ShapeDtypeStruct((2, 2048, 128), np.float32))
    assert "kernel is for bfloat16" in reason(gate_XDF=jax.ShapeDtypeStruct((2, 2048, 128), np.int8), dtype="float32")
    assert "without biases" in reason(gate_bias_XF=jax.ShapeDtypeStruct((2, 128), np.float32))
    assert "one slice" in reason(num_slices=2)
    assert "rows of 2112" in reason(width=2112)
    assert "an expert width of 96" in reason(gate_XDF=jax.ShapeDtypeStruct((2, 2048, 96), np.dtype("bfloat16")))
    assert "17 tokens are not a multiple" in reason(34)
    assert "1024 tokens take 1032 KiB of the 1016 of scalars" in reason(2048)
    assert "MiB are wanted of" in reason(1920, width=8192)
