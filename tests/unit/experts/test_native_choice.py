"""Router's own choice beside the computed experts, with the margin of its score over theirs."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.experts.native_choice import native_choice
from rayserve_moe.experts.router_spec import RouterSpec
from rayserve_moe.experts.routing import ExpertScores, rank_experts, select_top_k
from tests.unit.experts.test_routing import KINDS, Drawn

TOKENS = 40


def scores_of(spec: RouterSpec, logits: np.ndarray, bias: np.ndarray | None) -> ExpertScores:
    exps = np.exp(logits - logits.max(-1, keepdims=True))
    scores = 1 / (1 + np.exp(-logits)) if spec.score == "sigmoid" else exps / exps.sum(-1, keepdims=True)
    return rank_experts(jnp.asarray(scores, jnp.float32), router=spec, selection_bias_E=bias)


@pytest.mark.parametrize("name", KINDS)
def test_own_choices_have_the_distance_to_the_next_expert(name: str):
    spec, drawn = RouterSpec(16, 3, **KINDS[name]), Drawn()
    logits = drawn.hidden @ drawn.router
    scores = scores_of(spec, logits, drawn.biases(spec)[1])
    ids, _ = select_top_k(scores, router=spec)
    found = native_choice(scores, ids, router=spec)
    np.testing.assert_array_equal(found.ids_TK, ids)
    assert (np.asarray(found.rank_T) == 3).all() and (np.asarray(found.margin_T) >= 0).all()
    if not spec.selection_bias and spec.num_groups == 1:
        ordered = np.sort(logits, axis=-1)
        np.testing.assert_allclose(found.margin_T, ordered[:, -3] - ordered[:, -4], atol=1e-4)


@pytest.mark.parametrize("name", ["mixtral", "minimax", "ernie"])
def test_the_margin_is_what_computed_experts_lack(name: str):
    """Raised by slightly more than the margin, the computed experts become the router's choice; by less they do not."""
    spec, drawn = RouterSpec(16, 3, **KINDS[name]), Drawn()
    generator, bias = np.random.default_rng(1), drawn.biases(spec)[1]
    logits = drawn.hidden @ drawn.router
    computed = generator.permuted(np.tile(np.arange(16), (TOKENS, 1)), axis=-1)[:, :3]
    scores = scores_of(spec, logits, bias)
    found = native_choice(scores, jnp.asarray(computed), router=spec)
    values = np.asarray(scores.scores_TE if scores.choice_TE is None else scores.choice_TE, np.float64)
    if not spec.selection_bias:
        values = np.log(values)
    own = np.asarray(select_top_k(scores, router=spec)[0])
    for token in range(TOKENS):
        lacking = set(computed[token].tolist()) - set(own[token].tolist())
        for factor, is_chosen in ((1.001, True), (0.999, False)):
            raised = values[token].copy()
            raised[computed[token]] += factor * float(found.margin_T[token])
            chosen = set(np.argsort(-raised, kind="stable")[:3].tolist())
            assert (set(computed[token].tolist()) == chosen) == is_chosen or not lacking
        worst = min((values[token][expert] for expert in lacking), default=None)
        rank = 3 if worst is None else max(4, 1 + int((values[token] > worst).sum()))
        assert int(found.rank_T[token]) == rank


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_experts_of_excluded_groups_lack_what_their_group_lacks(name: str):
    spec, drawn = RouterSpec(16, 3, **KINDS[name]), Drawn()
    bias = drawn.biases(spec)[1]
    scores = scores_of(spec, drawn.hidden @ drawn.router, bias)
    assert scores.choice_TE is not None
    excluded = np.asarray(scores.choice_TE) == -np.inf
    own = np.asarray(select_top_k(scores, router=spec)[0])
    computed = own.copy()
    computed[:, 0] = excluded.argmax(axis=1)
    found = native_choice(scores, jnp.asarray(computed), router=spec)
    values = np.asarray(scores.scores_TE) + (0 if bias is None else bias)
    of_groups = np.sort(values.reshape(TOKENS, 4, 4), axis=-1)
    best = of_groups[..., -1] if spec.group_score == "max" else of_groups[..., -2:].sum(-1)
    kept = np.sort(best, axis=-1)[:, -2]
    lack = kept - best[np.arange(TOKENS), computed[:, 0] // 4]
    np.testing.assert_allclose(found.margin_T, lack, atol=1e-6)
    assert (np.asarray(found.rank_T) > 3).all()
