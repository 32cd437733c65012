"""Sizes, arguments and buffers of the kernel of gated delta layers (`delta_rule`)."""

# T tokens   P pieces   V visits   N tokens of a piece   K key heads   C tokens of a chunk
# H value heads   G blocks: LANES of values, of one head or several   L places of decays
# M heads along lanes   B buffers of visits   d key width   v value width
# W channels of a key head   S sides of writes

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.kernels.reference.gated_delta import CHUNK, PIECE, DeltaPools
from rayserve_moe.kernels.tpu.packed_rows import LANES

NUM_BUFFERS = 3
"""Visits whose states and rings are in the core's memory: one is computed and two arrive."""


@dataclass(frozen=True)
class VisitShape:
    """Static sizes of a call."""

    num_heads: int
    num_key_heads: int
    num_pieces: int
    num_cores: int
    dtype: jax.typing.DTypeLike
    """Holds queries and keys exactly."""
    num_before: int
    """Inputs of the convolution in an entry."""
    by_element: bool = False
    """True for a decay per element of a key."""
    delta: bool = True
    """False for Mamba-2: fresh values are `beta * v`, without the delta rule."""
    heads_of_block: int = 1
    """Heads whose values lie side by side in LANES; 1 with the delta rule."""

    @property
    def heads_of_key(self) -> int:
        """Return the number of value heads that read a key head."""
        return self.num_heads // self.num_key_heads

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks: rows of LANES values."""
        return self.num_heads // self.heads_of_block


class PieceScalars(NamedTuple):
    """Scalars of pieces in the core's scalar memory, int32 [P] unless noted."""

    start_P: Any
    """Position of the piece, a multiple of PIECE."""
    known_P: Any
    """Number of its tokens that are in the ring already."""
    count_P: Any
    """Number of new tokens; 0 for padding."""
    token_P: Any
    """Index of the first new token."""
    row_P: Any
    source_P: Any
    """The entry to read."""
    own_P: Any
    """The entry to write with a fold."""
    folds_P: Any
    visit_P: Any
    """Number of the visit; -1 for padding."""
    ends_P: Any
    """1 for the last piece of a visit."""
    starts_V: Any
    """First piece of each visit, in order; the number of pieces behind the last visit."""
    layer_X: Any
    """First entry and first row of the layer."""


class PieceRefs(NamedTuple):
    """Inputs of the tokens of a piece, in a block of their own; those of other tokens stand in place of known ones."""

    queries_NKd: Any
    keys_NKd: Any
    values_NGv: Any
    decays_N: Any
    """Logarithms of decays: [N, 1, M] with zeros behind the last head, or [N, H, d] by element."""
    beta_N1M: Any
    inputs_TKW: Any
    """Inputs of the convolution of all tokens, in HBM."""


class DeltaScratch(NamedTuple):
    """Buffers of a core: of visits, of a piece, and of its writes."""

    state_BGdv: Any
    keys_BCKd: Any
    fresh_BCGv: Any
    decay_B: Any
    """Sums of decays: [B, H, L], or [B, C, H, d] by element."""
    keys_KCd: Any
    fresh_GCv: Any
    decay_by_head: Any
    """Rings of the visit that is computed, by heads. Sums of decays have heads along lanes, [C, M], or are [H, C, d] by
    element."""
    queries_KNd: Any
    values_GNv: Any
    out_GNv: Any
    """Tokens of the piece, by heads."""
    reach_HL: Any
    """Sums of decays as `[ring | piece]`; used with the delta rule and a decay per head."""
    new_keys_SNKd: Any
    new_fresh_SNGv: Any
    new_decay_S: Any
    """Sums of decays of a visit, [S, H, L], or of a piece by element, [S, N, H, d]."""
    out_SNGv: Any
    num_done: Any
    """Number of pieces, and of visits, whose writes the core has begun, and tokens of the last pieces of both sides."""


class DeltaSemaphores(NamedTuple):
    """Semaphores of a core's copies."""

    arrived_B: Any
    """Signals that the copies into a buffer of a visit have arrived."""
    written_S: Any
    """Signals that the writes of a piece have ended."""
    ended_S: Any
    """Signals that the writes of a visit have ended."""
    folded: Any
    """Signals that an entry is written."""


class Call(NamedTuple):
    """Everything that a piece's computation reads and writes; `pools` are those of all layers in HBM."""

    scalars: PieceScalars
    given: PieceRefs
    out_THv: Any
    pools: DeltaPools
    scratch: DeltaScratch
    semaphores: DeltaSemaphores
    shape: VisitShape


def scratch_of(shape: VisitShape) -> tuple[DeltaScratch, DeltaSemaphores]:
    """Return the buffers and semaphores of a core."""
    heads, blocks, key_heads, wide = shape.num_heads, shape.num_blocks, shape.num_key_heads, (LANES,)

    def vmem(*dims: int) -> Any:
        return pltpu.VMEM(dims, jnp.float32)

    buffers = DeltaScratch(
        vmem(NUM_BUFFERS, blocks, LANES, LANES),
        vmem(NUM_BUFFERS, CHUNK, key_heads, *wide),
        vmem(NUM_BUFFERS, CHUNK, blocks, *wide),
        vmem(NUM_BUFFERS, *((CHUNK, heads) if shape.by_element else (heads,)), *wide),
        vmem(key_heads, CHUNK, *wide),
        vmem(blocks, CHUNK, *wide),
        vmem(*((heads, CHUNK) if shape.by_element else (LANES,)), *wide),
        vmem(key_heads, PIECE, *wide),
        vmem(blocks, PIECE, *wide),
        vmem(blocks, PIECE, *wide),
        vmem(heads, *wide),
        vmem(2, PIECE, key_heads, *wide),
        vmem(2, PIECE, blocks, *wide),
        vmem(2, *((PIECE, heads) if shape.by_element else (heads,)), *wide),
        vmem(2, PIECE, blocks, *wide),
        pltpu.SMEM((4,), jnp.int32),
    )
    semaphore = pltpu.SemaphoreType.DMA
    return buffers, DeltaSemaphores(semaphore((NUM_BUFFERS,)), semaphore((2,)), semaphore((2,)), semaphore)
