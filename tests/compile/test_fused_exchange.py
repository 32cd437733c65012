"""Fused expert parallelism on TPU: tokens travel by the ragged exchange alone, and while others are multiplied."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rayserve_moe.experts.backends import choose_backend
from rayserve_moe.experts.config import ExpertConfig
from rayserve_moe.experts.router_spec import RouterSpec
from rayserve_moe.experts.slot_mapping import PlacedExperts
from rayserve_moe.experts.tokens import RoutedTokens
from rayserve_moe.kernels.ragged_exchange import COMPILER_OPTIONS_OF_PLATFORM
from rayserve_moe.kernels.reference.expert_products import ExpertWeights
from rayserve_moe.kernels.table import KERNELS
from rayserve_moe.parallel.sharding import DATA, TENSOR, ParallelPlan
from rayserve_moe.tools.hlo_report import collectives_of
from rayserve_moe.tools.hlo_text import ProgramText, read_program


class Sizes(NamedTuple):
    """Experts of a layer, those of a token, and their widths."""

    num_experts: int = 128
    top_k: int = 8
    width: int = 2048
    inner: int = 768


FULL, NARROW = Sizes(), Sizes(width=256, inner=128)
CASES = [
    pytest.param(topology, tokens, marks=() if (topology, tokens) == ("v6e:2x4", 512) else pytest.mark.slow)
    for topology in ("v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1")
    for tokens in (64, 512)
]


@cache
def compiled(
    topology: str, tokens_per_device: int, backend: str = "fused", num_slices: int = 1, *, sizes: Sizes = FULL
) -> ProgramText:
    """Compile a layer by a backend, with experts and tokens split over all devices, as if they were `num_slices`."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    plan = ParallelPlan(Mesh(np.asarray(devices).reshape(-1, 1), (DATA, TENSOR)), num_slices=num_slices)
    config = ExpertConfig(
        RouterSpec(sizes.num_experts, sizes.top_k, renormalize=True), KERNELS["tpu"], plan, backend=backend
    )

    def on_device(routed: RoutedTokens, weights: ExpertWeights) -> jax.Array:
        experts = PlacedExperts(weights, jnp.int32(0), None)
        return choose_backend(routed, experts, config=config).candidate.run(routed, experts, config=config)

    split, num_tokens = PartitionSpec((DATA, TENSOR)), tokens_per_device * len(devices)
    layer = jax.shard_map(on_device, mesh=plan.mesh, in_specs=(split, split), out_specs=split, check_vma=False)

    def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(plan.mesh, split))

    num_experts, top_k, width, inner = sizes
    choices, up, down = (num_tokens, top_k), (num_experts, width, inner), (num_experts, inner, width)
    routed = RoutedTokens(
        array((num_tokens, width), jnp.bfloat16),
        array(choices, jnp.int32),
        array(choices, jnp.float32),
        array((num_tokens,), jnp.bool_),
    )
    weights = ExpertWeights(*(array(shape, jnp.bfloat16) for shape in (up, up, down)))
    with jax.set_mesh(plan.mesh):
        lowered = jax.jit(layer).lower(routed, weights)
    return read_program(lowered.compile(compiler_options=COMPILER_OPTIONS_OF_PLATFORM["tpu"]).as_text() or "")


def products_during_exchanges(program: ProgramText, product: str = "ragged-dot-none") -> list[int]:
    """Return the number of products between start and end of each exchange of the main computation."""
    entry, found = program.computations[program.entry], []
    for first, start in enumerate(entry):
        if start.opcode in ("ragged-all-to-all-start", "call-start") and "ragged-all-to-all" in start.name:
            last = next(i for i in range(first + 1, len(entry)) if start.name in entry[i].operands)
            found.append(sum(other.name.startswith(product) for other in entry[first:last]))
    return found


@pytest.mark.parametrize(("topology", "tokens"), CASES)
def test_no_token_is_gathered(topology, tokens):
    found = {collective.operation: collective for collective in collectives_of(compiled(topology, tokens))}
    assert "ragged-all-to-all" in found
    for operation in ("all-gather", "all-to-all", "all-reduce", "reduce-scatter"):
        if operation in found:
            assert found[operation].num_bytes < tokens * FULL.width, "what everybody learns is counts, not rows"


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v6e:2x4", "v5p:2x2x2"])
def test_on_several_slices_slots_are_gathered_so_that_a_row_goes_once_to_a_device(topology):
    """On one slice counts of all slots and devices are."""

    def gathered(num_slices: int) -> list[int]:
        found = collectives_of(compiled(topology, 16, "all_to_all", num_slices, sizes=NARROW))
        return [one.num_bytes for one in found if one.operation == "all-gather"]

    assert gathered(2) == [8 * 16 * NARROW.top_k * 4] and gathered(1) == [8 * 2 * NARROW.num_experts * 4]


@pytest.mark.parametrize(("topology", "tokens"), [case for case in CASES if case.values[1] == 512])
def test_a_chunk_travels_while_the_other_is_multiplied(topology, tokens):
    """Check that the second chunk goes out during the first product, and the first results return during the second."""
    during = products_during_exchanges(compiled(topology, tokens))
    assert len(during) == 4, "two chunks, out and back"
    assert sum(num_products > 0 for num_products in during) == 2
