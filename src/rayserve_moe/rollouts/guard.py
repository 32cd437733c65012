"""A check that rejects a batch whose replay does not reproduce the server's log-probs, and names the likely cause."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rayserve_moe.rollouts.schema import Rollout

MAX_KL = 0.01
"""Nats per token. Published mismatch under replay is 1e-5 to 1e-3; wholly shifted rows give 1 or more."""
FAR = float(np.log(2))
"""Absolute log-ratio above which a token is far; arXiv:2510.11370 counts such tokens."""
_TOP_SHARE = 0.02
"""Share of tokens that hold nearly all of the distance if only some rows are wrong."""
_NEARLY_ALL = 0.9
_ROUNDINGS = 1e-6
"""Nats per token below which roundings alone may be the cause."""
_CONSTANT = 0.25
"""Standard deviation of the differences, relative to their mean, below which they are one constant."""
_WHOLLY = 0.2
"""Share of tokens off by more than 2 above which all rows belong to other tokens."""

Logprobs = Sequence[np.ndarray]
"""Log-probs of every sample's output tokens, in sample order."""
Causes = Mapping[str, Callable[[], Logprobs]]
"""By cause: returns the trainer's log-probs with that cause removed."""


@dataclass(frozen=True)
class ReplayDistance:
    """Distance of the trainer's log-probs from the served ones.

    d is the trainer's log-prob of a token minus the server's.
    """

    kl: float
    """Mean of exp(d) - 1 - d over the tokens, in nats per token (k3, http://joschu.net/blog/kl-approx.html)."""
    share_far: float
    """Share of tokens whose probability ratio is beyond 2."""
    worst_sample: float
    """Maximum of the samples' means."""
    num_tokens: int
    likely_cause: str | None
    """The cause that the distances suggest; None if `kl` is within the bound."""


class RefusedBatch(ValueError):
    """A batch that should not be trained on, with its `cause` and `distance` (None: rejected because of a label)."""

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
    """Check that replaying the rows of a batch reproduces its log-probs; return the distance.

    `replayed` are the trainer's log-probs of the output tokens, taken before any step on this batch, with the weights
    that sampled them, as they were sent, at the temperature of the samples. `versions` are the names of those weights,
    or a single name. Raises RefusedBatch if a row or a log-prob is labelled with another version, or if the distance is
    above `max_kl` or not a number. With `max_kl=0` every log-prob must be equal to the last bit. Then each of `causes`
    is tried: if removing a cause brings the batch within the bound, the cause with the minimum distance is named,
    otherwise the cause that the distances suggest. Raises ValueError if the log-probs do not belong to the same tokens.
    """
    known = {versions} if isinstance(versions, str) else set(versions)
    for number, rollout in enumerate(rollouts):
        if others := labels(rollout) - known:
            message = f"sample {number} of {rollout.prompt_id} has version {sorted(others)}, not {sorted(known)}"
            raise RefusedBatch("wrong version", message)
    served = [rollout.logprobs for rollout in rollouts]
    distance = distance_of(served, replayed, max_kl=max_kl)
    if distance.likely_cause is None:
        return distance
    cause = _found_cause(served, causes or {}, max_kl=max_kl) or distance.likely_cause
    first = "" if max_kl else f" {_first_difference(rollouts, replayed)}."
    message = (
        f"replay is {distance.kl:.3g} nats per token from the sampled log-probs, the bound is {max_kl:g}; "
        f"{distance.share_far:.1%} of {distance.num_tokens} tokens are off by more than 2.{first} Likely: {cause}"
    )
    raise RefusedBatch(cause, message, distance=distance)


def labels(rollout: Rollout) -> set[str]:
    """Return the weight versions of all rows and log-probs of a sample."""
    rows = () if rollout.routing is None else rollout.routing.weight_version
    return {version for _, _, version in (*rows, *rollout.logprob_versions)}


def distance_of(served: Logprobs, replayed: Logprobs, *, max_kl: float = MAX_KL) -> ReplayDistance:
    """Return the distance of the trainer's log-probs from the served ones, with a cause if it is above `max_kl`.

    Raises ValueError if they do not belong to the same tokens.
    """
    if [len(one) for one in served] != [len(one) for one in replayed]:
        raise ValueError("the trainer must give one log-prob per sampled token")
    if any(np.ndim(one) != 1 for one in replayed):
        raise ValueError("the trainer's log-probs of a sample must be one-dimensional: one number per sampled token")
    pairs = zip(served, replayed, strict=True)
    each = [np.asarray(ours, np.float64) - theirs for theirs, ours in pairs if len(theirs)]
    if not each:
        return ReplayDistance(0.0, 0.0, 0.0, 0, None)
    differences = np.concatenate(each)
    with np.errstate(over="ignore", invalid="ignore"):
        parts = [np.expm1(one) - one for one in each]
    kl = _finite(np.concatenate(parts).mean())
    is_within = kl <= max_kl if max_kl else not differences.any()
    return ReplayDistance(
        kl=kl,
        share_far=float((~(np.abs(differences) <= FAR)).mean()),
        worst_sample=_finite(max(part.mean() for part in parts)),
        num_tokens=len(differences),
        likely_cause=None if is_within else _likely_cause(differences, np.concatenate(parts)),
    )


def _first_difference(rollouts: Sequence[Rollout], replayed: Logprobs) -> str:
    """Return the first log-prob that differs, and how many do."""
    differing = [np.flatnonzero(rollout.logprobs != ours) for rollout, ours in zip(rollouts, replayed, strict=True)]
    number = next(number for number, tokens in enumerate(differing) if len(tokens))
    token = differing[number][0]
    return (
        f"{sum(map(len, differing))} log-probs differ; the first is token {token} of sample {number}: "
        f"{rollouts[number].logprobs[token]:.9g} sampled, {replayed[number][token]:.9g} replayed"
    )


def _finite(value: float) -> float:
    """Return a distance, with infinity in place of NaN."""
    return float(value) if np.isfinite(value) else float("inf")


def _likely_cause(differences: np.ndarray, parts: np.ndarray) -> str:
    if not np.isfinite(differences).all():
        return "log-probs that are no numbers"
    if parts.mean() < _ROUNDINGS:
        return "sums in another order: another batch without `invariant_products`, other kernels or another dtype"
    if len(differences) > 1 and differences.std() < _CONSTANT * abs(differences.mean()):
        return (
            f"another temperature or bias in the trainer: all log-probs are {differences.mean():+.2g} from the served"
        )
    if (np.abs(differences) > FAR).mean() > _WHOLLY:
        return "shifted rows, or those of other samples"
    top_parts = np.sort(parts)[-max(1, int(_TOP_SHARE * len(parts))) :]
    if top_parts.sum() > _NEARLY_ALL * parts.sum():
        return "some wrong rows: of another version, or shifted within a part of the sequence"
    return "wrong version or unrounded weights in the trainer"


def _found_cause(served: Logprobs, causes: Causes, *, max_kl: float) -> str | None:
    found = {name: distance_of(served, without()).kl for name, without in causes.items()}
    nearest = min(found, key=found.__getitem__, default=None)
    return nearest if nearest is not None and found[nearest] <= max_kl else None
