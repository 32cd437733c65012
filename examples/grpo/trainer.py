"""The trainer's state and its compiled programs: log-probs of a batch, and a step of the optimizer."""

# B samples   T tokens   S = T - 1   L layers   K experts per token

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples.grpo.batch import Batch
from examples.grpo.model import Architecture, Params, rounded
from examples.grpo.objective import Objective, distance_to, grpo_loss
from examples.grpo.policy import next_logprobs, score

WARM_UP_STEPS = 5


class TrainerState(NamedTuple):
    """Float32 weights, and what the optimizer remembers."""

    params: Params
    optimizer: optax.OptState


class Scores(NamedTuple):
    """Log-probs [B, S] of the tokens after the first, and the experts [B, T, L, K] that the routers choose alone."""

    logprobs_BS: np.ndarray
    own_BTLK: np.ndarray


class Programs(NamedTuple):
    """What runs on the trainer's device; each is compiled once per shape.

    `rounded` gives the weights as they are sent, which all scores are taken with. `step` takes over the state.
    """

    initial: Callable[[Params], TrainerState]
    rounded: Callable[[Params], Params]
    score: Callable[[Params, np.ndarray, np.ndarray, np.ndarray], tuple[jax.Array, jax.Array]]
    step: Callable[..., tuple[TrainerState, dict[str, jax.Array]]]


def compile_programs(architecture: Architecture, *, learning_rate: float, objective: Objective) -> Programs:
    """Return the programs for one model and one recipe: Adam with clipped gradients, its rate warmed up."""
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adam(optax.linear_schedule(learning_rate / WARM_UP_STEPS, learning_rate, WARM_UP_STEPS), b1=0.9, b2=0.95),
    )

    def scores(
        params: Params, ids_BT: jax.Array, rows_BTLK: jax.Array, replay_BT: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        logits_BTV, own_BTLK = score(params, ids_BT, rows_BTLK, replay_BT=replay_BT, architecture=architecture)
        return next_logprobs(logits_BTV, ids_BT), own_BTLK

    def step(
        state: TrainerState, batch: dict[str, jax.Array], others: dict[str, jax.Array]
    ) -> tuple[TrainerState, dict[str, jax.Array]]:
        def loss_of(params: Params) -> tuple[jax.Array, dict[str, jax.Array]]:
            new_BS, _ = scores(rounded(params), batch["ids_BT"], batch["rows_BTLK"], batch["replay_BT"])
            loss, shares = grpo_loss(
                new_BS,
                others["old_BS"],
                sampled_BS=batch["sampled_BS"],
                advantages_B=others["advantages_B"],
                mask_BS=batch["mask_BS"],
                objective=objective,
            )
            distance = distance_to(others["reference_BS"], new_BS, batch["mask_BS"])
            return loss + objective.kl_weight * distance, {**shares, "moved": distance}

        (loss, shares), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer)
        facts = {"loss": loss, "gradient_norm": optax.tree.norm(gradients), **shares}
        return TrainerState(optax.apply_updates(state.params, updates), optimizer_state), facts

    return Programs(
        initial=lambda params: TrainerState(params, optimizer.init(params)),
        rounded=jax.jit(rounded),
        score=jax.jit(scores),
        step=jax.jit(step, donate_argnums=0),
    )


def scores_of(programs: Programs, params: Params, batch: Batch, *, replays: bool = True) -> Scores:
    """Score a batch with `params`, replaying its rows or choosing freely."""
    replay_BT = batch.replay_BT & replays
    logprobs_BS, own_BTLK = programs.score(params, batch.ids_BT, batch.rows_BTLK, replay_BT)
    return Scores(np.asarray(logprobs_BS), np.asarray(own_BTLK))


def train_on(
    programs: Programs, state: TrainerState, batch: Batch, **others: np.ndarray
) -> tuple[TrainerState, dict[str, float]]:
    """Take one step; `others` are `old_BS`, `reference_BS` and `advantages_B` of the loss.

    Returns the new state and `loss`, `gradient_norm`, the shares `clip` and `tis` of tokens, and `moved`, the distance
    to the reference.
    """
    names = ("ids_BT", "rows_BTLK", "replay_BT", "sampled_BS", "mask_BS")
    arrays = {name: jnp.asarray(getattr(batch, name)) for name in names}
    state, facts = programs.step(state, arrays, {name: jnp.asarray(of, jnp.float32) for name, of in others.items()})
    return state, {name: float(value) for name, value in facts.items()}
