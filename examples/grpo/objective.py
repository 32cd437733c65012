"""GRPO's objective with truncated importance sampling, and the distances that are reported beside it."""

# B samples   S positions that may be sampled

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Objective:
    """Bounds of the ratio to the old policy and weight of the distance to a reference (arXiv:2402.03300), TIS's cap.

    The cap is of the old policy's ratio to the sampler.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    tis_cap: float = 2.0
    kl_weight: float = 0.0


def group_advantages(rewards: np.ndarray) -> np.ndarray:
    """Rewards [groups, samples] less their group's mean, over its deviation; zeros in a group of equal rewards."""
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    deviation = rewards.std(axis=1, keepdims=True)
    return np.divide(centred, deviation, out=np.zeros_like(centred), where=deviation > 0)


def grpo_loss(
    new_BS: jax.Array,
    old_BS: jax.Array,
    *,
    sampled_BS: jax.Array,
    advantages_B: jax.Array,
    mask_BS: jax.Array,
    objective: Objective,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss of log-probs under the new, the old and the sampling policy, and the shares of tokens clipped and truncated.

    The old policy is the trainer's at the version that sampled. The loss is a mean over all sampled tokens of the
    batch: dead groups, whose advantage is zero, count in the denominator.
    """
    ratio = jnp.exp(new_BS - jax.lax.stop_gradient(old_BS))
    clipped = jnp.clip(ratio, 1 - objective.clip_low, 1 + objective.clip_high)
    advantages = advantages_B[:, None]
    correction = jnp.exp(jax.lax.stop_gradient(old_BS) - sampled_BS)
    weight = jnp.minimum(correction, objective.tis_cap)
    gains = weight * jnp.minimum(ratio * advantages, clipped * advantages)
    binds = clipped * advantages < ratio * advantages
    shares = {"clip": masked_mean(binds, mask_BS), "tis": masked_mean(correction > objective.tis_cap, mask_BS)}
    return -masked_mean(gains, mask_BS), shares


def distance_to(reference_BS: jax.Array, new_BS: jax.Array, mask_BS: jax.Array) -> jax.Array:
    """Distance of the new policy from a reference, k3, nats per token of the mask: unbiased on its own samples."""
    behind_BS = jax.lax.stop_gradient(reference_BS) - new_BS
    return masked_mean(jnp.expm1(behind_BS) - behind_BS, mask_BS)


def masked_mean(values_BS: jax.Array, mask_BS: jax.Array) -> jax.Array:
    """Mean over the positions of the mask; 0 where there are none."""
    return jnp.sum(jnp.where(mask_BS, values_BS, 0)) / jnp.maximum(jnp.sum(mask_BS), 1)
