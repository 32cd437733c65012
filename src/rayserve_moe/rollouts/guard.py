"""Refuses a batch whose replay does not reproduce what the server sampled, and names the likely cause."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rayserve_moe.rollouts.schema import Rollout

MAX_KL = 0.01
"""Nats per token. Published mismatch under replay is 1e-5 to 1e-3; wholly shifted rows are at 1 and more."""
FAR = float(np.log(2))
"""A log-ratio beyond this is far: arXiv:2510.11370 counts such tokens."""
_TOP_SHARE = 0.02
"""Share of the tokens that hold nearly all of the distance where only some rows are wrong."""
_NEARLY_ALL = 0.9
_WHOLLY = 0.2
"""Share of tokens off by more than 2 from which on rows are those of other tokens."""

Logprobs = Sequence[np.ndarray]
"""Log-probs of every sample's output tokens, in the samples' order."""
Causes = Mapping[str, Callable[[], Logprobs]]
"""By the name of a cause: the trainer's log-probs as they would be without it."""


@dataclass(frozen=True)
class ReplayDistance:
    """Distance of the trainer's log-probs from the served ones.

    `kl` is the mean of exp(d) - 1 - d over the tokens, d being the trainer's log-prob less the server's: nats per token
    (k3, http://joschu.net/blog/kl-approx.html). `share_far` is that of the tokens whose ratio is beyond 2,
    `worst_sample` the greatest mean of one sample. `likely_cause` is the one that the distances speak for.
    """

    kl: float
    share_far: float
    worst_sample: float
    num_tokens: int
    likely_cause: str


class RefusedBatch(ValueError):
    """A batch that should not be trained on; `cause` says why, `distance` how far it is (None: refused by a label)."""

    def __init__(self, cause: str, message: str, *, distance: ReplayDistance | None = None) -> None:
        super().__init__(message)
        self.cause, self.distance = cause, distance


def check_replay(
    rollouts: Sequence[Rollout],
    replayed: Logprobs,
    *,
    versions: Collection[str],
    max_kl: float = MAX_KL,
    causes: Causes | None = None,
) -> ReplayDistance:
    """Check that replaying the rows of a batch reproduces its log-probs; returns how nearly it does.

    `replayed` are the trainer's log-probs of the output tokens, taken before any step on this batch, with the weights
    that sampled them, as they were sent, at the temperature of the samples. `versions` are the names of those weights,
    or one of them. Raises RefusedBatch where a row or a log-prob is labelled with another version, and where the
    distance is above `max_kl` or no number. Then each of `causes` is tried, and the one without which the batch is
    nearest is named, if it is within the bound; else it is the one that the distances speak for. ValueError where the
    log-probs are not of the same tokens.
    """
    known = {versions} if isinstance(versions, str) else set(versions)
    for number, rollout in enumerate(rollouts):
        if others := labels(rollout) - known:
            message = f"sample {number} of {rollout.prompt_id} is of version {sorted(others)}, not {sorted(known)}"
            raise RefusedBatch("wrong version", message)
    served = [rollout.logprobs for rollout in rollouts]
    distance = distance_of(served, replayed)
    if distance.kl <= max_kl:
        return distance
    cause = _found_cause(served, causes or {}, max_kl=max_kl) or distance.likely_cause
    message = (
        f"replay is {distance.kl:.3g} nats per token from what was sampled, the bound is {max_kl:g}; "
        f"{distance.share_far:.1%} of {distance.num_tokens} tokens are off by more than 2. Likely: {cause}"
    )
    raise RefusedBatch(cause, message, distance=distance)


def labels(rollout: Rollout) -> set[str]:
    """The versions of all rows and log-probs of a sample."""
    rows = () if rollout.routing is None else rollout.routing.weight_version
    return {version for _, _, version in (*rows, *rollout.logprob_versions)}


def distance_of(served: Logprobs, replayed: Logprobs) -> ReplayDistance:
    """Distance of the trainer's log-probs from the served ones. ValueError where they are not of the same tokens."""
    if [len(one) for one in served] != [len(one) for one in replayed]:
        raise ValueError("there is not one log-prob of the trainer per sampled token")
    if any(np.ndim(one) != 1 for one in replayed):
        raise ValueError("the trainer's log-probs of a sample should be one-dimensional: one number per sampled token")
    pairs = zip(served, replayed, strict=True)
    each = [np.asarray(ours, np.float64) - theirs for theirs, ours in pairs if len(theirs)]
    if not each:
        return ReplayDistance(0.0, 0.0, 0.0, 0, "")
    differences = np.concatenate(each)
    with np.errstate(over="ignore", invalid="ignore"):
        parts = [np.expm1(one) - one for one in each]
    return ReplayDistance(
        kl=_finite(np.concatenate(parts).mean()),
        share_far=float((~(np.abs(differences) <= FAR)).mean()),
        worst_sample=_finite(max(part.mean() for part in parts)),
        num_tokens=len(differences),
        likely_cause=_likely_cause(differences, np.concatenate(parts)),
    )


def _finite(value: float) -> float:
    """A distance that is no number is as great as can be."""
    return float(value) if np.isfinite(value) else float("inf")


def _likely_cause(differences: np.ndarray, parts: np.ndarray) -> str:
    if not np.isfinite(differences).all():
        return "log-probs that are no numbers"
    if (np.abs(differences) > FAR).mean() > _WHOLLY:
        return "shifted rows, or those of other samples"
    most = np.sort(parts)[-max(1, int(_TOP_SHARE * len(parts))) :]
    if most.sum() > _NEARLY_ALL * parts.sum():
        return "some wrong rows: of another version, or shifted within a part of the sequence"
    return "wrong version or unrounded weights in the trainer"


def _found_cause(served: Logprobs, causes: Causes, *, max_kl: float) -> str | None:
    found = {name: distance_of(served, without()).kl for name, without in causes.items()}
    nearest = min(found, key=found.__getitem__, default=None)
    return nearest if nearest is not None and found[nearest] <= max_kl else None
