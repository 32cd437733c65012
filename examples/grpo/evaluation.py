"""What the policy knows, by teacher forcing: the exact probability of held-out sums, and what it has forgotten."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from examples.calculator.problems import held_out_problems
from examples.grpo.model import Architecture, Params
from examples.grpo.policy import next_logprobs, score
from examples.grpo.tasks import GRPO_TASKS, KEPT, answer_rows, as_chain

HELD_OUT = "held_out"
NUM_HELD_OUT, NUM_KEPT, WIDTH = 512, 512, 16
Evaluation = Callable[[Params, bool], dict[str, float]]


def evaluation(architecture: Architecture, task: str = "sum") -> Evaluation:
    """Return what measures a policy of a task.

    `held_out` is the mean probability that it samples the sums and their ends on problems that it is never trained on:
    one forward pass, no noise. With the flag there are also `differences` and `sums`, the shares of held-out problems
    that it answers right greedily: every token of the answer is the likeliest.
    """
    sets = {HELD_OUT: GRPO_TASKS[task].held_out(NUM_HELD_OUT)}
    sets |= {name: [*map(as_chain, held_out_problems(kept, limit=NUM_KEPT))] for name, kept in KEPT.items()}
    widths = {name: GRPO_TASKS[task].width if name == HELD_OUT else WIDTH for name in sets}

    @jax.jit
    def judge(params: Params, ids_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        nothing = jnp.zeros((*ids_BT.shape, architecture.num_layers, architecture.top_k), jnp.int32)
        logits_BTV, _ = score(
            params, ids_BT, nothing, replay_BT=jnp.zeros(ids_BT.shape, bool), architecture=architecture
        )
        return next_logprobs(logits_BTV, ids_BT), jnp.argmax(logits_BTV[:, :-1], axis=-1) == ids_BT[:, 1:]

    def measure(params: Params, all_tasks: bool) -> dict[str, float]:
        wanted = [name for name in sets if all_tasks or name == HELD_OUT]
        return {
            name: _judged(judge, params, answer_rows(sets[name], width=widths[name]), exact=name == HELD_OUT)
            for name in wanted
        }

    return measure


def _judged(judge: Callable, params: Params, rows: tuple[np.ndarray, np.ndarray], *, exact: bool) -> float:
    ids_BT, is_answer_BT = rows
    logprobs_BS, is_likeliest_BS = map(np.asarray, judge(params, ids_BT))
    is_answer_BS = is_answer_BT[:, 1:]
    if exact:
        return float(np.exp((logprobs_BS * is_answer_BS).sum(axis=1)).mean())
    return float((is_likeliest_BS | ~is_answer_BS).all(axis=1).mean())
