"""The experts of few tokens are one kernel over the devices of a slice: no collective, and nothing copied beside it."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rayserve_moe.kernels.expert_products import ExpertWeights, LayerExperts, ProductConfig
from rayserve_moe.kernels.pushed_experts import push_experts
from rayserve_moe.kernels.pushed_sizes import PushSizes, lacks
from rayserve_moe.tools.hlo_report import collectives_of, kernels_of
from tests.compile.topologies import text_of

NUM_EXPERTS, TOP_K, WIDTH, INNER, LAYERS = 128, 8, 2048, 768, 2


def sizes_for(mesh: Mesh, tokens_per_device: int, weight_dtype: str = "bfloat16") -> PushSizes:
    axes, num_slots = tuple(mesh.shape.items()), NUM_EXPERTS // mesh.devices.size
    return PushSizes(tokens_per_device, TOP_K, WIDTH, INNER, num_slots, axes, weight_dtype=weight_dtype)


def mesh_of(topology: str, tensor: int = 1) -> Mesh:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    return Mesh(np.asarray(devices).reshape(-1, tensor), ("data", "tensor"))


def push(hidden_TD, slots_TK, gates_TK, *weights, sizes: PushSizes):
    held = ExpertWeights(*weights[:3], None, None, None, *weights[3:])
    of_layer = LayerExperts(held, sizes.num_slots, ProductConfig(sizes.num_slots, 8.0))
    return push_experts(hidden_TD, slots_TK, gates_TK, of_layer, sizes=sizes)


@pytest.mark.parametrize(
    ("topology", "tensor", "tokens", "weight_dtype"),
    [
        ("v6e:2x4", 1, 32, "bfloat16"),
        ("v6e:2x4", 1, 32, "int8"),
        pytest.param("v6e:2x4", 2, 2, "bfloat16", marks=pytest.mark.slow),
        pytest.param("v6e:2x4", 1, 128, "bfloat16", marks=pytest.mark.slow),
        pytest.param("v5e:2x4", 1, 16, "bfloat16", marks=pytest.mark.slow),
        pytest.param("v5e:2x4", 1, 16, "int8", marks=pytest.mark.slow),
        pytest.param("tpu7x:2x2x1", 1, 32, "bfloat16", marks=pytest.mark.slow),
        pytest.param("tpu7x:2x2x1", 1, 32, "int8", marks=pytest.mark.slow),
    ],
)
def test_the_experts_of_few_tokens_are_one_kernel(topology, tensor, tokens, weight_dtype):
    """Weights of int8 are read as such, their scales beside them: neither is copied."""
    mesh = mesh_of(topology, tensor)
    sizes, parts = sizes_for(mesh, tokens, weight_dtype), PartitionSpec(("data", "tensor"))
    shapes = [((tokens * sizes.num_ranks, size), dtype) for size, dtype in ((WIDTH, "bfloat16"), (TOP_K, "int32"))]
    shapes.append(((tokens * sizes.num_ranks, TOP_K), "float32"))
    shapes += [((LAYERS * NUM_EXPERTS, *shape), dtype) for shape, dtype in sizes.held_weights]
    arguments = [jax.ShapeDtypeStruct(*shape, sharding=NamedSharding(mesh, parts)) for shape in shapes]
    run = jax.shard_map(partial(push, sizes=sizes), mesh=mesh, in_specs=parts, out_specs=parts, check_vma=False)
    with jax.set_mesh(mesh):
        compiled = jax.jit(run).lower(*arguments).compile()
    program = text_of(compiled)
    assert kernels_of(program) == {"pushed_experts": 1} and not list(collectives_of(program))
    assert compiled.memory_analysis().temp_size_in_bytes < jnp.dtype("bfloat16").itemsize * tokens * WIDTH * TOP_K


def test_cores_that_share_a_device_are_not_for_it():
    mesh = mesh_of("v5p:2x2x2")
    with jax.set_mesh(mesh):
        assert "of the 0 MiB of a core" in lacks(sizes_for(mesh, 16))
