"""Tokens with their choice of experts, as every expert backend takes them."""

# T tokens   D model width   K experts per token   G chunks

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class RoutedTokens(NamedTuple):
    """Hidden states [T, D], logical expert ids [T, K] in router order, their weights [T, K]; False marks padding.

    The ids are slots where the rule says that those are chosen before.
    """

    hidden_TD: jax.Array
    ids_TK: jax.Array
    gates_TK: jax.Array
    valid_T: jax.Array


def cut_into_chunks(tokens: RoutedTokens, chunk: int) -> RoutedTokens:
    """Chunks of `chunk` tokens, each array [G, T, ...]; what is missing at the end is padding."""

    def cut(array_T: jax.Array) -> jax.Array:
        padded_T = jnp.pad(array_T, [(0, -len(array_T) % chunk), *[(0, 0)] * (array_T.ndim - 1)])
        return padded_T.reshape(-1, chunk, *array_T.shape[1:])

    return RoutedTokens(*map(cut, tokens))


def take_part(tokens: RoutedTokens, part: jax.Array, *, num_parts: int) -> RoutedTokens:
    """Part number `part` of `num_parts` equal ones, filled up with padding where the tokens do not divide."""
    if num_parts == 1:
        return tokens
    parts = cut_into_chunks(tokens, -(-len(tokens.valid_T) // num_parts))
    return RoutedTokens(*(jax.lax.dynamic_index_in_dim(array, part, keepdims=False) for array in parts))
