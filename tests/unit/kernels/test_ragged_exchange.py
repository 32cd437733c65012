"""The exchange of ragged rows does on CPU devices what its definition says, and refuses what it cannot do."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from rayserve_moe.kernels.ragged_exchange import (
    RaggedSlices,
    by_distance,
    exchange_by_gather,
    ragged_all_to_all,
    teach_cpu,
)
from tests.support.kernels.ragged_exchange import KINDS, exchanged, expected_of, parts_of, random_case

MESHES = [((4,), ("ranks",)), ((8,), ("ranks",)), ((4, 2), ("data", "tensor"))]
NUM_CASES = 200


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    return Mesh(np.asarray(jax.devices()[: np.prod(shape)]).reshape(shape), names)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("mesh", "num_slices"), [*((mesh, 1) for mesh in MESHES), (MESHES[0], 2), (MESHES[1], 4), (MESHES[2], 2)], ids=str
)
def test_it_is_what_the_numpy_model_says(mesh, num_slices):
    mesh = mesh_of(*mesh)
    run = exchanged(mesh, num_slices=num_slices)
    for seed in range(NUM_CASES):
        case = random_case(KINDS[seed % len(KINDS)], mesh.size, seed)
        np.testing.assert_array_equal(np.asarray(run(*parts_of(case))), expected_of(case))


def test_cases_cover_what_is_hard():
    cases = [random_case(KINDS[seed % len(KINDS)], 8, seed) for seed in range(NUM_CASES)]
    assert any((case.send_sizes == 0).all(axis=1).any() for case in cases), "a rank that sends nothing"
    assert any((np.diff(case.output_offsets[:, 0]) < 0).any() for case in cases), "senders out of order"
    assert any(case.send_sizes.sum(axis=0).min() < case.output.shape[1] for case in cases), "holes"


def test_it_runs_where_variance_over_axes_is_not_tracked():
    case = random_case(KINDS[0], 4, 1)
    found = exchanged(mesh_of((4,), ("ranks",)), check_vma=False)(*parts_of(case))
    np.testing.assert_array_equal(np.asarray(found), expected_of(case))


def test_a_peer_may_get_several_slices():
    """Two slices for each of two ranks, in the primitive's own terms."""
    mesh = mesh_of((2,), ("ranks",))
    operand = np.arange(8, dtype=np.float32).reshape(2, 4)
    sizes = np.array([[1, 1, 1, 1], [1, 1, 2, 0]], np.int32)
    sources = np.array([[3, 2, 1, 0], [0, 1, 2, 0]], np.int32)
    places = np.array([[0, 1, 5, 4], [3, 5, 0, 0]], np.int32)
    received = np.array([[1, 1, 1, 1], [1, 1, 2, 0]], np.int32)

    def on_device(*parts):
        return exchange_by_gather(*(part[0] for part in parts), axis_name="ranks")[None]

    split = PartitionSpec("ranks")
    run = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=split, out_specs=split))
    found = run(operand, np.full((2, 6), -1, np.float32), sources, sizes, places, received)
    np.testing.assert_array_equal(found, [[3, 2, -1, 4, -1, 5], [6, 7, -1, -1, 0, 1]])


def test_between_slices_nothing_goes_to_the_own():
    """Of each rank's rows for each rank: within and between slices they are all there, each of them once."""
    mesh, sizes = mesh_of((8,), ("ranks",)), np.arange(1, 65, dtype=np.int32).reshape(8, 8)

    def on_device(of_rank):
        rows = RaggedSlices(*[of_rank[0]] * 4)
        near, far = by_distance(rows, axis_name="ranks", num_slices=2)
        return near.send_sizes_R[None], far.send_sizes_R[None], far.recv_sizes_R[None]

    split = PartitionSpec("ranks")
    near, far, received = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=split, out_specs=split))(sizes)
    own = np.arange(8)[:, None] // 4 == np.arange(8) // 4
    np.testing.assert_array_equal(near, sizes[own].reshape(8, 4))
    np.testing.assert_array_equal(far, np.where(own, 0, sizes))
    np.testing.assert_array_equal(received, far)


def test_a_jax_without_the_primitive_is_named():
    with pytest.raises(RuntimeError, match=f"jax {jax.__version__} has no .*ragged_all_to_all_p.*install jax"):
        teach_cpu(None)


def test_it_is_for_sharded_functions():
    with pytest.raises(NameError):
        jax.jit(lambda x: ragged_all_to_all(x, x, (x, x, x, x), axis_name="ranks"))(np.zeros(2, np.int32))
