"""Low-rank adapters beside the products of a layer: s B (A x) for the tokens of several adapters at once.

The adapters of a step lie side by side along their rank, so that A is one product and B another, whatever their number.
Between the two, each token keeps the ranks of its own adapter; the other ranks are zero. Zeros add nothing to a sum, so
a token's result depends neither on the other adapters nor on their order, and tokens without an adapter keep the bits
of the base model.
"""

# T tokens   L layers   S resident adapters   N adapters of a step   R rank   I inputs   O outputs   A heads
# n width without position   C latent   v value width   X layers * expert slots
# P expert slots of a layer   Q = S * R

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp


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
    """Resident adapters of the experts on this device, flat over layers and expert slots: [X, S, R, ...]."""

    gate: AdapterPair
    up: AdapterPair
    down: AdapterPair


class RowAdapters(NamedTuple):
    """Resident adapters of experts, and the adapter of each row that experts multiply."""

    experts: ExpertAdapters
    slot_T: jax.Array
    """Place of each row's adapter among the resident ones, int32; -1 for none."""


def expert_product(rows_TI: jax.Array, pair: AdapterPair, expert: jax.Array, *, slot_T: jax.Array) -> jax.Array:
    """Return s B (A x) of rows that all belong to `expert`, float32 [T, O]; `pair` has all experts [X, S, R, ...]."""
    a_SRI, b_SRO = (stack[expert] for stack in pair)
    return Product(a_SRI, b_SRO, slot_T[:, None] == jnp.arange(len(a_SRI))).of(rows_TI)


def grouped_products(
    rows_TI: jax.Array, pairs: Sequence[AdapterPair], sizes_P: jax.Array, *, slot_T: jax.Array
) -> list[jax.Array]:
    """Return s B (A x) of rows sorted by expert, float32 [T, O] for each pair.

    `pairs` [P, S, R, ...] are the resident adapters of a layer's P experts, for matrices with the same inputs; expert p
    has `sizes_P[p]` rows. All A lie side by side: on a TPU, ranks up to the width of its matrix unit cost as much as
    rank 1.
    """
    num_experts, num_slots, rank, _ = pairs[0].a_LSRI.shape
    a_PQI = [pair.a_LSRI.reshape(num_experts, num_slots * rank, -1) for pair in pairs]
    a_PIQ = jnp.swapaxes(jnp.concatenate(a_PQI, axis=1), 1, 2)
    inner_TQ = jax.lax.ragged_dot(rows_TI, a_PIQ, sizes_P, preferred_element_type=jnp.float32)
    own_TQ = jnp.repeat(slot_T[:, None] == jnp.arange(num_slots), rank, axis=1)
    made = []
    for pair, part_TQ in zip(pairs, jnp.split(inner_TQ, len(pairs), axis=1), strict=True):
        b_PQO = pair.b_LSRO.reshape(num_experts, num_slots * rank, -1)
        own_inner_TQ = jnp.where(own_TQ, part_TQ, 0.0).astype(rows_TI.dtype)
        made.append(jax.lax.ragged_dot(own_inner_TQ, b_PQO, sizes_P, preferred_element_type=jnp.float32))
    return made


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
        own_TN = place_T[:, None] == jnp.arange(len(slots_N))
        return Product(a_LSRI[self.layer, slots_N], b_LSRO[self.layer, slots_N], own_TN)


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
