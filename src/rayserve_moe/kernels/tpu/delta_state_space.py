"""Products of a piece of a Mamba-2 layer with its state and its ring, and the fold of a ring (`delta_rule`).

Without the delta rule, no token of a piece waits for another one: its own value joins the ring before the products. A
query then sees the ring up to its own place, and one product adds up earlier tokens and those of the piece.

Heads with values narrower than the lanes lie side by side in a block. They share the products with state and ring, and
each takes its own lanes of the results.
"""

# N tokens of a piece   C tokens of a chunk   d key width   v width of a block   K key heads   M heads along lanes
# G blocks: LANES of values, of one head or several   B buffers of visits   L places of a ring, then the state
# Y rows of all heads of a block: heads * N

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from rayserve_moe.kernels.reference.gated_delta import CHUNK, PIECE
from rayserve_moe.kernels.tpu.delta_call import Call, VisitShape
from rayserve_moe.kernels.tpu.delta_products import (
    by_keys,
    by_pairs,
    by_states,
    dot,
    fold_weights,
    iota,
    lanes_of_group,
)
from rayserve_moe.kernels.tpu.packed_rows import LANES

MAX_BLOCKS, MAX_FOLDED = 16, 8
"""Maximum number of blocks whose products overlap, in a piece and in a fold."""


class _Group(NamedTuple):
    """Blocks whose products overlap."""

    blocks: list[jax.Array]
    key_heads: list[jax.Array]
    """Key heads of the blocks; each serves `blocks_of_key` of them, in order."""

    @property
    def blocks_of_key(self) -> int:
        """Return the number of its blocks that read a key head."""
        return len(self.blocks) // len(self.key_heads)


def multiply(
    call: Call, buffer: jax.Array, place: tuple[jax.Array, jax.Array], decays: tuple[jax.Array, jax.Array]
) -> None:
    """Compute outputs and fresh values of a piece, by blocks; arguments as for `delta_products.multiply`."""
    size = _group_size(call.shape, MAX_BLOCKS)
    num_heads = size * call.shape.heads_of_block

    def of_group(number: jax.Array, carry: None) -> None:
        total_NM, beta_NM = (lanes_of_group(each, number, num_heads) for each in decays)
        _multiply_group(call, buffer, _group_of(call.shape, number, size), (*place, total_NM, beta_NM))

    jax.lax.fori_loop(0, call.shape.num_blocks // size, of_group, None)


def _group_size(shape: VisitShape, max_blocks: int) -> int:
    """Return the number of blocks of a group: whole key heads, or a part of one."""
    of_key = shape.num_blocks // shape.num_key_heads
    sizes = (size for size in range(1, max_blocks + 1) if shape.num_blocks % size == 0)
    return max(size for size in sizes if size % of_key == 0 or of_key % size == 0)


def _group_of(shape: VisitShape, number: jax.Array, size: int) -> _Group:
    of_key = shape.num_blocks // shape.num_key_heads
    first = number * size
    key_heads = [jax.lax.div(first, of_key) + each for each in range(max(1, size // of_key))]
    return _Group([first + each for each in range(size)], key_heads)


def _multiply_group(
    call: Call, buffer: jax.Array, group: _Group, piece: tuple[jax.Array, jax.Array, jax.Array, jax.Array]
) -> None:
    """Compute a group; each step is taken for all of its blocks, so that their chains of sums overlap.

    `piece` are its place in the ring, the number of its known tokens, and the sums of decays and the betas of the
    group's heads.
    """
    scratch, shape, (start, known, total_NM, beta_NM) = call.scratch, call.shape, piece
    tile, is_known_N1 = pl.ds(start, PIECE), iota((PIECE, 1), 0) < known
    is_seen_NC, is_reached_C1 = _seen(start), iota((CHUNK, 1), 0) < start + PIECE
    by_lanes, to_state_NM = partial(_by_lanes, shape=shape), jnp.exp(total_NM)
    for number, block in enumerate(group.blocks):
        fresh_Nv = by_lanes(beta_NM, number) * scratch.values_GNv[block]
        scratch.fresh_GCv[block, tile, :] = jnp.where(is_known_N1, scratch.fresh_GCv[block, tile, :], fresh_Nv)
    of_states, weights = [], []
    for number, key_head in enumerate(group.key_heads):
        queries_Nd, keys_Cd = scratch.queries_KNd[key_head].astype(shape.dtype), scratch.keys_KCd[key_head]
        scores_NC = dot(queries_Nd, keys_Cd.astype(shape.dtype), (1, 1))
        of_key = range(number * group.blocks_of_key, (number + 1) * group.blocks_of_key)
        of_states += by_states(queries_Nd, [scratch.state_BGdv[buffer, group.blocks[each]] for each in of_key])
        for each in of_key:
            lanes = range(each * shape.heads_of_block, (each + 1) * shape.heads_of_block)
            first_head = group.blocks[each] * shape.heads_of_block
            of_heads = []
            for ahead, lane in enumerate(lanes):
                reach_C = scratch.decay_B[buffer, pl.ds(first_head + ahead, 1), :][:, :CHUNK]
                decayed_NC = scores_NC * jnp.exp(total_NM[:, lane : lane + 1] - reach_C)
                of_heads.append(jnp.where(is_seen_NC, decayed_NC, 0.0))
            weights.append(jnp.concatenate(of_heads))
    rings = [jnp.where(is_reached_C1, scratch.fresh_GCv[block], 0.0) for block in group.blocks]
    for number, (block, of_ring_Yv) in enumerate(zip(group.blocks, by_pairs(weights, rings, shape.dtype), strict=True)):
        of_ring_Nv = _own_lanes(jnp.split(of_ring_Yv, shape.heads_of_block), shape)
        scratch.out_GNv[block] = by_lanes(to_state_NM, number) * of_states[number] + of_ring_Nv


def _seen(start: jax.Array) -> jax.Array:
    """Return True for the places of the ring that a token sees, [N, C]: up to its own."""
    return iota((1, CHUNK), 1) <= start + iota((PIECE, 1), 0)


def _by_lanes(columns_NM: jax.Array, number: int, *, shape: VisitShape) -> jax.Array:
    """Return the columns of the heads of a block of a group, each repeated over its head's lanes."""
    first = number * shape.heads_of_block
    heads = range(first, first + shape.heads_of_block)
    return _own_lanes([columns_NM[:, head : head + 1] for head in heads], shape)


def _own_lanes(of_heads: list[Any], shape: VisitShape) -> jax.Array:
    """Merge rows of a block: lanes of head i come from `of_heads[i]`."""
    width, lane_v = LANES // shape.heads_of_block, iota((1, LANES), 1)
    found = jnp.broadcast_to(of_heads[0], (len(of_heads[0]), LANES))
    for head, rows in enumerate(of_heads[1:], start=1):
        found = jnp.where(lane_v < head * width, found, rows)
    return found


def fold(call: Call, buffer: jax.Array) -> None:
    """Replace the state of a visit by the state after its full ring."""
    scratch, shape = call.scratch, call.shape
    weights_LM = fold_weights(scratch.decay_B[buffer])
    size = _group_size(shape, MAX_FOLDED)
    by_lanes = partial(_by_lanes, shape=shape)

    def fold_group(number: jax.Array, carry: None) -> None:
        # All blocks of a group are read before any is written, so that their sums overlap.
        columns_LM = lanes_of_group(weights_LM, number, size * shape.heads_of_block)
        group = _group_of(shape, number, size)
        fresh = [
            scratch.fresh_GCv[block] * by_lanes(columns_LM[:CHUNK], each) for each, block in enumerate(group.blocks)
        ]
        added = [
            part
            for each, key_head in enumerate(group.key_heads)
            for part in by_keys(
                scratch.keys_KCd[key_head],
                fresh[each * group.blocks_of_key :][: group.blocks_of_key],
                shape.dtype,
            )
        ]
        folded = [
            scratch.state_BGdv[buffer, block] * by_lanes(columns_LM[CHUNK : CHUNK + 1], each) + added[each]
            for each, block in enumerate(group.blocks)
        ]
        for block, state_dv in zip(group.blocks, folded, strict=True):
            scratch.state_BGdv[buffer, block] = state_dv

    jax.lax.fori_loop(0, shape.num_blocks // size, fold_group, None)
