"""A router in one TPU kernel: its product, its scores, and the choice of experts.

XLA makes seven or more operations of them, and each costs more to start than to compute for a decode step.
"""

# T tokens   D model width   M MoE layers   E experts   K experts per token

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rayserve_moe.kernels.reference.layers import SCORES

LANES = 128
MAX_ELEMENTS = 1 << 20
"""Maximum number of elements of the tokens and of a layer's router, which the core's memory holds whole."""
VMEM_BYTES = 32 << 20

Finish = Callable[[jax.Array], jax.Array]


class StackedRouter(NamedTuple):
    """Float32 weights of the routers of all layers, as in `experts.routing.RouterWeights`, and the layer's number."""

    matrix_MDE: jax.Array
    logit_bias_ME: jax.Array | None
    selection_bias_ME: jax.Array | None
    layer: jax.Array


def choose_experts(
    hidden_TD: jax.Array,
    router: StackedRouter,
    *,
    top_k: int,
    score: str,
    finish: Finish,
    interpret: Any = False,
    **_: bool,
) -> tuple[jax.Array, jax.Array]:
    """Return ids int32 [T, K] by descending choice, ties to the smaller id, and their float32 weights [T, K].

    The score plus the selection bias decides the choice; NaN comes first. `finish` computes weights from the scores of
    the chosen experts. `interpret` (see `pallas_call`) runs it without a TPU.
    """
    (num_tokens, width), num_experts = hidden_TD.shape, router.matrix_MDE.shape[2]
    names = [name for name in ("logit_bias_ME", "selection_bias_ME") if getattr(router, name) is not None]
    whole, of_layer = pl.BlockSpec(memory_space=pltpu.VMEM), lambda _, layer_1: (layer_1[0], 0, 0)
    call = pl.pallas_call(
        partial(_choose, names=names, top_k=top_k, score=score, finish=finish),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=[whole, pl.BlockSpec((1, width, num_experts), of_layer), *[whole] * len(names)],
            out_specs=[whole, whole],
        ),
        out_shape=[jax.ShapeDtypeStruct((num_tokens, top_k), dtype) for dtype in (jnp.int32, jnp.float32)],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES),
        name="top_experts",
        interpret=interpret,
    )
    layer_1, matrix_MDE = jnp.asarray(router.layer, jnp.int32).reshape(1), router.matrix_MDE
    if not interpret:
        # XLA may otherwise bring the routers of all layers into the core's memory, in every layer.
        matrix_MDE = pltpu.with_memory_space_constraint(matrix_MDE, pltpu.HBM)
    ids_TK, weights_TK = call(layer_1, hidden_TD, matrix_MDE, *(getattr(router, name) for name in names))
    return ids_TK, weights_TK


def unsupported_reason(
    hidden_TD: jax.Array,
    router: StackedRouter | None,
    *,
    is_forced: bool = False,
    is_grouped: bool = False,
    **_: Any,
) -> str:
    """Return why `choose_experts` does not take a call; empty if it does.

    `is_forced`: the step may replace the choice. `is_grouped`: some groups of experts are excluded for each token.
    """
    if router is None:
        return "the router's weights are those of one layer"
    if is_forced:
        return "experts may be forced"
    if is_grouped:
        return "experts are chosen within groups"
    (num_tokens, width), num_experts = hidden_TD.shape, router.matrix_MDE.shape[2]
    if num_experts % LANES:
        return f"{num_experts} experts are no multiple of {LANES}"
    if width * max(num_tokens, num_experts) > MAX_ELEMENTS:
        return f"{num_tokens} tokens or {num_experts} experts of width {width} exceed {MAX_ELEMENTS} elements"
    return ""


def _choose(*refs: Any, names: list[str], top_k: int, score: str, finish: Finish) -> None:
    layer_1, hidden, matrix, *biases, ids, weights = refs
    bias_of = {name: ref[pl.ds(layer_1[0], 1), :] for name, ref in zip(names, biases, strict=True)}
    wide_TD = hidden[...].astype(jnp.float32)
    logits_TE = jnp.dot(wide_TD, matrix[0], precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    scores_TE = SCORES[score](logits_TE + bias_of["logit_bias_ME"] if "logit_bias_ME" in bias_of else logits_TE)
    choice_TE = scores_TE + bias_of["selection_bias_ME"] if "selection_bias_ME" in bias_of else scores_TE
    ids[...], chosen_TK = _best(choice_TE, scores_TE, top_k)
    weights[...] = finish(chosen_TK)


def _best(choice_TE: jax.Array, scores_TE: jax.Array, top_k: int) -> tuple[jax.Array, jax.Array]:
    """Return the ids of the `top_k` maxima of `choice_TE` in descending order, and their scores."""
    num_tokens, num_experts = choice_TE.shape
    expert_TE = jax.lax.broadcasted_iota(jnp.int32, choice_TE.shape, 1)
    place_TK = jax.lax.broadcasted_iota(jnp.int32, (num_tokens, top_k), 1)
    left_TE = jnp.where(jnp.isnan(choice_TE), jnp.inf, choice_TE)
    ids_TK, chosen_TK = jnp.zeros(place_TK.shape, jnp.int32), jnp.zeros(place_TK.shape, jnp.float32)
    for k in range(top_k):
        best_T1 = jnp.max(left_TE, axis=1, keepdims=True)
        id_T1 = jnp.min(jnp.where(left_TE == best_T1, expert_TE, num_experts), axis=1, keepdims=True)
        is_chosen_TE = expert_TE == id_T1
        score_T1 = jnp.sum(jnp.where(is_chosen_TE, scores_TE, 0.0), axis=1, keepdims=True)
        left_TE = jnp.where(is_chosen_TE, -jnp.inf, left_TE)
        ids_TK, chosen_TK = jnp.where(place_TK == k, id_T1, ids_TK), jnp.where(place_TK == k, score_T1, chosen_TK)
    return ids_TK, chosen_TK
