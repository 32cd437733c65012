"""`auto` gathers few tokens and exchanges many; a backend that is named is taken as it is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.balancing.placement import identity_placement
from rayserve_moe.experts.backends import EXPERT_BACKENDS, all_to_all_bytes, choose_backend, replicated_bytes
from rayserve_moe.experts.config import ExpertConfig
from rayserve_moe.experts.low_latency import unsupported_reason
from rayserve_moe.experts.router_spec import RouterSpec
from rayserve_moe.experts.slot_mapping import CHOSEN_BEFORE, PlacedExperts, placement_arrays
from rayserve_moe.experts.tokens import RoutedTokens
from rayserve_moe.kernels.operations import Kernels
from rayserve_moe.kernels.reference.expert_products import ExpertWeights
from rayserve_moe.kernels.table import CPU
from rayserve_moe.kernels.tpu import dispatch_sizes
from rayserve_moe.parallel.sharding import DATA, TENSOR
from tests.support.experts.moe_layer import plan_of

INTERPRETED = replace(
    CPU.experts.low_latency, unsupported_reason=partial(dispatch_sizes.unsupported_reason, interpret=True)
)
WITH_LOW_LATENCY = replace(CPU, experts=replace(CPU.experts, low_latency=INTERPRETED))


@dataclass(frozen=True)
class FakePlan:
    """A plan over TPUs that are not here."""

    data_size: int
    tensor_size: int
    num_slices: int = 1
    adds_in_order: bool = False

    @property
    def num_expert_ranks(self) -> int:
        return self.data_size * self.tensor_size

    @property
    def mesh(self) -> SimpleNamespace:
        shape = {DATA: self.data_size, TENSOR: self.tensor_size}
        return SimpleNamespace(shape=shape, devices=np.array([SimpleNamespace(platform="tpu")]))


def backend_on(plan: Any, tokens: int, *, top_k: int = 8, width: int = 2048, **config_fields: Any) -> str:
    """Return the name of the backend for bfloat16 tokens of a data rank, without low-latency dispatch."""
    config = replace(ExpertConfig(RouterSpec(64, top_k, True), CPU, plan), **config_fields)
    return choose_backend(*shapes_of(tokens, width=width, dtype="bfloat16"), config=config).name


@cache
def choose(tokens: int, ep_size: int, tensor_size: int = 1) -> str:
    """Return the name of the backend for `tokens` of a device."""
    return backend_on(FakePlan(ep_size // tensor_size, tensor_size), tokens * tensor_size)


def test_few_tokens_or_ranks_are_gathered_and_the_rest_exchanged():
    assert choose(16, 1) == "local"
    assert choose(1, 8) == choose(512, 2) == choose(16, 2) == "replicated"
    assert choose(16, 8) == choose(16, 64) == choose(256, 8) == "all_to_all"
    assert choose(512, 8) == "device_sums"
    assert choose(8192, 64) == "fused", "so many ranks leave room for small chunks only"


def test_over_slices_the_way_that_sends_less_between_them_is_taken():
    """A gathered token crosses as three rows to each other slice, an exchanged one as two for each expert there."""
    for top_k in (1, 2, 4, 6, 8, 16):
        for slices in (2, 4, 8, 16):
            found = backend_on(FakePlan(slices, 2, num_slices=slices), 16384, top_k=top_k)
            gathered, exchanged = 3 * (slices - 1), 2 * top_k * (slices - 1) / slices
            assert found == ("replicated" if gathered <= exchanged else "fused")


def test_collectives_add_up_nothing_if_devices_are_added_in_order():
    """Without the setting, few tokens, few ranks and CPUs take the gathered backend."""
    for plan, tokens in ((FakePlan(8, 1, adds_in_order=True), 1), (FakePlan(2, 1, adds_in_order=True), 16)):
        assert backend_on(plan, tokens) == "all_to_all"
    assert backend_on(replace(plan_of(4, 1), adds_in_order=True), 256) == "all_to_all"


def test_cpu_devices_gather():
    assert backend_on(plan_of(4, 1), 8192) == "replicated"


@pytest.mark.parametrize("may_move", [{"num_redundant": 8}, {"slot_choice": CHOSEN_BEFORE}])
def test_experts_that_may_move_are_never_added_up_by_device(may_move):
    """Sums of devices depend on the placement."""
    plans = [plan_of(4, 1), plan_of(1, 4), FakePlan(1, 2), FakePlan(8, 1), FakePlan(8, 1, num_slices=2)]
    for plan in plans:
        taken = {backend_on(plan, tokens, top_k=top_k, **may_move) for tokens in (1, 64, 8192) for top_k in (1, 8)}
        assert taken <= {"all_to_all", "fused"}


def test_maps_say_that_experts_may_move():
    tokens, experts = shapes_of(1, width=2048, dtype="bfloat16")
    config = ExpertConfig(RouterSpec(64, 8, True), CPU, plan_of(2, 2))
    assert choose_backend(tokens, experts, config=config).name == "replicated"
    maps = placement_arrays(identity_placement(1, 64, ep_size=4))
    found = choose_backend(tokens, experts._replace(maps=maps), config=config)
    assert found.name == "all_to_all" and "replicated: experts may move" in str(found)


@pytest.mark.parametrize("tokens", [1, 4, 64, 1024])
@pytest.mark.parametrize(("ep_size", "tensor_size"), [(2, 1), (8, 1), (8, 8), (64, 8)])
def test_the_choice_is_the_way_with_fewer_bytes(tokens, ep_size, tensor_size):
    sizes = {"ep_size": ep_size, "tensor_size": tensor_size, "row_bytes": 4096}
    gathered, exchanged = replicated_bytes(tokens, **sizes), all_to_all_bytes(tokens, top_k=8, **sizes)
    assert (choose(tokens, ep_size, tensor_size) == "replicated") == (gathered <= exchanged)


def test_a_named_backend_is_taken_as_it_is():
    assert backend_on(plan_of(1, 1), 19) == "local"
    assert backend_on(plan_of(2, 2), 19) == "replicated"
    assert backend_on(plan_of(2, 2), 19, backend="fused") == "fused"
    with pytest.raises(KeyError):
        backend_on(plan_of(2, 2), 19, backend="other")


def test_a_choice_says_why_the_backends_before_it_are_not_taken():
    config = ExpertConfig(RouterSpec(64, 8, True), CPU, FakePlan(8, 1))
    found = choose_backend(*shapes_of(16, width=2048, dtype="bfloat16"), config=config)
    assert list(found.rejected) == ["local", "low_latency_dispatch", "replicated", "device_sums", "fused"]
    assert "local: experts lie on 8 devices; low_latency_dispatch: TPUs only; replicated: gathering moves" in str(found)
    assert "fused: 16 tokens of a device are fewer than two chunks of 256" in str(found)
    assert {backend.name for backend in EXPERT_BACKENDS} == {*found.rejected, found.name}


def test_all_to_all_takes_the_calls_that_low_latency_dispatch_does_not():
    few, many = (shapes_of(tokens, width=2048, dtype="bfloat16") for tokens in (2, 34))
    config = ExpertConfig(RouterSpec(8, 4, True), WITH_LOW_LATENCY, plan_of(2, 2), backend="low_latency_dispatch")
    assert choose_backend(*few, config=config).name == "low_latency_dispatch"
    assert str(choose_backend(*many, config=config)).startswith("all_to_all (low_latency_dispatch: 17 tokens are not")


def shapes_of(num_tokens: int, *, width: int, dtype: str = "float32") -> tuple[RoutedTokens, PlacedExperts]:
    shapes = (num_tokens, width), (2, width, 128), (2, width, 128), (2, 128, width)
    hidden, *weights = (jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes)
    return RoutedTokens(hidden, None, None, None), PlacedExperts(ExpertWeights(*weights), 0, None)


def reason(
    num_tokens: int = 2, *, width: int = 2048, dtype: str = "bfloat16", kernels: Kernels = WITH_LOW_LATENCY, **of
) -> str:
    config = ExpertConfig(RouterSpec(8, 4, True), kernels, replace(plan_of(2, 2), num_slices=of.pop("num_slices", 1)))
    tokens, experts = shapes_of(num_tokens, width=width, dtype=dtype)
    return unsupported_reason(tokens, experts._replace(weights=experts.weights._replace(**of)), config=config)


def test_low_latency_dispatch_has_a_reason_for_every_limit():
    assert reason() == reason(64) == ""
    assert reason(kernels=CPU) == "TPUs only"
    assert "not bfloat16" in reason(dtype="float32")
    assert reason(up_XDF=jax.ShapeDtypeStruct((2, 2048, 128), np.int8)) == ""
    assert "float32 weights" in reason(up_XDF=jax.ShapeDtypeStruct((2, 2048, 128), np.float32))
    assert "not bfloat16" in reason(up_XDF=jax.ShapeDtypeStruct((2, 2048, 128), np.int8), dtype="float32")
    assert reason(gate_XDF=None) == "experts have no gate"
    assert "have biases" in reason(gate_bias_XF=jax.ShapeDtypeStruct((2, 128), np.float32))
    assert reason(num_slices=2) == "devices lie on 2 slices"
    assert "rows of 2112" in reason(width=2112)
    assert "an expert width of 96" in reason(up_XDF=jax.ShapeDtypeStruct((2, 2048, 96), np.dtype("bfloat16")))
    assert "17 tokens are not a multiple" in reason(34)
    assert "1024 tokens take 1032 KiB of the 1016 KiB of scalar memory" in reason(2048)
    assert "MiB of a core's memory" in reason(1920, width=8192)
