"""A look at tokens of a step after it: their hidden states, and log-probs of ids that are listed for them."""

# T tokens of a data rank   N data ranks   P tokens that are looked at   D model width   L listed ids

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from rayserve_moe.decoding.log_probs import log_probs_at, log_probs_of
from rayserve_moe.execution.step.function import ROW_AXES, weight_partitions
from rayserve_moe.execution.step.pack import PackedStep
from rayserve_moe.execution.step.pytrees import ModelWeights, StepConfig
from rayserve_moe.model.decoder_layers import norm_rows
from rayserve_moe.model.transformer import normed_logits, words_of
from rayserve_moe.parallel.sharding import DATA
from rayserve_moe.requests.fields import MAX_LISTED_IDS
from rayserve_moe.scheduling.step_plan import TokenInspection

TOKENS_AT_ONCE = 128
"""Tokens that one run of the program looks at; more take several runs."""
Inspected = tuple[jax.Array, jax.Array]
CompiledInspection = Callable[..., Inspected]
"""Takes ModelWeights, `hidden_TD` of a step, `places_P` and `listed_PL`."""


def inspect_tokens(
    weights: ModelWeights, hidden_TD: jax.Array, *, places_P: jax.Array, listed_PL: jax.Array, config: StepConfig
) -> Inspected:
    """Hidden states [P, D] of tokens after the last layer and the final norm, and what they say of the ids listed for
    them: float32 log-probs [P, L] of the model itself, 0 for ids below 0. The same on every device of the mesh.

    `hidden_TD` are those that a step has left, of all data ranks, `places_P` int32 places of tokens among them, -1 for
    none.
    """
    plan, whole = config.model.plan, PartitionSpec()

    @jax.named_scope("inspection")
    def on_device(weights: ModelWeights, hidden_TD: jax.Array, *inputs: jax.Array) -> Inspected:
        places_P, listed_PL = inputs
        local_P = places_P - plan.data_rank() * len(hidden_TD)
        is_here_P1 = ((local_P >= 0) & (local_P < len(hidden_TD)))[:, None]
        scale_D = weights.params["embedding"]["final_norm_D"]
        normed_PD = norm_rows(hidden_TD[jnp.where(is_here_P1[:, 0], local_P, 0)], scale_D, config.model)
        normed_PD = jnp.where(is_here_P1, normed_PD, 0)
        if plan.data_size > 1:  # one rank has a token, the others add zeros
            normed_PD = jax.lax.psum(normed_PD, DATA)

        def listed() -> jax.Array:
            part = words_of(config.model)
            logits_PV = normed_logits(weights.params, normed_PD, config=config.model, are_everywhere=True)
            ones_P = jnp.ones(len(normed_PD))
            found = log_probs_of(logits_PV, ones_P, part=part, masses=config.model.kernels.sampling.masses)
            return log_probs_at(found.logprobs_SV, listed_PL, part=part)

        nothing = jnp.zeros(listed_PL.shape, jnp.float32)
        return normed_PD, jax.lax.cond(jnp.any(listed_PL >= 0), listed, lambda: nothing)

    return jax.shard_map(
        on_device,
        mesh=plan.mesh,
        in_specs=(weight_partitions(config.model, config.draft), plan.partition(ROW_AXES), whole, whole),
        out_specs=(whole, whole),
        check_vma=False,
    )(weights, hidden_TD, places_P, listed_PL)


def inspection_inputs(work: TokenInspection | None, packed: PackedStep) -> Iterator[dict[str, np.ndarray]]:
    """What each run of the program is given, for the tokens that are looked at in their order."""
    if work is None:
        return
    places = packed.token_places[work.tokens]
    for first in range(0, len(places), TOKENS_AT_ONCE):
        part = slice(first, first + TOKENS_AT_ONCE)
        places_P = np.full(TOKENS_AT_ONCE, -1, np.int32)
        listed_PL = np.full((TOKENS_AT_ONCE, MAX_LISTED_IDS), -1, np.int32)
        places_P[: len(places[part])] = places[part]
        listed_PL[: len(work.listed[part]), : work.listed.shape[1]] = work.listed[part]
        yield {"places_P": places_P, "listed_PL": listed_PL}
