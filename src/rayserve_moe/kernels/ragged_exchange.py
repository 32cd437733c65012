"""Rows to any rank in any number: `ragged_all_to_all`, with one meaning on every platform.

TPUs have the operation. XLA:CPU has not, so there it is built from a gather of all rows: exact, and as costly
as ranks times rows, which is meant for tests and small groups.
"""

# R ranks   N rows of the operand   M rows of the output   C slices per peer   Z slices addressed to this rank = R * C

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

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
}
"""The first lets an exchange run while other work does; without it an exchange blocks. The second keeps the weights of
a grouped product in the layout they arrive in: tpu7x copies all of them in every step otherwise."""


class RaggedSlices(NamedTuple):
    """Which rows go where: int32, one entry per rank, or the same number of entries for each.

    Rows `input_offsets_R[r]` and on, `send_sizes_R[r]` of them, go to rank r, which finds them in its output from
    `output_offsets_R[r]` on, a place at the receiver. From rank r come `recv_sizes_R[r]` rows.
    """

    input_offsets_R: jax.Array
    send_sizes_R: jax.Array
    output_offsets_R: jax.Array
    recv_sizes_R: jax.Array


def ragged_all_to_all(
    operand: jax.Array, output: jax.Array, slices: RaggedSlices, *, axis_name: str | tuple[str, ...]
) -> jax.Array:
    """Send rows of `operand` [N, ...] to every rank and return `output` [M, ...] with the received rows written in.

    Rows of `output` that are not received stay as they are. Call it inside a sharded function over `axis_name`, with
    numbers that agree between sender and receiver. RuntimeError where jax lacks what the exchange on CPU builds on.
    """
    teach_cpu(getattr(jax_collectives, PRIMITIVE, None))
    return jax.lax.ragged_all_to_all(operand, output, *slices, axis_name=axis_name)


@cache
def teach_cpu(primitive: Primitive | None) -> None:
    """Register the CPU lowering of `primitive`, once per process. RuntimeError where this jax does not have it."""
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
    axis_index_groups: object = None,
) -> jax.Array:
    """The same exchange from operations that every platform has; parameters are those of the primitive."""
    if axis_index_groups is not None:
        raise NotImplementedError("groups of ranks are not supported in the exchange of rows between CPU devices")
    gather = partial(jax.lax.all_gather, axis_name=axis_name)
    *from_sender, _ = (part.astype(jnp.int32) for part in slices)
    per_peer = from_sender[0].shape[0] // jax.lax.axis_size(axis_name)
    slices_R3Z = gather(jnp.stack(from_sender))
    mine_R3C = jax.lax.dynamic_slice_in_dim(slices_R3Z, jax.lax.axis_index(axis_name) * per_peer, per_peer, axis=2)
    source_Z, size_Z, place_Z = mine_R3C.transpose(1, 0, 2).reshape(3, -1)
    rows_M = jnp.arange(output.shape[0], dtype=jnp.int32)
    covered_ZM = (rows_M >= place_Z[:, None]) & (rows_M < (place_Z + size_Z)[:, None])
    slice_M = jnp.argmax(covered_ZM, axis=0)
    row_M = jnp.clip(source_Z[slice_M] + rows_M - place_Z[slice_M], 0, operand.shape[0] - 1)
    received = gather(operand)[slice_M // per_peer, row_M]
    written_M = covered_ZM.any(axis=0).reshape(-1, *[1] * (output.ndim - 1))
    return jnp.where(written_M, received, output)
