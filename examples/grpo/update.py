"""One step on the samples of a batch: rewards, log-probs under the weights that sampled, the guard, the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from examples.grpo.arms import ARMS, CONTROLS, Arm, shifted
from examples.grpo.batch import Batch, batch_of, newest_only, replayed_as
from examples.grpo.model import Params
from examples.grpo.objective import group_advantages
from examples.grpo.probe import agreement, split_by_sample
from examples.grpo.sampler import Sampled
from examples.grpo.settings import GrpoSettings
from examples.grpo.tasks import GRPO_TASKS
from examples.grpo.trainer import Programs, Scores, TrainerState, scores_of, train_on
from rayserve_moe.rollouts.guard import RefusedBatch, check_replay, distance_of

Weights = Mapping[str, Params]
"""By version, oldest first: those that samples may be of."""


def update(
    programs: Programs,
    state: TrainerState,
    sampled: Sampled,
    *,
    weights: Weights,
    reference: Params,
    settings: GrpoSettings,
) -> tuple[TrainerState, dict[str, Any]]:
    """Take a step on a batch, unless all of its groups are dead; returns what was measured.

    `reference` is the policy that the new one is kept near; its routers choose for themselves.

    RefusedBatch where the arm replays what was served and that does not reproduce it; the other arms are controls, in
    which `refused` only says what the guard would have done.
    """
    served = batch_of(sampled.episodes, width=GRPO_TASKS[settings.task].width)
    generator = np.random.default_rng([settings.seed, sampled.step])
    oldest = next(iter(weights.values()))

    def earlier() -> np.ndarray:
        return scores_of(programs, oldest, served, replays=False).own_BTLK

    def score_control(arm: Arm) -> float:
        wrong = arm(served, generator, earlier)
        return _distance(wrong, scores_by_version(programs, wrong, weights).logprobs_BS)["kl"]

    batch = ARMS[settings.arm](served, generator, earlier)
    old = scores_by_version(programs, batch, weights)
    refused = _guarded(programs, sampled, batch, old_BS=old.logprobs_BS, weights=weights, settings=settings)
    trained = newest_only(batch, list(weights))
    advantages = group_advantages(sampled.rewards)
    facts = {
        "reward": float(sampled.rewards.mean()),
        "dead": float((advantages == 0).all(axis=1).mean()),
        "tokens": batch.num_tokens,
        "left_out": 1 - trained.num_tokens / batch.num_tokens,
        "agreement": agreement(served, old.own_BTLK),
        "staleness": max(list(weights)[::-1].index(version) for version in batch.versions),
        "refused": refused,
        **_distance(batch, old.logprobs_BS),
        "controls": {name: score_control(CONTROLS[name]) for name in _controls(batch, weights, settings)},
        "updated": bool(advantages.any()),
    }
    if not facts["updated"]:
        return state, {**facts, "loss": 0.0, "gradient_norm": 0.0, "clip": 0.0, "tis": 0.0, "moved": 0.0}
    near = scores_of(programs, reference, served, replays=False) if settings.kl_weight else old
    others = {"old_BS": old.logprobs_BS, "reference_BS": near.logprobs_BS, "advantages_B": advantages.reshape(-1)}
    state, taken = train_on(programs, state, trained, **others)
    return state, {**facts, **taken}


def _controls(batch: Batch, weights: Weights, settings: GrpoSettings) -> list[str]:
    """Wrong rows to score beside the right arm: stale ones only where there are weights before those that sampled."""
    if settings.arm != "replay":
        return []
    return [name for name in CONTROLS if name != "stale" or next(iter(weights)) not in batch.versions]


def scores_by_version(programs: Programs, batch: Batch, weights: Weights) -> Scores:
    """Score every token with the weights of the version that sampled it; the routers' own choice is the newest's.

    KeyError where a token is of a version that is not there.
    """
    logprobs_BS, own_BTLK = np.zeros_like(batch.sampled_BS), np.zeros_like(batch.rows_BTLK)
    for version in sorted(batch.versions, key=list(weights).index):
        scores = scores_of(programs, weights[version], replayed_as(batch, version))
        logprobs_BS, own_BTLK = np.where(batch.versions_BS == version, scores.logprobs_BS, logprobs_BS), scores.own_BTLK
    return Scores(logprobs_BS, own_BTLK)


def _guarded(
    programs: Programs, sampled: Sampled, batch: Batch, *, old_BS: np.ndarray, weights: Weights, settings: GrpoSettings
) -> str:
    """What the guard says against the batch, "" for nothing. RefusedBatch in the arm that should be right."""

    def by_turn(values_BS: np.ndarray) -> list[np.ndarray]:
        pairs = zip(split_by_sample(values_BS, batch), sampled.episodes, strict=True)
        ends = ((values, np.cumsum([len(turn.output_ids) for turn in turns])[:-1]) for values, turns in pairs)
        return [part for values, at in ends for part in np.split(values, at)]

    def by(rows_BTLK: np.ndarray) -> list[np.ndarray]:
        scores = scores_by_version(programs, replace(batch, rows_BTLK=rows_BTLK), weights)
        return by_turn(scores.logprobs_BS)

    causes = {"rows shifted by one": lambda: by(shifted(batch, -1)), "rows shifted back": lambda: by(shifted(batch, 1))}
    try:
        check_replay(
            [turn for turns in sampled.episodes for turn in turns],
            by_turn(old_BS),
            versions=list(weights) if settings.asynchronous else list(weights)[-1:],
            max_kl=settings.max_kl,
            causes=causes,
        )
    except RefusedBatch as refusal:
        if settings.arm == "replay":
            raise
        return refusal.cause
    return ""


def _distance(batch: Batch, logprobs_BS: np.ndarray) -> dict[str, float]:
    """Distance of the trainer from what was sampled, as the arm replays it."""
    distance = distance_of(split_by_sample(batch.sampled_BS, batch), split_by_sample(logprobs_BS, batch))
    return {"kl": distance.kl, "far": distance.share_far}
