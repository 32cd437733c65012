"""Random ragged exchanges and what a numpy model says of them; run as a program, one of two processes over gloo."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rayserve_moe.kernels.ragged_exchange import RaggedSlices, ragged_all_to_all
from rayserve_moe.parallel.mesh import use_cpu_devices
from tests.support.cluster.process_groups import join_hosts, leave_hosts

KINDS = [
    ("float32", (3,), 40, 30),
    ("bfloat16", (8,), 17, 50),
    ("int8", (5,), 64, 64),
    ("float32", (2, 3), 9, 33),
    ("int32", (), 25, 1),
]
"""Dtype, shape of a row, rows of the operand, rows of the output."""


@dataclass(frozen=True)
class RaggedCase:
    """Operands [R, N, ...] and outputs [R, M, ...] of all ranks, and slices [R, R]: sender first."""

    operand: np.ndarray
    output: np.ndarray
    input_offsets: np.ndarray
    send_sizes: np.ndarray
    output_offsets: np.ndarray


def random_case(kind: tuple, num_ranks: int, seed: int) -> RaggedCase:
    """Random sizes, many of them zero; at each receiver the senders' rows lie in any order, with holes between."""
    dtype, row, num_rows, num_out = kind
    generator = np.random.default_rng(seed)
    values = generator.integers(-100, 100, (num_ranks, num_rows, *row))
    sizes = np.zeros((num_ranks, num_ranks), np.int32)
    places = np.zeros_like(sizes)
    for receiver in range(num_ranks):
        cuts = np.sort(generator.integers(0, num_out + 1, 2 * num_ranks)).reshape(num_ranks, 2)
        for sender, (begin, end) in zip(generator.permutation(num_ranks), cuts, strict=True):
            places[sender, receiver] = begin
            sizes[sender, receiver] = min(end - begin, num_rows) * (generator.random() < 0.7)
    sources = (generator.random(sizes.shape) * (num_rows - sizes + 1)).astype(np.int32)
    output = np.full((num_ranks, num_out, *row), 7)
    return RaggedCase(values.astype(jnp.dtype(dtype)), output.astype(jnp.dtype(dtype)), sources, sizes, places)


def expected_of(case: RaggedCase) -> np.ndarray:
    """Return the rows that every rank has after the exchange, by row range."""
    out = case.output.copy()
    for sender, receiver in np.ndindex(case.send_sizes.shape):
        size, source = case.send_sizes[sender, receiver], case.input_offsets[sender, receiver]
        place = case.output_offsets[sender, receiver]
        out[receiver, place : place + size] = case.operand[sender, source : source + size]
    return out


def exchanged(mesh: Mesh, check_vma: bool = True, num_slices: int = 1):
    """The exchange over all axes of `mesh`, compiled: takes the parts of a case, ranks first."""
    axes = mesh.axis_names

    def on_device(operand, output, *slices):
        rows = RaggedSlices(*(s[0] for s in slices))
        return ragged_all_to_all(operand[0], output[0], rows, axis_name=axes, num_slices=num_slices)[None]

    split = PartitionSpec(axes)
    return jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=split, out_specs=split, check_vma=check_vma))


def parts_of(case: RaggedCase) -> tuple[np.ndarray, ...]:
    """Arguments of `exchanged`."""
    slices = case.input_offsets, case.send_sizes, case.output_offsets, case.send_sizes.T
    return case.operand, case.output, *slices


def check_over_processes(coordinator: str, process: int, num_processes: int, *, num_cases: int) -> None:
    """In each of several processes with two devices: every shard that lies here is what the model says."""
    use_cpu_devices(2)
    join_hosts(coordinator, num_hosts=num_processes, host_id=process)
    mesh = Mesh(np.asarray(jax.devices()).reshape(num_processes, 2), ("data", "tensor"))
    split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    run = exchanged(mesh)
    for seed in range(num_cases):
        case = random_case(KINDS[seed % len(KINDS)], mesh.size, seed)
        found = run(*(jax.make_array_from_callback(p.shape, split, p.__getitem__) for p in parts_of(case)))
        for shard in found.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), expected_of(case)[shard.index])
    leave_hosts()


if __name__ == "__main__":
    check_over_processes(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), num_cases=int(sys.argv[4]))
