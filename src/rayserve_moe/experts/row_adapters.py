"""Adapters of exchanged rows: a rank finds the adapters of the rows that it receives among those of all ranks."""

# T tokens of a chunk   N assignments   R ranks   C rows of a round

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from rayserve_moe.experts.rank_rows import LANES, Runs
from rayserve_moe.kernels.slot_order import SortedAssignments, take


def gather_adapters(
    adapter_T: jax.Array | None, order: SortedAssignments, *, axes: tuple[str, ...]
) -> jax.Array | None:
    """Return the adapter of each assignment of every rank, in the order of its rows, int32 [R, N]; None for None."""
    if adapter_T is None:
        return None
    adapter_N = take(adapter_T, order.token_P)
    # TPUs gather whole lanes, and add up others.
    return jax.lax.all_gather(jnp.pad(adapter_N, (0, -adapter_N.size % LANES)), axes)


def received_adapters(
    adapter_RN: jax.Array | None, received: Runs, place_C: jax.Array | np.ndarray, *, sender_C: jax.Array
) -> jax.Array | None:
    """Return the adapter of each received row, by its sender and its place among all received rows, int32 [C]."""
    if adapter_RN is None:
        return None
    at_sender_C = place_C + (received.at_sender_R - received.at_receiver_R).at[sender_C].get(mode="clip")
    return adapter_RN.at[sender_C, at_sender_C].get(mode="clip")
