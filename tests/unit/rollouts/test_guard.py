"""The guard: right rows pass, in bfloat16's noise too; shifted, mislabelled and foreign ones are refused by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rayserve_moe.requests.records import RoutedExperts, RoutingLayout
from rayserve_moe.rollouts.guard import MAX_KL, RefusedBatch, check_replay, distance_of
from rayserve_moe.rollouts.schema import Rollout

EXPERTS, LAYERS, TOP_K, PROMPT = 8, 3, 2, 4
LAYOUT = RoutingLayout(num_hidden_layers=LAYERS, layer_ids=tuple(range(LAYERS)), num_experts=EXPERTS, top_k=TOP_K)
NOISE = 0.006
"""Standard deviation of log-ratios whose k3 is that of a bfloat16 server under replay: 1.8e-5."""


def logprobs_of(rows, weights):
    """A model whose log-probs depend on the experts of the token before each: rows [N, L, K], weights [L, E]."""
    gains = np.take_along_axis(weights[None], rows, axis=-1).sum(axis=(1, 2))
    return 1.5 * gains[PROMPT - 1 :] - 20.0


@pytest.fixture(params=range(5))
def batch(request):
    """Rollouts of version "7", and the model that sampled them."""
    generator = np.random.default_rng(request.param)
    weights = generator.normal(size=(LAYERS, EXPERTS))
    rollouts = []
    for number in range(32):
        num_new = int(generator.integers(2, 8))
        rows = np.argsort(generator.random((PROMPT + num_new - 1, LAYERS, EXPERTS)), axis=-1)[..., :TOP_K]
        end = len(rows) + 1
        rollouts.append(
            Rollout(
                "p", number, "7", 0,
                prompt_ids=np.arange(PROMPT), output_ids=np.arange(num_new),
                logprobs=logprobs_of(rows, weights) + generator.normal(scale=NOISE, size=num_new),
                logprob_versions=((PROMPT, end, "7"),), text="", finish_reason="stop",
                routing=RoutedExperts(rows, weight_version=((0, end - 1, "7"),)), layout=LAYOUT,
            )
        )  # fmt: skip
    return rollouts, weights


def replayed(rollouts, weights, *, shift=0):
    return [logprobs_of(np.roll(rollout.routing.rows, shift, axis=0), weights) for rollout in rollouts]


def test_right_rows_are_never_refused(batch):
    rollouts, weights = batch
    distance = check_replay(rollouts, replayed(rollouts, weights), versions=["7"])
    assert 0 < distance.kl < 10 * NOISE**2 / 2 < MAX_KL and distance.share_far == 0
    assert distance.num_tokens == sum(len(rollout.output_ids) for rollout in rollouts)
    assert distance.likely_cause is None


def test_no_cause_is_named_of_what_is_accepted(batch):
    """Under the bound of the call: a stricter bound asks for a cause of the same log-probs."""
    rollouts, weights = batch
    same = [rollout.logprobs for rollout in rollouts]
    exact = check_replay(rollouts, same, versions=["7"])
    assert exact.kl == 0 and exact.likely_cause is None
    assert distance_of([], []).likely_cause is None
    ours = replayed(rollouts, weights)
    kl = distance_of(same, ours).kl
    assert distance_of(same, ours, max_kl=kl).likely_cause is None
    assert distance_of(same, ours, max_kl=kl / 2).likely_cause


def test_with_a_bound_of_zero_a_single_last_bit_is_refused_and_named(batch):
    rollouts, weights = batch
    sampled = [replace(rollout, logprobs=rollout.logprobs.astype(np.float32)) for rollout in rollouts]
    found = [rollout.logprobs.copy() for rollout in sampled]
    exact = check_replay(sampled, found, versions=["7"], max_kl=0)
    assert exact.kl == 0 and exact.likely_cause is None and exact.num_tokens == sum(map(len, found))
    found[3][1] = np.nextafter(found[3][1], np.float32(0))
    check_replay(sampled, found, versions=["7"])
    with pytest.raises(RefusedBatch, match="1 log-probs differ; the first is token 1 of sample 3") as refusal:
        check_replay(sampled, found, versions=["7"], max_kl=0)
    assert refusal.value.cause.startswith("sums in another order")
    assert f"{sampled[3].logprobs[1]:.9g} sampled, {found[3][1]:.9g} replayed" in str(refusal.value)
    found[3][1] = np.nan
    with pytest.raises(RefusedBatch, match="no numbers"):
        check_replay(sampled, found, versions=["7"], max_kl=0)
    with pytest.raises(RefusedBatch, match="Likely: shifted rows"):
        check_replay(sampled, replayed(rollouts, weights, shift=1), versions=["7"], max_kl=0)


@pytest.mark.parametrize("offset", [-1.0, 0.5, 3.0])
def test_a_constant_offset_is_told_from_wrong_rows(batch, offset):
    rollouts, weights = batch
    found = [logprobs + offset for logprobs in replayed(rollouts, weights)]
    with pytest.raises(RefusedBatch, match="temperature or bias") as refusal:
        check_replay(rollouts, found, versions=["7"])
    assert f"{offset:+.2g} from the served" in refusal.value.cause


@pytest.mark.parametrize("shift", [1, -1])
def test_wholly_shifted_rows_are_refused_and_named(batch, shift):
    rollouts, weights = batch
    causes = {"forward": lambda: replayed(rollouts, weights), "back": lambda: replayed(rollouts, weights, shift=2)}
    with pytest.raises(RefusedBatch, match="Likely: forward") as refusal:
        check_replay(rollouts, replayed(rollouts, weights, shift=shift), versions=["7"], causes=causes)
    assert refusal.value.cause == "forward" and refusal.value.distance.kl > 10 * MAX_KL
    with pytest.raises(RefusedBatch, match="shifted rows"):
        check_replay(rollouts, replayed(rollouts, weights, shift=shift), versions=["7"])


def test_a_cause_that_explains_nothing_is_not_named(batch):
    rollouts, weights = batch
    wrong = replayed(rollouts, weights, shift=1)
    with pytest.raises(RefusedBatch) as refusal:
        check_replay(rollouts, wrong, versions=["7"], causes={"moon": lambda: replayed(rollouts, weights, shift=2)})
    assert refusal.value.cause != "moon"


def test_other_weights_in_the_trainer_are_told_from_wrong_rows(batch):
    rollouts, weights = batch
    moved = weights + 0.09 * np.random.default_rng(1).normal(size=weights.shape)
    with pytest.raises(RefusedBatch) as refusal:
        check_replay(rollouts, replayed(rollouts, moved), versions=["7"])
    assert refusal.value.cause == "wrong version or unrounded weights in the trainer"


def test_a_few_wrong_rows_are_told_from_other_weights(batch):
    rollouts, weights = batch
    found = replayed(rollouts, weights)
    found[3][1] -= 4.0
    with pytest.raises(RefusedBatch) as refusal:
        check_replay(rollouts, found, versions=["7"], max_kl=1e-3)
    assert refusal.value.cause.startswith("some wrong rows")


@pytest.mark.parametrize("what", ["rows", "log-probs"])
def test_another_label_is_refused_though_the_rows_are_right(batch, what):
    rollouts, weights = batch
    one = rollouts[5]
    if what == "rows":
        routing = replace(one.routing, weight_version=((0, 2, "6"), (2, len(one.routing.rows), "7")))
        rollouts[5] = replace(one, routing=routing)
    else:
        rollouts[5] = replace(one, logprob_versions=((PROMPT, PROMPT + 1, "6"), (PROMPT + 1, 99, "7")))
    with pytest.raises(RefusedBatch, match="sample 5 of p has version") as refusal:
        check_replay(rollouts, replayed(rollouts, weights), versions=["7"])
    assert refusal.value.cause == "wrong version" and refusal.value.distance is None
    check_replay(rollouts, replayed(rollouts, weights), versions={"6", "7"})


def test_one_version_may_stand_alone(batch):
    """A text is one name, not its letters."""
    rollouts, weights = batch
    named = [
        replace(
            one,
            routing=replace(one.routing, weight_version=((0, len(one.routing.rows), "step-7"),)),
            logprob_versions=((PROMPT, PROMPT + len(one.output_ids), "step-7"),),
        )
        for one in rollouts
    ]
    check_replay(named, replayed(rollouts, weights), versions="step-7")
    with pytest.raises(RefusedBatch, match=r"has version \['step-7'\], not \['step-6'\]"):
        check_replay(named, replayed(rollouts, weights), versions="step-6")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_refused(batch, value):
    rollouts, weights = batch
    found = replayed(rollouts, weights)
    found[0][0] = value
    with pytest.raises(RefusedBatch, match="no numbers"):
        check_replay(rollouts, found, versions=["7"])


def test_the_distance_is_k3_by_its_formula():
    served, ours = [np.array([-1.0, -2.0]), np.array([]), np.array([-0.5])], [np.array([-1.5, -2.0]), [], [0.5]]
    differences = np.array([-0.5, 0.0, 1.0])
    each = np.exp(differences) - 1 - differences
    distance = distance_of(served, ours)
    assert distance.kl == pytest.approx(each.mean()) and distance.worst_sample == pytest.approx(each[2])
    assert distance.share_far == pytest.approx(1 / 3) and distance.num_tokens == 3
    assert distance_of([], []).kl == 0


def test_samples_without_a_logprob_per_token_are_an_error():
    with pytest.raises(ValueError, match="per sampled token"):
        distance_of([np.zeros(2)], [np.zeros(3)])
    with pytest.raises(ValueError, match="one-dimensional"):  # they would be compared with each other, all with all
        distance_of([np.zeros(2)], [np.zeros((2, 1))])
