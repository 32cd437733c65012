"""Sizes, arguments and buffers of the kernel of gated delta layers (`delta_rule`)."""

# T tokens   V visits   H value heads   K key heads   C tokens of a chunk   P places of decays   N buffers
# X heads of C tokens   d key width   v value width   W channels of a key head   B block of a token   G gates   Q sums
# S sides of writes

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.kernels.reference.gated_delta import CHUNK, DeltaPools
from rayserve_moe.kernels.tpu.packed_rows import LANES

NUM_BUFFERS = 3
"""Visits whose states and rings are in the core's memory: one is computed and two arrive."""


@dataclass(frozen=True)
class VisitShape:
    """Static sizes of a call."""

    num_heads: int
    num_key_heads: int
    num_tokens: int
    num_cores: int
    dtype: jax.typing.DTypeLike
    """Holds queries and keys exactly."""
    num_before: int
    """Inputs of the convolution in an entry."""

    @property
    def heads_of_key(self) -> int:
        """Return the number of value heads that read a key head."""
        return self.num_heads // self.num_key_heads


class TokenScalars(NamedTuple):
    """Scalars of tokens in the core's scalar memory, int32 [T] unless noted."""

    position_T: Any
    row_T: Any
    source_T: Any
    """The entry to read."""
    own_T: Any
    """The entry to write with a fold."""
    folds_T: Any
    visit_T: Any
    """Number of the visit; -1 for padding."""
    ends_T: Any
    """1 for the last token of a visit."""
    starts_V: Any
    """First token of each visit, in order; the number of tokens behind the last visit."""
    layer_X: Any
    """First entry and first row of the layer."""


class TokenRefs(NamedTuple):
    """Inputs of a token, in a block of its own."""

    queries_BKd: Any
    keys_BKd: Any
    values_BHv: Any
    gates_BGH: Any
    """Logarithms of decays, and beta."""
    inputs_TKW: Any
    """Inputs of the convolution of all tokens, in HBM."""


class DeltaScratch(NamedTuple):
    """Buffers of a core: of visits, of a token, and of its writes."""

    state_NHdv: Any
    keys_NXd: Any
    fresh_NXv: Any
    keys_KCd: Any
    fresh_HCv: Any
    """Rings of the visit that is computed, by heads."""
    decay_NHP: Any
    weights_HP: Any
    """Decays of the tokens of a ring up to the token, or up to the end of the chunk."""
    sums_QHv: Any
    """Products of each head: key and query with the state, key and query with the ring, and query with key."""
    new_keys_SKd: Any
    new_fresh_SHv: Any
    new_decay_SHP: Any
    out_SHv: Any
    num_done: Any
    """Number of tokens, and of visits, whose writes the core has begun."""


class DeltaSemaphores(NamedTuple):
    """Semaphores of a core's copies."""

    arrived_N: Any
    """Signals that the copies into a buffer of a visit have arrived."""
    written_S: Any
    """Signals that the writes of a token have ended."""
    ended_S: Any
    """Signals that the writes of a visit have ended."""
    folded: Any
    """Signals that an entry is written."""


class Call(NamedTuple):
    """Everything that a token's computation reads and writes.

    `pools` are the pools of all layers in HBM; heads of a ring's tokens follow each other, [R, C * heads, width].
    """

    scalars: TokenScalars
    given: TokenRefs
    out_THv: Any
    pools: DeltaPools
    scratch: DeltaScratch
    semaphores: DeltaSemaphores
    shape: VisitShape


def scratch_of(shape: VisitShape) -> tuple[DeltaScratch, DeltaSemaphores]:
    """Return the buffers and semaphores of a core."""
    heads, key_heads, wide = shape.num_heads, shape.num_key_heads, (LANES,)

    def vmem(*dims: int) -> Any:
        return pltpu.VMEM(dims, jnp.float32)

    buffers = DeltaScratch(
        vmem(NUM_BUFFERS, heads, LANES, LANES),
        vmem(NUM_BUFFERS, CHUNK * key_heads, *wide),
        vmem(NUM_BUFFERS, CHUNK * heads, *wide),
        vmem(key_heads, CHUNK, *wide),
        vmem(heads, CHUNK, *wide),
        vmem(NUM_BUFFERS, heads, *wide),
        vmem(heads, *wide),
        vmem(5, heads, *wide),
        vmem(2, key_heads, *wide),
        vmem(2, heads, *wide),
        vmem(2, heads, *wide),
        vmem(2, heads, *wide),
        pltpu.SMEM((2,), jnp.int32),
    )
    semaphore = pltpu.SemaphoreType.DMA
    return buffers, DeltaSemaphores(semaphore((NUM_BUFFERS,)), semaphore((2,)), semaphore((2,)), semaphore)
