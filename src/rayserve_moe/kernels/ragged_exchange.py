"""Rows to any rank in any number: `ragged_all_to_all`, with the same meaning on every platform.

TPUs have the operation. Across slices it hands its whole operand to the host, rows for the own slice included, so rows
within a slice are exchanged separately. XLA:CPU has no such operation: there it is built from a gather of all rows,
which is exact, costs ranks times rows, and is meant for tests and small groups.
"""

# R ranks   N rows of the operand   M rows of the output   C slices per peer   B rows sent
# Z slices addressed to this rank = R * C

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# The primitive has no public name; the lowering for CPU needs it.
from jax._src.lax import parallel as jax_collectives
from jax.extend.core import Primitive
from jax.interpreters import mlir

PRIMITIVE = "ragged_all_to_all_p"

COMPILER_OPTIONS_OF_PLATFORM: dict[str, dict[str, str | bool]] = {
    "tpu": {
        "xla_tpu_enable_async_ragged_all_to_all": "true",
        "xla_tpu_control_large_2nd_minor_layout_for_x16": "false",
    },
    "gpu": {
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,COLLECTIVES,WHILE,CONDITIONAL",
    },
}
"""TPUs: the first lets an exchange run while other work does; without it an exchange blocks. The second keeps the
weights of a grouped product in the layout they arrive in: tpu7x copies all of them in every step otherwise.

GPUs: loops and conditionals are part of a graph. By default a call blocks until the last of them is decided, which is
nearly the whole step.
"""

MATMUL_PRECISION_OF_PLATFORM = {"gpu": "highest"}
"""Default precision of products in jax's words, if it is not jax's own. By default GPUs multiply float32 as TF32, which
keeps 10 bits: a few routed rows in a thousand differ then. It does not change products of bfloat16."""


class RaggedSlices(NamedTuple):
    """Rows to send and to receive: int32, an entry per rank, or the same number of entries for each.

    Rows `input_offsets_R[r]` and on, `send_sizes_R[r]` of them, go to rank r, which finds them in its output from
    `output_offsets_R[r]` on, a place at the receiver. From rank r come `recv_sizes_R[r]` rows.
    """

    input_offsets_R: jax.Array
    send_sizes_R: jax.Array
    output_offsets_R: jax.Array
    recv_sizes_R: jax.Array


Groups = tuple[tuple[int, ...], ...]
"""Ranks by group; groups have equal sizes."""


def ragged_all_to_all(
    operand: jax.Array,
    output: jax.Array,
    slices: RaggedSlices,
    *,
    axis_name: str | tuple[str, ...],
    num_slices: int = 1,
    rows_sent: int | None = None,
) -> jax.Array:
    """Send rows of `operand` [N, ...] to every rank and return `output` [M, ...] with the received rows written in.

    Rows of `output` that are not received do not change. The ranks lie over `num_slices` in order. `rows_sent` is the
    maximum number of single rows; they are copied together, because exchanges between CPU devices and between slices
    move their whole operand. Call it inside a sharded function over `axis_name`, with numbers that agree between sender
    and receiver.

    Raises: RuntimeError if jax does not have the primitive for the exchange on CPU.
    """
    teach_cpu(getattr(jax_collectives, PRIMITIVE, None))
    exchange = partial(jax.lax.ragged_all_to_all, axis_name=axis_name)
    if num_slices > 1:
        near, slices = by_distance(slices, axis_name=axis_name, num_slices=num_slices)
        groups = np.arange(jax.lax.axis_size(axis_name)).reshape(num_slices, -1).tolist()
        output = exchange(operand, output, *near, axis_index_groups=tuple(map(tuple, groups)))
    if rows_sent is not None:
        operand, slices = _packed(operand, slices, most=rows_sent)
    return exchange(operand, output, *slices)


def by_distance(
    slices: RaggedSlices, *, axis_name: str | tuple[str, ...], num_slices: int
) -> tuple[RaggedSlices, RaggedSlices]:
    """Return the slices for ranks of the own slice, and the slices for all ranks without rows for the own slice.

    Call it inside a sharded function over `axis_name`.
    """
    per_slice = len(slices.send_sizes_R) // num_slices
    own = jax.lax.axis_index(axis_name) // (jax.lax.axis_size(axis_name) // num_slices)
    near = RaggedSlices(*(jax.lax.dynamic_slice_in_dim(part, own * per_slice, per_slice) for part in slices))
    is_far_R = np.arange(len(slices.send_sizes_R)) // per_slice != own
    sent_R, received_R = (jnp.where(is_far_R, sizes_R, 0) for sizes_R in (slices.send_sizes_R, slices.recv_sizes_R))
    return near, slices._replace(send_sizes_R=sent_R, recv_sizes_R=received_R)


def _packed(operand: jax.Array, slices: RaggedSlices, *, most: int) -> tuple[jax.Array, RaggedSlices]:
    """Copy the rows that this rank sends to adjacent places, at most `most`; only these are exchanged."""
    is_sent_R = slices.send_sizes_R > 0
    (sent_B,) = jnp.nonzero(is_sent_R, size=most, fill_value=0)
    place_R = jnp.maximum(jnp.cumsum(is_sent_R, dtype=jnp.int32) - 1, 0)
    return operand[slices.input_offsets_R[sent_B]], slices._replace(input_offsets_R=place_R)


@cache
def teach_cpu(primitive: Primitive | None) -> None:
    """Register the CPU lowering of `primitive`, once per process; RuntimeError if jax does not have it."""
    if primitive is None:
        raise RuntimeError(
            f"jax {jax.__version__} has no jax._src.lax.parallel.{PRIMITIVE}, which the exchange of rows between CPU "
            "devices builds on; install jax 0.10.2"
        )
    lowering = mlir.lower_fun(exchange_by_gather, multiple_results=False)
    mlir.register_lowering(primitive, lowering, platform="cpu")


def exchange_by_gather(
    operand: jax.Array,
    output: jax.Array,
    *slices: jax.Array,
    axis_name: str | tuple[str, ...],
    axis_index_groups: Groups | None = None,
) -> jax.Array:
    """Exchange rows by operations that every platform has; parameters are as for the primitive."""
    gather = partial(jax.lax.all_gather, axis_name=axis_name, axis_index_groups=axis_index_groups)
    *from_sender, _ = (part.astype(jnp.int32) for part in slices)
    groups = axis_index_groups or (tuple(range(jax.lax.axis_size(axis_name))),)
    per_peer = from_sender[0].shape[0] // len(groups[0])
    place_R = np.argsort(np.concatenate(groups)) % len(groups[0])
    me = jnp.asarray(place_R, jnp.int32)[jax.lax.axis_index(axis_name)]
    slices_R3Z = gather(jnp.stack(from_sender))
    mine_R3C = jax.lax.dynamic_slice_in_dim(slices_R3Z, me * per_peer, per_peer, axis=2)
    source_Z, size_Z, place_Z = mine_R3C.transpose(1, 0, 2).reshape(3, -1)
    rows_M = jnp.arange(output.shape[0], dtype=jnp.int32)
    covered_ZM = (rows_M >= place_Z[:, None]) & (rows_M < (place_Z + size_Z)[:, None])
    slice_M = jnp.argmax(covered_ZM, axis=0)
    row_M = jnp.clip(source_Z[slice_M] + rows_M - place_Z[slice_M], 0, operand.shape[0] - 1)
    received = gather(operand)[slice_M // per_peer, row_M]
    written_M = covered_ZM.any(axis=0).reshape(-1, *[1] * (output.ndim - 1))
    return jnp.where(written_M, received, output)
