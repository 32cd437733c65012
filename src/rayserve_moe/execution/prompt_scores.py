"""The head over tokens of prompts: log-probs of the tokens that are known to follow them."""

# X tokens in prefill blocks of a data rank   N data ranks   G groups   Y tokens of a group of a data rank
# W tokens of a group, of all data ranks   D model width   V vocabulary (local share)   J likeliest tokens
# P pairs: bits of log-probs with ranks, ids with bits

from __future__ import annotations

import jax
import jax.numpy as jnp

from rayserve_moe.decoding.log_probs import likeliest, log_prob_of, log_probs_of, ranks_of
from rayserve_moe.model.transformer import ModelConfig, Parameters, logits_of, words_of
from rayserve_moe.request_fields import MAX_TOP_LOGPROBS

GROUP_TOKENS = 128
"""Tokens whose logits exist at the same time."""


@jax.named_scope("prompt_scores")
def score_prompts(
    params: Parameters, hidden_XD: jax.Array, *, targets_NX: jax.Array, wants_top_NX: jax.Array, config: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """Scores [N, 2, X] of targets (-1: none), and likeliest tokens [N, 2, X, J] where they are wanted, as `StepOutput`
    has them: of all data ranks.

    They are log_softmax(logits) of the model itself: temperature 1, no penalty, no bias. Where no data rank has a
    target the head does not run: all devices have to agree on that, so they decide by the targets of all ranks.
    """
    (num_ranks, num_tokens), part = targets_NX.shape, words_of(config)
    num_top = min(MAX_TOP_LOGPROBS, config.spec.vocab_size)

    def nothing() -> tuple[jax.Array, jax.Array]:
        shape = (num_ranks, 2, num_tokens)
        return jnp.zeros(shape, jnp.int32), jnp.zeros((*shape, num_top), jnp.int32)

    def score() -> tuple[jax.Array, jax.Array]:
        size = min(GROUP_TOKENS, num_tokens)
        targets_GW, wants_top_GW = _in_groups(targets_NX, size, -1), _in_groups(wants_top_NX, size, False)
        hidden_GYD = _padded(hidden_XD, -num_tokens % size, 0).reshape(-1, size, hidden_XD.shape[1])
        found_GPW, top_GPWJ = jax.lax.map(visit, (hidden_GYD, targets_GW, wants_top_GW))
        found_GPNY, top_GPNYJ = (
            found.reshape(*found.shape[:2], num_ranks, size, *found.shape[3:]) for found in (found_GPW, top_GPWJ)
        )
        found_NPX = found_GPNY.transpose(2, 1, 0, 3).reshape(num_ranks, 2, -1)
        top_NPXJ = top_GPNYJ.transpose(2, 1, 0, 3, 4).reshape(num_ranks, 2, -1, num_top)
        return found_NPX[:, :, :num_tokens], top_NPXJ[:, :, :num_tokens]

    def visit(group: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        hidden_YD, targets_W, wants_top_W = group
        size = len(targets_W)
        empty = (jnp.zeros((2, size), jnp.int32), jnp.zeros((2, size, num_top), jnp.int32))
        return jax.lax.cond(
            jnp.any(targets_W >= 0), lambda: score_group(hidden_YD, targets_W, wants_top_W), lambda: empty
        )

    @jax.named_scope("log_probs")
    def score_group(hidden_YD: jax.Array, targets_W: jax.Array, wants_top_W: jax.Array) -> tuple[jax.Array, jax.Array]:
        ids_W = jnp.maximum(targets_W, 0)
        logits_WV = logits_of(params, hidden_YD, config=config)
        logprobs_WV = log_probs_of(logits_WV, jnp.ones(len(ids_W)), part=part, masses=config.kernels.masses).logprobs_SV
        num_wanted = num_top * jnp.any(wants_top_W & (targets_W >= 0)).astype(jnp.int32)
        top = likeliest(logprobs_WV, num_wanted=num_wanted, most_top=num_top, part=part)
        own_W = log_prob_of(logprobs_WV, ids_W, part=part)
        bits_W, bits_WJ = (jax.lax.bitcast_convert_type(each, jnp.int32) for each in (own_W, top.logprobs_SJ))
        ranks_W = ranks_of(logprobs_WV, ids_W, own_W, part=part)
        return jnp.stack([bits_W, ranks_W]), jnp.stack([top.ids_SJ, bits_WJ])

    return jax.lax.cond(jnp.any(targets_NX >= 0), score, nothing)


def _in_groups(values_NX: jax.Array, size: int, padding: float) -> jax.Array:
    """Groups of `size` tokens of every data rank, [G, W]."""
    padded_XN = _padded(values_NX.T, -values_NX.shape[1] % size, padding)
    return padded_XN.reshape(-1, size, len(values_NX)).swapaxes(1, 2).reshape(-1, size * len(values_NX))


def _padded(array_X: jax.Array, padding: int, value: float) -> jax.Array:
    return jnp.pad(array_X, [(0, padding), *[(0, 0)] * (array_X.ndim - 1)], constant_values=value)
