"""The head over tokens of prompts: log-probs of the tokens that are known to follow them."""

# X tokens in prefill blocks of a data rank   N data ranks   G groups   W tokens of a group   D model width
# P pairs: bits of log-probs with ranks, ids with bits   V vocabulary   J likeliest tokens

from __future__ import annotations

import jax
import jax.numpy as jnp

from rayserve_moe.decoding.sampling import likeliest, ranks_of
from rayserve_moe.model.transformer import ModelConfig, Parameters, logits_of
from rayserve_moe.request_fields import MAX_TOP_LOGPROBS

GROUP_TOKENS = 128
"""Tokens whose logits exist at the same time."""


@jax.named_scope("prompt_scores")
def score_prompts(
    params: Parameters, hidden_XD: jax.Array, *, targets_NX: jax.Array, wants_top_X: jax.Array, config: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """Scores [N, 2, X] of this data rank's targets (-1: none), and likeliest tokens [N, 2, X, J] of those that want
    them, as `StepOutput` has them; N is 1.

    They are log_softmax(logits) of the model itself: temperature 1, no penalty, no bias. Where no data rank has a
    target the head does not run: all devices have to agree on that, so they decide by the targets of all ranks.
    """
    num_tokens, num_top = len(hidden_XD), min(MAX_TOP_LOGPROBS, config.spec.vocab_size)

    def nothing() -> tuple[jax.Array, jax.Array]:
        return jnp.zeros((1, 2, num_tokens), jnp.int32), jnp.zeros((1, 2, num_tokens, num_top), jnp.int32)

    def score() -> tuple[jax.Array, jax.Array]:
        size = min(GROUP_TOKENS, num_tokens)
        padding = -num_tokens % size
        is_any_G = jnp.any(_padded(targets_NX.T, padding, -1).reshape(-1, size * len(targets_NX)) >= 0, axis=1)
        mine_GW = _padded(targets_NX[config.plan.data_rank()], padding, -1).reshape(-1, size)
        hidden_GWD = _padded(hidden_XD, padding, 0).reshape(-1, size, hidden_XD.shape[1])
        wants_top_GW = _padded(wants_top_X, padding, False).reshape(-1, size)
        found_GPW, top_GPWJ = jax.lax.map(visit, (is_any_G, hidden_GWD, mine_GW, wants_top_GW))
        found_PX = found_GPW.transpose(1, 0, 2).reshape(2, -1)
        top_PXJ = top_GPWJ.transpose(1, 0, 2, 3).reshape(2, -1, num_top)
        return found_PX[None, :, :num_tokens], top_PXJ[None, :, :num_tokens]

    def visit(group: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        is_any, hidden_WD, targets_W, wants_top_W = group
        size = len(targets_W)
        empty = (jnp.zeros((2, size), jnp.int32), jnp.zeros((2, size, num_top), jnp.int32))
        return jax.lax.cond(is_any, lambda: score_group(hidden_WD, targets_W, wants_top_W), lambda: empty)

    @jax.named_scope("log_probs")
    def score_group(hidden_WD: jax.Array, targets_W: jax.Array, wants_top_W: jax.Array) -> tuple[jax.Array, jax.Array]:
        logprobs_WV = jax.nn.log_softmax(logits_of(params, hidden_WD, config=config), axis=-1)
        num_wanted = num_top * jnp.any(wants_top_W & (targets_W >= 0)).astype(jnp.int32)
        top = likeliest(logprobs_WV, num_wanted=num_wanted, most_top=num_top)
        ids_W = jnp.maximum(targets_W, 0)
        own_W = jnp.take_along_axis(logprobs_WV, ids_W[:, None], axis=-1)[:, 0]
        bits_W, bits_WJ = (jax.lax.bitcast_convert_type(each, jnp.int32) for each in (own_W, top.logprobs_SJ))
        return jnp.stack([bits_W, ranks_of(logprobs_WV, ids_W)]), jnp.stack([top.ids_SJ, bits_WJ])

    return jax.lax.cond(jnp.any(targets_NX >= 0), score, nothing)


def _padded(array_X: jax.Array, padding: int, value: float) -> jax.Array:
    return jnp.pad(array_X, [(0, padding), *[(0, 0)] * (array_X.ndim - 1)], constant_values=value)
