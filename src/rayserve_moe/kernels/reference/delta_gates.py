"""Gates of layers with a delta rule: the decays of their states, and the gates of their outputs."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

OUTPUT_GATES = {"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid}


@dataclass(frozen=True)
class GateRule:
    """Functions that turn projections into decays and output gates."""

    output: str = "silu"
    """Function of the output's gate: a key of OUTPUT_GATES."""
    decay_floor: float = 0.0
    """If negative, the logarithm of a decay is floor * sigmoid(rate * x); if 0, it is -rate * softplus(x)."""
    rounds_decays: bool = False
    """True if logarithms of decays are rounded to the dtype of the stream."""


def log_decays(wide: jax.Array, log_rate: jax.Array, rule: GateRule, *, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Return the logarithms of decays, float32. `wide` are projections plus bias, float32; `dtype` is the stream's."""
    rate = jnp.exp(log_rate)
    decays = rule.decay_floor * jax.nn.sigmoid(rate * wide) if rule.decay_floor else -rate * jax.nn.softplus(wide)
    return decays.astype(dtype).astype(jnp.float32) if rule.rounds_decays else decays
