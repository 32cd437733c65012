"""The choice of experts by their scores in one Triton kernel: softmax or sigmoid, bias, and the K largest.

XLA sorts the scores of all experts, and takes six kernels around the sort. The router's product is one of
`stacked_products`, in float32.
"""

# T tokens   D model width   M MoE layers   E experts   K experts per token

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from rayserve_moe.kernels.gpu.blocks import cdiv, power_of_two
from rayserve_moe.kernels.tpu.top_experts import StackedRouter

ROWS = 8
"""Tokens of a program."""
MAX_EXPERTS = 1024
"""Maximum number of experts, whose scores a program keeps in registers."""


def unsupported_reason(
    _: jax.Array,
    router: StackedRouter | None,
    *,
    is_forced: bool = False,
    is_grouped: bool = False,
    **__: Any,
) -> str:
    """Return why `choose_experts` does not take a call; empty if it does. Arguments as for TPUs."""
    if router is None:
        return "the router's weights are those of one layer"
    if is_forced:
        return "experts may be forced"
    if is_grouped:
        return "experts are chosen within groups"
    num_experts = router.matrix_MDE.shape[2]
    return "" if num_experts <= MAX_EXPERTS else f"{num_experts} experts, not {MAX_EXPERTS} or fewer"


def choose_experts(  # noqa: PLR0913 (the signature of TPUs)
    hidden_TD: jax.Array,
    router: StackedRouter,
    *,
    top_k: int,
    score: str,
    finish: Callable[[jax.Array], jax.Array],
    products: Callable[..., jax.Array],
    interpret: bool = False,
    **_: bool,
) -> tuple[jax.Array, jax.Array]:
    """Return ids int32 [T, K] by descending choice, ties to the smaller id, and their float32 weights [T, K].

    As `tpu.top_experts.choose_experts`: the score plus the selection bias decides, and NaN comes first.
    """
    logits_TE = products(hidden_TD, [router.matrix_MDE], router.layer)
    num_tokens = len(logits_TE)
    names = [name for name in ("logit_bias_ME", "selection_bias_ME") if getattr(router, name) is not None]
    layer_1 = jnp.reshape(router.layer, (1,)).astype(jnp.int32)
    ids_TK, chosen_TK = pl.pallas_call(
        partial(_choose, names=names, top_k=top_k, score=score),
        out_shape=[jax.ShapeDtypeStruct((num_tokens, top_k), dtype) for dtype in (jnp.int32, jnp.float32)],
        grid=(cdiv(num_tokens, min(ROWS, power_of_two(num_tokens))),),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="gpu_top_experts",
    )(layer_1, logits_TE, *(getattr(router, name) for name in names))
    return ids_TK, finish(chosen_TK)


def _choose(layer_1: Any, logits: Any, *refs: Any, names: list[str], top_k: int, score: str) -> None:
    """Choose the experts of some tokens. The last program may have too many: it computes the last one again."""
    *biases, ids, chosen = refs
    num_tokens, num_experts = logits.shape
    rows, columns = min(ROWS, power_of_two(num_tokens)), power_of_two(num_experts)
    tokens = jnp.minimum(pl.program_id(0) * rows + jnp.arange(rows), num_tokens - 1)
    experts, layer = jnp.arange(columns), layer_1[0]
    is_expert = (experts < num_experts)[None, :]
    place = logits.at[tokens[:, None], experts[None, :]]
    values = plgpu.load(place, mask=jnp.broadcast_to(is_expert, (rows, columns)), other=-jnp.inf)
    bias_of = {
        name: plgpu.load(ref.at[layer, experts], mask=experts < num_experts, other=0.0)[None, :]
        for name, ref in zip(names, biases, strict=True)
    }
    values = values + bias_of["logit_bias_ME"] if "logit_bias_ME" in bias_of else values
    scores = _scores(values, score)
    choice = scores + bias_of["selection_bias_ME"] if "selection_bias_ME" in bias_of else scores
    left = jnp.where(is_expert, jnp.where(choice != choice, jnp.inf, choice), -jnp.inf)
    is_free = jnp.broadcast_to(is_expert, (rows, columns))
    for k in range(top_k):
        best = jnp.max(left, axis=1)
        own = jnp.min(jnp.where((left == best[:, None]) & is_free, experts[None, :], columns), axis=1)
        is_chosen = experts[None, :] == own[:, None]
        plgpu.store(ids.at[tokens, k], own.astype(jnp.int32))
        plgpu.store(chosen.at[tokens, k], jnp.sum(jnp.where(is_chosen, scores, 0.0), axis=1))
        left, is_free = jnp.where(is_chosen, -jnp.inf, left), is_free & ~is_chosen


def _scores(logits: jax.Array, score: str) -> jax.Array:
    """Return the softmax or the sigmoid of logits; places without an expert are -inf and score 0."""
    if score == "sigmoid":
        return 1.0 / (1.0 + jnp.exp(-logits))
    assert score == "softmax", score
    powers = jnp.exp(logits - jnp.max(logits, axis=1)[:, None])
    return powers / jnp.sum(powers, axis=1)[:, None]
