"""Selection is by descending score in float32, ties to the smaller id; counts see real tokens only."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.experts.router_spec import RouterSpec
from rayserve_moe.experts.routing import ExpertScores, ForcedExperts, count_tokens, rank_experts, select_top_k
from rayserve_moe.kernels.reference.layers import router_scores
from rayserve_moe.kernels.table import CPU_NATIVE
from tests.support.experts.expert_reference import choice_by_hand, gates_by_hand, scores_by_hand

SIGMOID = {"score": "sigmoid", "renormalize": True}
KINDS = {
    "mixtral": {"renormalize": True},
    "gpt_oss": {"renormalize": True, "logit_bias": True},
    "ernie": {"renormalize": True, "selection_bias": True, "renormalize_floor": 0.5},
    "deepseek_v2": {"renormalize": False, "num_groups": 4, "groups_kept": 2, "scale": 16.0},
    "minimax": {**SIGMOID, "selection_bias": True},
    "deepseek_v3": {
        **(SIGMOID | {"selection_bias": True, "scale": 2.5}),
        "num_groups": 4,
        "groups_kept": 2,
        "group_score": "top2_sum",
    },
}
OTHER = {
    "score": "softmax",
    "renormalize": False,
    "logit_bias": False,
    "selection_bias": False,
    "renormalize_floor": 0.0,
    "groups_kept": 4,
    "group_score": "max",
    "scale": 1.0,
}
"""A value of each knob that differs from those of the kinds that set it."""


def select_experts(hidden, router, *, forced=None, **rule):
    scores = ExpertScores(router_scores(hidden, router))
    return select_top_k(scores, router=RouterSpec(router.shape[1], **rule), forced=forced)


class Drawn:
    """Tokens and a router of 16 experts, 6 to each token, and its biases."""

    def __init__(self, seed: int = 3) -> None:
        generator = np.random.default_rng(seed)
        self.hidden, self.router = (generator.standard_normal(shape).astype(np.float32) for shape in ((40, 8), (8, 16)))
        self.logit_bias, self.selection_bias = generator.standard_normal((2, 16)).astype(np.float32)

    def biases(self, spec: RouterSpec) -> list[np.ndarray | None]:
        wanted = (self.logit_bias, spec.logit_bias), (self.selection_bias, spec.selection_bias)
        return [bias if is_wanted else None for bias, is_wanted in wanted]

    def selected(self, spec: RouterSpec, forced: ForcedExperts | None = None):
        """Ids and weights by the code, as numpy arrays."""
        of_logits, of_choice = self.biases(spec)
        scores = router_scores(jnp.asarray(self.hidden), jnp.asarray(self.router), bias_E=of_logits, score=spec.score)
        ranked = rank_experts(scores, router=spec, selection_bias_E=of_choice)
        return [np.asarray(array) for array in select_top_k(ranked, router=spec, forced=forced)]

    def defined(self, spec: RouterSpec):
        """Scores, ids and weights by their definition in float64."""
        of_logits, of_choice = self.biases(spec)
        scores = scores_by_hand(self.hidden, self.router, of_logits, score=spec.score)
        ids = np.argsort(-choice_by_hand(scores, of_choice, router=spec), axis=1, kind="stable")[:, : spec.top_k]
        return scores, ids, gates_by_hand(scores, ids, router=spec)


@pytest.mark.parametrize("renormalize", [True, False])
def test_ids_and_weights_are_those_of_a_sorted_softmax(renormalize):
    generator = np.random.default_rng(2)
    hidden = generator.standard_normal((40, 8)).astype(np.float32)
    router = generator.standard_normal((8, 16)).astype(np.float32)
    ids, weights = select_experts(jnp.asarray(hidden), jnp.asarray(router), top_k=4, renormalize=renormalize)
    logits = hidden.astype(np.float64) @ router
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    expected = np.argsort(-probs, axis=-1, kind="stable")[:, :4]
    np.testing.assert_array_equal(ids, expected)
    picked = np.take_along_axis(probs, expected, axis=-1)
    if renormalize:
        picked /= picked.sum(-1, keepdims=True)
    np.testing.assert_allclose(weights, picked, rtol=1e-5)
    assert ids.dtype == jnp.int32 and weights.dtype == jnp.float32


def test_ties_go_to_the_smaller_id():
    router = np.zeros((2, 6), np.float32)
    router[0] = [1, 3, 2, 3, 1, 3]
    hidden = np.array([[1, 0], [0, 1]], np.float32)
    ids, weights = select_experts(jnp.asarray(hidden), jnp.asarray(router), top_k=4, renormalize=True)
    np.testing.assert_array_equal(ids, [[1, 3, 5, 2], [0, 1, 2, 3]])
    np.testing.assert_allclose(weights[1], 0.25)


def test_the_router_is_float32_whatever_the_tokens_are():
    router = np.zeros((1, 2), np.float32)
    router[0] = [1.0, 1.0 + 2**-20]
    ids, weights = select_experts(jnp.ones((1, 1), jnp.bfloat16), jnp.asarray(router), top_k=1, renormalize=False)
    assert ids.tolist() == [[1]]
    assert weights.dtype == jnp.float32


@pytest.mark.parametrize(("top_k", "num_tokens"), [(4, 1024), (8, 512), (22, 256)])
def test_native_weights_of_a_token_have_the_same_bits_in_a_large_step(top_k: int, num_tokens: int):
    """The order of XLA's own sum depends on the number of tokens (seen with AVX2)."""
    scores_TE = jnp.asarray(np.random.default_rng(7).random((num_tokens, 64)), jnp.float32)
    rule = RouterSpec(64, top_k, renormalize=True)

    @jax.jit
    def select(scores_TE: jax.Array) -> tuple[jax.Array, jax.Array]:
        return select_top_k(ExpertScores(scores_TE), router=rule, total=CPU_NATIVE.experts.total)

    for few, many in zip(select(scores_TE[:16]), select(scores_TE), strict=True):
        np.testing.assert_array_equal(few, many[:16])


def test_padding_is_not_counted():
    ids = jnp.asarray([[0, 3], [1, 3], [3, 0], [2, 1]])
    valid = jnp.asarray([True, True, False, True])
    np.testing.assert_array_equal(count_tokens(ids, valid, num_experts=5), [1, 2, 1, 2, 0])
    assert int(count_tokens(ids, jnp.zeros(4, bool), num_experts=5).sum()) == 0


@pytest.mark.parametrize("renormalize", [True, False])
def test_forced_tokens_take_what_they_are_told_weighted_by_their_own_scores(renormalize: bool):
    generator = np.random.default_rng(5)
    hidden = generator.standard_normal((10, 8)).astype(np.float32)
    router = generator.standard_normal((8, 16)).astype(np.float32)
    told = np.stack([generator.permutation(16)[:4] for _ in range(6)]).astype(np.int32)
    told[[1, 4]] = -1
    config = {"top_k": 4, "renormalize": renormalize}
    free_ids, free_weights = select_experts(jnp.asarray(hidden), jnp.asarray(router), **config)
    forced = ForcedExperts(jnp.asarray(told), jnp.asarray(True))
    ids, weights = select_experts(jnp.asarray(hidden), jnp.asarray(router), **config, forced=forced)
    free = [0, 1, 2, 3, 5, 8]
    np.testing.assert_array_equal(ids[jnp.asarray(free)], np.asarray(free_ids)[free])
    np.testing.assert_array_equal(weights[jnp.asarray(free)], np.asarray(free_weights)[free])
    logits = hidden.astype(np.float64) @ router
    probs = np.exp(logits - logits.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    for place in (0, 2, 3, 5):
        np.testing.assert_array_equal(ids[4 + place], told[place])
        expected = probs[4 + place, told[place]]
        np.testing.assert_allclose(weights[4 + place], expected / (expected.sum() if renormalize else 1), rtol=1e-5)


def test_where_nothing_is_forced_the_router_is_free():
    hidden, router = jnp.ones((3, 2)), jnp.asarray(np.random.default_rng(6).standard_normal((2, 8)), jnp.float32)
    forced = ForcedExperts(jnp.full((2, 2), -1), jnp.asarray(False))
    for found, free in zip(
        select_experts(hidden, router, top_k=2, renormalize=True, forced=forced),
        select_experts(hidden, router, top_k=2, renormalize=True),
        strict=True,
    ):
        np.testing.assert_array_equal(found, free)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_router_is_its_definition(kind: str):
    drawn, spec = Drawn(), RouterSpec(16, 6, **KINDS[kind])
    ids, weights = drawn.selected(spec)
    _, expected_ids, expected = drawn.defined(spec)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(weights, expected, rtol=1e-5)
    assert ids.dtype == np.int32 and weights.dtype == np.float32


@pytest.mark.parametrize("kind", KINDS)
def test_forced_experts_are_weighted_as_chosen_ones_are(kind: str):
    """By unbiased scores, whatever group they are in."""
    drawn, spec = Drawn(), RouterSpec(16, 6, **KINDS[kind])
    told = np.stack([np.random.default_rng(place).permutation(16)[:6] for place in range(40)]).astype(np.int32)
    ids, weights = drawn.selected(spec, ForcedExperts(jnp.asarray(told), jnp.asarray(True)))
    np.testing.assert_array_equal(ids, told)
    np.testing.assert_allclose(weights, gates_by_hand(drawn.defined(spec)[0], told, router=spec), rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "knob"), [(kind, knob) for kind, rule in KINDS.items() for knob in rule if knob in OTHER and rule[knob]]
)
def test_every_knob_of_a_router_shows(kind: str, knob: str):
    rule = {**KINDS[kind], "renormalize_floor": KINDS[kind].get("renormalize_floor", 0.0)}
    before, after = (Drawn().selected(RouterSpec(16, 6, **r)) for r in (rule, {**rule, knob: OTHER[knob]}))
    by_expert = [np.zeros((40, 16), np.float32) for _ in range(2)]
    for held, (ids, weights) in zip(by_expert, (before, after), strict=True):
        np.put_along_axis(held, ids, weights, axis=1)
    assert np.abs(by_expert[0] - by_expert[1]).max() > 1e-4


def test_experts_of_other_groups_are_not_chosen_where_all_scores_are_negative():
    """A mask of zeros would rank them first."""
    drawn, spec = Drawn(), RouterSpec(16, 6, **KINDS["deepseek_v3"])
    drawn.selection_bias -= 5
    ids, _ = drawn.selected(spec)
    np.testing.assert_array_equal(ids, drawn.defined(spec)[1])
    assert max(len(set(row // 4)) for row in ids) == 2


def test_ties_between_groups_go_to_the_smaller_one():
    spec = RouterSpec(16, 4, **KINDS["deepseek_v3"])
    ranked = rank_experts(jnp.full((1, 16), 0.5), router=spec, selection_bias_E=None)
    np.testing.assert_array_equal(select_top_k(ranked, router=spec)[0], [[0, 1, 2, 3]])
    np.testing.assert_array_equal(np.isfinite(ranked.choice_TE[0]), np.arange(16) < 8)


def test_scores_that_are_all_zero_give_no_nan():
    spec = RouterSpec(16, 4, **SIGMOID)
    weights = select_top_k(ExpertScores(jnp.zeros((1, 16))), router=spec)[1]
    np.testing.assert_array_equal(weights, np.zeros((1, 4)))


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ({"top_k": 17}, "17 exceeds 16 experts"),
        ({"num_groups": 3}, "1 of 3 groups of 16 experts cannot be kept"),
        ({"num_groups": 0}, "1 of 0 groups"),
        ({"num_groups": 4, "groups_kept": 5}, "5 of 4 groups"),
        ({"num_groups": 4, "groups_kept": 1, "top_k": 6}, "num_experts_per_tok 6 exceeds the 4 experts of the groups"),
        ({"num_groups": 16, "groups_kept": 8, "group_score": "top2_sum"}, "groups of one expert have no top2_sum"),
    ],
)
def test_numbers_that_no_router_has_are_a_problem(rule: dict[str, object], problem: str):
    assert problem in (RouterSpec(16, **{"top_k": 2, "renormalize": True, **rule}).problem() or "")
    assert RouterSpec(16, 4, **KINDS["deepseek_v3"]).problem() is None
