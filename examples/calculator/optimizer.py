"""Muon for the matrices inside the layers, AdamW for everything else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from examples.calculator.network import Weights

MUON_NAMES = ("q_LDH", "k_LDG", "v_LDG", "o_LHD", "gate_MPDF", "up_MPDF", "down_MPFD")
MATRICES = ("table_VD", "head_VD", "router_MDE")
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
TINY = 1e-8


@dataclass(frozen=True)
class Rates:
    """Hyperparameters, in the terms of the papers."""

    muon: float = 0.02
    muon_momentum: float = 0.95
    muon_decay: float = 0.01
    adam: float = 3e-3
    adam_betas: tuple[float, float] = (0.9, 0.98)
    adam_decay: float = 0.1
    clip_norm: float = 1.0


class Moments(NamedTuple):
    """What is remembered of a weight's gradients: their running mean, and that of their squares (AdamW alone)."""

    mean: jax.Array
    square: jax.Array


class OptimizerState(NamedTuple):
    """Moments in the tree of the weights, and the number of steps taken."""

    moments: dict[str, dict[str, Moments]]
    num_steps: jax.Array


def initial_state(weights: Weights) -> OptimizerState:
    """No step taken."""
    moments = jax.tree.map(lambda values: Moments(jnp.zeros_like(values), jnp.zeros_like(values)), weights)
    return OptimizerState(moments, jnp.zeros((), jnp.int32))


def update(
    weights: Weights, gradients: Weights, *, state: OptimizerState, rate_scale: jax.Array, rates: Rates
) -> tuple[Weights, OptimizerState]:
    """Take one step at `rate_scale` times the rates, with the gradient clipped to a norm.

    Muon: Jordan et al., https://kellerjordan.github.io/posts/muon. AdamW: Loshchilov & Hutter, arXiv:1711.05101.
    """
    norm = jnp.sqrt(sum(jnp.sum(values * values) for values in jax.tree.leaves(gradients)))
    clipped = jax.tree.map(lambda values: values * jnp.minimum(1.0, rates.clip_norm / (norm + TINY)), gradients)
    num_steps = state.num_steps + 1
    new_weights: Weights = {}
    new_moments: dict[str, dict[str, Moments]] = {}
    for group, members in weights.items():
        new_weights[group], new_moments[group] = {}, {}
        for name, values in members.items():
            gradient, moments = clipped[group][name], state.moments[group][name]
            if name in MUON_NAMES:
                step, moments = _muon(gradient, moments, rates)
                rate, decay = rates.muon * rate_scale, rates.muon_decay
            else:
                step, moments = _adam(gradient, moments, num_steps, rates)
                rate, decay = rates.adam * rate_scale, rates.adam_decay * (name in MATRICES)
            new_weights[group][name] = values * (1 - rate * decay) - rate * step
            new_moments[group][name] = moments
    return new_weights, OptimizerState(new_moments, num_steps)


def _muon(gradient: jax.Array, moments: Moments, rates: Rates) -> tuple[jax.Array, Moments]:
    mean = rates.muon_momentum * moments.mean + gradient
    inputs, outputs = gradient.shape[-2:]
    step = math.sqrt(max(1.0, outputs / inputs)) * orthogonalized(gradient + rates.muon_momentum * mean)
    return step, moments._replace(mean=mean)


def _adam(gradient: jax.Array, moments: Moments, num_steps: jax.Array, rates: Rates) -> tuple[jax.Array, Moments]:
    beta1, beta2 = rates.adam_betas
    mean = beta1 * moments.mean + (1 - beta1) * gradient
    square = beta2 * moments.square + (1 - beta2) * gradient**2
    step = mean / (1 - beta1**num_steps) / (jnp.sqrt(square / (1 - beta2**num_steps)) + TINY)
    return step, Moments(mean, square)


def orthogonalized(matrices: jax.Array) -> jax.Array:
    """Bring all singular values of every matrix of a stack [..., a, b] near one, by Newton-Schulz steps."""
    linear, cubic, quintic = NEWTON_SCHULZ
    is_wide = matrices.shape[-2] <= matrices.shape[-1]
    x = matrices if is_wide else jnp.swapaxes(matrices, -1, -2)
    x = x / (jnp.sqrt(jnp.sum(x * x, axis=(-2, -1), keepdims=True)) + TINY)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ jnp.swapaxes(x, -1, -2)
        x = linear * x + (cubic * gram + quintic * (gram @ gram)) @ x
    return x if is_wide else jnp.swapaxes(x, -1, -2)
