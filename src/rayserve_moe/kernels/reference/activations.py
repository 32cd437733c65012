"""Activations of MLPs as data: from the products with gate and up to the operand of down."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Activation(NamedTuple):
    """Name and constants of an activation."""

    name: str = "silu"
    """A key of `ACTIVATIONS`."""
    slope: float = 1.702
    """Factor of the gate within the sigmoid of `clamped_swiglu`."""
    limit: float = 7.0
    """Bound of gate and up in `clamped_swiglu`, and of both factors in `clipped_silu`."""


SILU = Activation()


def activate(gate: jax.Array | None, up: jax.Array, activation: Activation) -> jax.Array:
    """Return the operand of down, of the shape and dtype of `up`. KeyError for another name.

    `gate` is None for an activation without a gate.
    """
    return ACTIVATIONS[activation.name](gate, up, activation)


def _silu(gate: jax.Array, up: jax.Array, _: Activation) -> jax.Array:
    return jax.nn.silu(gate) * up


def _gelu_tanh(gate: jax.Array, up: jax.Array, _: Activation) -> jax.Array:
    return jax.nn.gelu(gate, approximate=True) * up


def _clamped_swiglu(gate: jax.Array, up: jax.Array, activation: Activation) -> jax.Array:
    """Return gate * sigmoid(slope * gate) * (up + 1), with gate at most the limit and up within it (gpt-oss,
    arXiv:2508.10925)."""
    gate, up = jnp.minimum(gate, activation.limit), jnp.clip(up, -activation.limit, activation.limit)
    return gate * jax.nn.sigmoid(activation.slope * gate) * (up + 1)


def _clipped_silu(gate: jax.Array, up: jax.Array, activation: Activation) -> jax.Array:
    """Return silu(gate), at most the limit, times up within the limit (Step 3.5)."""
    return jnp.minimum(jax.nn.silu(gate), activation.limit) * jnp.clip(up, -activation.limit, activation.limit)


def _relu2(_: None, up: jax.Array, __: Activation) -> jax.Array:
    """Return the square of up where it is positive, else 0 (Primer, arXiv:2109.08668)."""
    return jnp.square(jax.nn.relu(up))


ACTIVATIONS: dict[str, Callable[..., jax.Array]] = {
    "silu": _silu,
    "gelu_tanh": _gelu_tanh,
    "clamped_swiglu": _clamped_swiglu,
    "clipped_silu": _clipped_silu,
    "relu2": _relu2,
}
