"""Low-rank adapters beside the products of a layer: s B (A x) for the tokens of several adapters at once.

The adapters of a step lie side by side along their rank, so that A is one product and B another, whatever their number.
Between the two, each token keeps the ranks of its own adapter; the other ranks are zero. Zeros add nothing to a sum, so
a token's result depends neither on the other adapters nor on their order, and tokens without an adapter keep the bits
of the base model.
"""

# T tokens   L layers   S resident adapters   N adapters of a step   R rank   I inputs   O outputs   A heads
# n width without position   C latent   v value width

from __future__ import annotations

from collections.abc import Mapping
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
