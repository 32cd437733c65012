"""Training: what a step minimises, how its rate goes with the number of steps, and the loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from examples.calculator.batches import Batch, training_batches
from examples.calculator.network import Weights, initial_weights, score
from examples.calculator.optimizer import OptimizerState, Rates, initial_state, update
from rayserve_moe.model.spec import ModelSpec


@dataclass(frozen=True)
class Recipe:
    """How much is trained on, and how. Everything goes by steps, nothing by the clock."""

    steps: int = 2600
    rows: int = 40
    width: int = 64
    seed: int = 0
    warm_up: float = 0.03
    constant_until: float = 0.4
    balance: float = 0.01
    expert_room: float = 1.5
    """Rows that an expert computes in a step, over those that it gets where all get the same."""
    rates: Rates = field(default_factory=Rates)


Step = Callable[[Weights, OptimizerState, Batch, float], tuple[Weights, OptimizerState, dict[str, jax.Array]]]


def train(spec: ModelSpec, recipe: Recipe, *, report_every: int = 50) -> Weights:
    """Train from the recipe's random weights, printing a line every `report_every` steps; return float32 weights."""
    weights = initial_weights(spec, seed=recipe.seed)
    state = initial_state(weights)
    step = compile_step(spec, recipe)
    batches: Iterator[Batch] = training_batches(rows=recipe.rows, width=recipe.width, seed=recipe.seed)
    began = time.monotonic()
    for number in range(recipe.steps):
        weights, state, losses = step(weights, state, next(batches), rate_scale(number, recipe))
        if (number + 1) % report_every == 0:
            said = "  ".join(f"{name} {float(value):.4f}" for name, value in losses.items())
            print(f"step {number + 1} of {recipe.steps}: {said}  {time.monotonic() - began:.0f} s", flush=True)
    return weights


def rate_scale(step: int, recipe: Recipe) -> float:
    """What the rates are multiplied by in a step: up linearly, constant, then down linearly to zero."""
    up = (step + 1) / (recipe.warm_up * recipe.steps)
    down = (1 - step / recipe.steps) / (1 - recipe.constant_until)
    return min(1.0, up, down)


def compile_step(spec: ModelSpec, recipe: Recipe) -> Step:
    """Return the function of one training step; it takes over the weights and the state that it is given."""
    even_load = recipe.rows * recipe.width * spec.router.top_k / spec.router.num_experts
    places = int(recipe.expert_room * even_load)

    def loss_of(weights: Weights, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        scores = score(weights, batch.ids_BT, batch.segments_BT, spec=spec, places=places)
        answer_loss = mean_answer_loss(scores.logits_BTV, batch)
        losses = {"answers": answer_loss, "unevenness": scores.unevenness / spec.num_layers}
        return answer_loss + recipe.balance * scores.unevenness, losses

    def step(
        weights: Weights, state: OptimizerState, batch: Batch, scale: float
    ) -> tuple[Weights, OptimizerState, dict[str, jax.Array]]:
        gradients, losses = jax.grad(loss_of, has_aux=True)(weights, batch)
        weights, state = update(
            weights, gradients, state=state, rate_scale=jnp.asarray(scale, jnp.float32), rates=recipe.rates
        )
        return weights, state, losses

    return jax.jit(step, donate_argnums=(0, 1))


def mean_answer_loss(logits_BTV: jax.Array, batch: Batch) -> jax.Array:
    """Mean negative log-probability of the tokens of answers, each scored by the logits of the token before it."""
    logprobs_BTV = jax.nn.log_softmax(logits_BTV[:, :-1])
    losses_BT = -jnp.take_along_axis(logprobs_BTV, batch.ids_BT[:, 1:, None], axis=-1)[..., 0]
    answers_BT = batch.answers_BT[:, 1:]
    return jnp.sum(losses_BT * answers_BT) / jnp.sum(answers_BT)
