"""The experts of few tokens are one kernel over the devices of a slice: no collective, and nothing copied beside it."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rayserve_moe.kernels.reference.expert_products import ExpertWeights, LayerExperts, ProductConfig
from rayserve_moe.kernels.tpu.dispatch_sizes import DispatchSizes
from rayserve_moe.kernels.tpu.low_latency_dispatch import dispatch_experts
from rayserve_moe.parallel.mesh import cores_of
from rayserve_moe.tools.hlo_report import collectives_of, kernels_of
from tests.compile.topologies import text_of

NUM_EXPERTS, TOP_K, LAYERS = 128, 8, 2
SMALL, LARGE = (2048, 768), (4096, 1536)
"""Model width and expert width of Qwen3-30B-A3B and of 235B-A22B."""


def mesh_of(topology: str, tensor: int = 1) -> Mesh:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    return Mesh(np.asarray(devices).reshape(-1, tensor), ("data", "tensor"))


def push(hidden_TD, slots_TK, gates_TK, *weights, sizes: DispatchSizes):
    held = ExpertWeights(*weights[:3], None, None, None, *weights[3:])
    of_layer = LayerExperts(held, sizes.num_slots, ProductConfig(sizes.num_slots, 8.0))
    return dispatch_experts(hidden_TD, slots_TK, gates_TK, of_layer, sizes=sizes)


@pytest.mark.parametrize(
    ("topology", "tensor", "tokens", "expert", "weight_dtype"),
    [
        ("v6e:2x4", 1, 32, SMALL, "bfloat16"),
        pytest.param("v6e:2x4", 1, 32, SMALL, "int8", marks=pytest.mark.slow),
        pytest.param("v6e:2x4", 1, 32, SMALL, "float8_e4m3fn", marks=pytest.mark.slow),
        pytest.param("v6e:2x4", 1, 32, SMALL, "float8_e4m3fn in blocks", marks=pytest.mark.slow),
        pytest.param("tpu7x:2x2x1", 1, 32, SMALL, "float8_e4m3fn", marks=pytest.mark.slow),
        pytest.param("tpu7x:2x2x1", 1, 32, SMALL, "float8_e4m3fn, rows too", marks=pytest.mark.slow),
        pytest.param("tpu7x:2x2x4", 1, 16, LARGE, "float8_e4m3fn in blocks, rows too", marks=pytest.mark.slow),
        pytest.param("v5p:2x4x4", 1, 32, LARGE, "float8_e4m3fn in blocks", marks=pytest.mark.slow),
        pytest.param("v6e:2x4", 2, 2, SMALL, "bfloat16", marks=pytest.mark.slow),
        pytest.param("v6e:2x4", 1, 128, SMALL, "bfloat16", marks=pytest.mark.slow),
        pytest.param("v5e:2x4", 1, 16, SMALL, "bfloat16", marks=pytest.mark.slow),
        pytest.param("v5e:2x4", 1, 16, SMALL, "int8", marks=pytest.mark.slow),
        pytest.param("tpu7x:2x2x1", 1, 32, SMALL, "bfloat16", marks=pytest.mark.slow),
        pytest.param("tpu7x:2x2x1", 1, 32, SMALL, "int8", marks=pytest.mark.slow),
        pytest.param("v5p:2x2x2", 1, 16, SMALL, "bfloat16", marks=pytest.mark.slow),
        pytest.param("v5p:2x4x4", 2, 1, LARGE, "bfloat16", marks=pytest.mark.slow),
        pytest.param("v5p:2x4x4", 1, 32, LARGE, "bfloat16", marks=pytest.mark.slow),
        pytest.param("v5p:2x4x4", 1, 32, LARGE, "int8", marks=pytest.mark.slow),
        pytest.param("v6e:8x8", 1, 16, LARGE, "bfloat16", marks=pytest.mark.slow),
        pytest.param("tpu7x:2x2x4", 1, 16, LARGE, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_the_experts_of_few_tokens_are_one_kernel(topology, tensor, tokens, expert, weight_dtype):
    """Weights of 8 bits are read as such, scales beside them: neither is copied. Rows of large experts lie in HBM."""
    mesh, parts, (width, inner) = mesh_of(topology, tensor), PartitionSpec(("data", "tensor")), expert
    num_slots, axes = NUM_EXPERTS // mesh.devices.size, tuple(mesh.shape.items())
    weight_dtype, _, narrows_rows = weight_dtype.partition(", ")
    weight_dtype, _, in_blocks = weight_dtype.partition(" ")
    knobs = {"weight_dtype": weight_dtype, "num_cores": cores_of(mesh), "in_blocks": bool(in_blocks)}
    knobs["narrows_rows"] = bool(narrows_rows)
    sizes = DispatchSizes(tokens, TOP_K, width, inner, num_slots, axes, **knobs)
    shapes = [((tokens * sizes.num_ranks, size), dtype) for size, dtype in ((width, "bfloat16"), (TOP_K, "int32"))]
    shapes.append(((tokens * sizes.num_ranks, TOP_K), "float32"))
    shapes += [((LAYERS * NUM_EXPERTS, *shape), dtype) for shape, dtype in sizes.held_weights]
    arguments = [jax.ShapeDtypeStruct(*shape, sharding=NamedSharding(mesh, parts)) for shape in shapes]
    run = jax.shard_map(partial(push, sizes=sizes), mesh=mesh, in_specs=parts, out_specs=parts, check_vma=False)
    with jax.set_mesh(mesh):
        compiled = jax.jit(run).lower(*arguments).compile()
    program = text_of(compiled)
    assert kernels_of(program) == {"low_latency_dispatch": 1} and not list(collectives_of(program))
    rows_in_hbm = sizes.num_cores * sizes.of_core.num_received if sizes.is_streamed else 0
    own_rows = sizes.num_cores * tokens * TOP_K
    row_bytes = width * jnp.dtype("bfloat16").itemsize
    assert compiled.memory_analysis().temp_size_in_bytes < (rows_in_hbm + own_rows) * row_bytes
