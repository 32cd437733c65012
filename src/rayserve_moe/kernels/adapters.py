"""Low-rank adapters beside the products of a layer: s B (A x) for the tokens of several adapters at once.

The adapters of a step lie side by side along their rank, so that A is one product and B another, whatever their number.
Between the two, each token keeps the ranks of its own adapter; the other ranks are zero. Zeros add nothing to a sum, so
a token's result depends neither on the other adapters nor on their order, and tokens without an adapter keep the bits
of the base model.
"""

# T tokens   L layers   S resident adapters   N adapters of a step   R rank   I inputs   O outputs   A heads
# n width without position   C latent   v value width   X layers * expert slots
# P expert slots of a layer   Q = S * R   C ranks beside a token, in whole lanes   Y = D + C

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

LANES = 128
MATRIX_UNIT = 256
"""Rows and columns of the matrix unit of a TPU (v6e)."""
COPY_MOVES = 3
"""Number of times that copied bytes cross HBM: read, written and read again."""


class AdapterPair(NamedTuple):
    """Matrices of all resident adapters for a parameter; the scale of an adapter is part of its B."""

    a_LSRI: jax.Array
    b_LSRO: jax.Array


class TokenAdapters(NamedTuple):
    """Adapters of a step."""

    slots_N: jax.Array
    """Place of each among the resident adapters, int32."""
    place_T: jax.Array
    """Index of each token's adapter in `slots_N`, int32; -1 for none."""

    @property
    def slot_T(self) -> jax.Array:
        """Return the place of each token's adapter among the resident adapters, int32; -1 for none."""
        return jnp.where(self.place_T < 0, -1, self.slots_N[self.place_T])


class Product(NamedTuple):
    """Adapters of a step for one matrix of a layer."""

    a_NRI: jax.Array
    b_NRO: jax.Array
    own_TN: jax.Array
    """True for the adapter of a token, bool."""

    def inner(self, rows_TI: jax.Array) -> jax.Array:
        """Return A x of each token's own adapter, and zeros of the others, [T, N, R] in the dtype of the rows."""
        inner_TNR = jnp.einsum("TI,NRI->TNR", rows_TI, self.a_NRI, preferred_element_type=jnp.float32)
        return jnp.where(self.own_TN[..., None], inner_TNR, 0.0).astype(rows_TI.dtype)

    def of(self, rows_TI: jax.Array) -> jax.Array:
        """Return s B (A x), float32 [T, O]."""
        return jnp.einsum("TNR,NRO->TO", self.inner(rows_TI), self.b_NRO, preferred_element_type=jnp.float32)


class ExpertAdapters(NamedTuple):
    """Resident adapters of the experts on this device, flat over layers and expert slots: [X, S, R, ...].

    A of gate and up and B of down may be [L, S, R, ...] instead, one for all experts of a layer. The gate is None for
    experts without one.
    """

    gate: AdapterPair | None
    up: AdapterPair
    down: AdapterPair

    @property
    def share_outer(self) -> bool:
        """Return True if all experts of a layer share A of gate and up, and B of down."""
        return len(self.up.a_LSRI) < len(self.up.b_LSRO)

    def before(self) -> list[AdapterPair]:
        """Return the pairs of gate, if any, and up."""
        return [self.up] if self.gate is None else [self.gate, self.up]


class RowAdapters(NamedTuple):
    """Resident adapters of experts, and the adapter of each row that experts multiply."""

    experts: ExpertAdapters
    slot_T: jax.Array
    """Place of each row's adapter among the resident ones, int32; -1 for none."""


def pair_of_layer(pair: AdapterPair, first_slot: jax.Array | int, num_slots: int) -> AdapterPair:
    """Return the adapters of a layer's experts, [P, S, R, ...]; [1, S, R, ...] for a matrix that they share."""

    def of_layer(stack: jax.Array) -> jax.Array:
        sharing = _experts_per_entry(stack, pair)
        return jax.lax.dynamic_slice_in_dim(stack, first_slot // sharing, num_slots // sharing)

    return AdapterPair(*map(of_layer, pair))


def _experts_per_entry(stack: jax.Array, pair: AdapterPair) -> int:
    return max(map(len, pair)) // len(stack)


def expert_product(rows_TI: jax.Array, pair: AdapterPair, expert: jax.Array, *, slot_T: jax.Array) -> jax.Array:
    """Return s B (A x) of rows that all belong to `expert`, by its resident adapters, float32 [T, O]."""
    a_SRI, b_SRO = (stack[expert // _experts_per_entry(stack, pair)] for stack in pair)
    return Product(a_SRI, b_SRO, slot_T[:, None] == jnp.arange(len(a_SRI))).of(rows_TI)


def grouped_products(
    rows_TI: jax.Array, pairs: Sequence[AdapterPair], sizes_P: jax.Array, *, slot_T: jax.Array
) -> list[jax.Array]:
    """Return s B (A x) of rows sorted by expert, float32 [T, O] for each pair.

    `pairs` are those of `pair_of_layer`, for matrices with the same inputs; expert p has `sizes_P[p]` rows. All A lie
    side by side: on a TPU, ranks up to the width of its matrix unit cost as much as rank 1.
    """
    num_slots, rank = pairs[0].a_LSRI.shape[1:3]
    a_PQI = [_by_ranks(pair.a_LSRI, len(sizes_P)) for pair in pairs]
    a_PIQ = jnp.swapaxes(jnp.concatenate(a_PQI, axis=1), 1, 2)
    inner_TQ = jax.lax.ragged_dot(rows_TI, a_PIQ, sizes_P, preferred_element_type=jnp.float32)
    own_TQ = _own_ranks(slot_T, num_slots, rank)
    parts = zip(pairs, jnp.split(inner_TQ, len(pairs), axis=1), strict=True)
    return [
        _outer_product(jnp.where(own_TQ, part_TQ, 0.0).astype(rows_TI.dtype), pair, sizes_P) for pair, part_TQ in parts
    ]


def _by_ranks(stack: jax.Array, num_experts: int) -> jax.Array:
    """Return the matrices [P, Q, ...] of a layer's experts, one of all experts repeated."""
    merged = stack.reshape(len(stack), -1, stack.shape[-1])
    return jnp.broadcast_to(merged, (num_experts, *merged.shape[1:]))


def _own_ranks(slot_T: jax.Array, num_slots: int, rank: int) -> jax.Array:
    """Return True for the ranks of each row's own adapter, bool [T, Q]."""
    return jnp.repeat(slot_T[:, None] == jnp.arange(num_slots), rank, axis=1)


def _outer_product(inner_TQ: jax.Array, pair: AdapterPair, sizes_P: jax.Array) -> jax.Array:
    """Return the product by B of rows in the order of experts, float32 [T, O], rounded to the dtype of the rows.

    A grouped product is a kernel of its own: in float32 its results take twice the bytes and leave a core's memory.
    """
    b_PQO = _by_ranks(pair.b_LSRO, len(sizes_P))
    return jax.lax.ragged_dot(inner_TQ, b_PQO, sizes_P, preferred_element_type=inner_TQ.dtype).astype(jnp.float32)


def carry_ranks(hidden_TD: jax.Array, adapters: RowAdapters, *, layer: jax.Array) -> jax.Array:
    """Return tokens with A x of gate and up beside them, [T, D + C], filled with zeros to whole lanes.

    For experts that share these A: each token is multiplied once, and not for each of its experts.
    """
    a_NSRI = jnp.stack([pair.a_LSRI[layer] for pair in adapters.experts.before()])
    own_TS = adapters.slot_T[:, None] == jnp.arange(a_NSRI.shape[1])
    inner_TNSR = jnp.einsum("TI,NSRI->TNSR", hidden_TD, a_NSRI, preferred_element_type=jnp.float32)
    ranks_TNR = jnp.sum(jnp.where(own_TS[:, None, :, None], inner_TNSR, 0.0), axis=2)
    ranks_TC = ranks_TNR.reshape(len(hidden_TD), -1).astype(hidden_TD.dtype)
    return jnp.concatenate([hidden_TD, jnp.pad(ranks_TC, ((0, 0), (0, -ranks_TC.shape[1] % LANES)))], axis=1)


def carried_products(
    carried_TC: jax.Array, pairs: Sequence[AdapterPair], sizes_P: jax.Array, *, slot_T: jax.Array
) -> list[jax.Array]:
    """Return `grouped_products` of rows that carry A x (`carry_ranks`), in the order of `pairs`."""
    num_slots, rank = pairs[0].b_LSRO.shape[1:3]
    own_TQ = _own_ranks(slot_T, num_slots, rank)
    made = []
    for place, pair in enumerate(pairs):
        ranks_TQ = jnp.tile(carried_TC[:, place * rank : (place + 1) * rank], (1, num_slots))
        made.append(_outer_product(jnp.where(own_TQ, ranks_TQ, 0), pair, sizes_P))
    return made


def ranks_to_carry(
    inner_TI: jax.Array, pair: AdapterPair, sizes_P: jax.Array, *, slot_T: jax.Array, num_columns: int
) -> jax.Array:
    """Return A x of each row's own adapter, for experts that share B, float32 [T, C] filled with zeros."""
    num_slots, rank = pair.a_LSRI.shape[1:3]
    a_PIQ = jnp.swapaxes(_by_ranks(pair.a_LSRI, len(sizes_P)), 1, 2)
    all_TQ = jax.lax.ragged_dot(inner_TI, a_PIQ, sizes_P, preferred_element_type=jnp.float32)
    own_TQ = jnp.where(_own_ranks(slot_T, num_slots, rank), all_TQ, 0.0)
    ranks_TR = jnp.sum(own_TQ.reshape(-1, num_slots, rank), axis=1)
    return jnp.pad(ranks_TR, ((0, 0), (0, num_columns - rank)))


def add_carried(out_TY: jax.Array, adapters: RowAdapters, *, layer: jax.Array, width: int) -> jax.Array:
    """Return the sums of tokens [T, D], with B of down of the sums of A x that lie beside them (`ranks_to_carry`)."""
    b_SRO = adapters.experts.down.b_LSRO[layer]
    num_slots, rank, _ = b_SRO.shape
    ranks_TQ = jnp.tile(out_TY[:, width : width + rank], (1, num_slots)).astype(b_SRO.dtype)
    own_TQ = jnp.where(_own_ranks(adapters.slot_T, num_slots, rank), ranks_TQ, 0)
    added_TD = jnp.matmul(own_TQ, b_SRO.reshape(-1, width), preferred_element_type=jnp.float32)
    return (out_TY[:, :width].astype(jnp.float32) + added_TD).astype(out_TY.dtype)


class LayerAdapters(NamedTuple):
    """Adapters of a step for a layer."""

    pairs: Mapping[str, AdapterPair]
    """By name of the parameter."""
    layer: jax.Array
    tokens: TokenAdapters

    def for_rows(self, place_T: jax.Array) -> LayerAdapters:
        """Return the adapters of other tokens: `place_T` as in `TokenAdapters`."""
        return self._replace(tokens=self.tokens._replace(place_T=place_T))

    def product(self, name: str) -> Product | None:
        """Return the adapters of a parameter; None if adapters never change it."""
        if name not in self.pairs:
            return None
        (a_LSRI, b_LSRO), (slots_N, place_T) = self.pairs[name], self.tokens
        num_slots, rank = a_LSRI.shape[1:3]
        if num_slots <= max_read_in_place(len(slots_N), rank):
            own_TS = self.tokens.slot_T[:, None] == jnp.arange(num_slots)
            return Product(a_LSRI[self.layer], b_LSRO[self.layer], own_TS)
        own_TN = place_T[:, None] == jnp.arange(len(slots_N))
        return Product(a_LSRI[self.layer, slots_N], b_LSRO[self.layer, slots_N], own_TN)


def max_read_in_place(num_used: int, rank: int) -> int:
    """Return the number of resident adapters up to which a step that uses `num_used` of them reads all.

    XLA copies the adapters of a step out of the others, and so moves their bytes three times. A layer of all adapters
    is read where it lies. Their ranks should fit the width of a matrix unit.
    """
    return max(num_used, min(COPY_MOVES * num_used, MATRIX_UNIT // rank))


def with_adapters(made_TO: jax.Array, rows_TI: jax.Array, name: str, *, adapters: LayerAdapters | None) -> jax.Array:
    """Return the float32 product of rows by a parameter with the products of their adapters."""
    product = None if adapters is None else adapters.product(name)
    if product is None:
        return made_TO
    with jax.named_scope("adapters"):
        return made_TO + product.of(rows_TI)


def with_absorbed(
    made_TAC: jax.Array, queries_TAn: jax.Array, name: str, *, adapters: LayerAdapters | None
) -> jax.Array:
    """Return queries in the latent space, float32, with the adapters of the matrix that expands keys.

    The matrix is read from its outputs to its inputs: the latent of a query is A^T (s B^T q).
    """
    product = None if adapters is None else adapters.product(name)
    if product is None:
        return made_TAC
    with jax.named_scope("adapters"):
        b_NRAn = product.b_NRO.reshape(*product.b_NRO.shape[:2], *queries_TAn.shape[1:])
        inner_TNRA = jnp.einsum("TAn,NRAn->TNRA", queries_TAn, b_NRAn, preferred_element_type=jnp.float32)
        inner_TNRA = jnp.where(product.own_TN[..., None, None], inner_TNRA, 0.0).astype(queries_TAn.dtype)
        return made_TAC + jnp.einsum("TNRA,NRC->TAC", inner_TNRA, product.a_NRI, preferred_element_type=jnp.float32)


def with_expanded(
    made_TAv: jax.Array, latents_TAC: jax.Array, name: str, *, adapters: LayerAdapters | None
) -> jax.Array:
    """Return the values of attended latents by head, float32, with the adapters of the matrix that expands them."""
    product = None if adapters is None else adapters.product(name)
    if product is None:
        return made_TAv
    with jax.named_scope("adapters"):
        b_NRAv = product.b_NRO.reshape(*product.b_NRO.shape[:2], *made_TAv.shape[1:])
        inner_TANR = jnp.einsum("TAC,NRC->TANR", latents_TAC, product.a_NRI, preferred_element_type=jnp.float32)
        inner_TANR = jnp.where(product.own_TN[:, None, :, None], inner_TANR, 0.0).astype(latents_TAC.dtype)
        return made_TAv + jnp.einsum("TANR,NRAv->TAv", inner_TANR, b_NRAv, preferred_element_type=jnp.float32)
