"""Verdicts about trajectories: claimed rows, log-probs and sampling masks against a server's own of the same tokens.

A forced pass computes the claimed rows and records the router's own choice beside them, so that each difference is its
layer's own. A failing trajectory takes a free pass; its rows and log-probs show why the trajectory fails.
"""

# T tokens   R claimed rows, the first R of T   M MoE layers   K experts per token   O output tokens

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

RIGHT, NUMERICS_ONLY = "right", "numerics only"
SHIFTED_ROWS, WRONG_ROWS, WRONG_VERSION = "shifted rows", "wrong rows", "wrong version"
WRONG_MASK, WRONG_LOGPROBS, WRONG_GATES = "wrong mask", "wrong log-probs", "wrong gates"
VERDICTS = (RIGHT, NUMERICS_ONLY, WRONG_LOGPROBS, WRONG_MASK, WRONG_GATES, WRONG_ROWS, SHIFTED_ROWS, WRONG_VERSION)
"""Verdicts from the mildest to the most severe."""
PASSING = frozenset({RIGHT, NUMERICS_ONLY})
MAX_PLACES = 256
"""Differing decisions that a report lists."""
MAX_SHIFT = 8
_MIN_SHIFTED_ROWS = 4
"""Minimum rows for a shift; fewer could agree by chance."""
_FITS = 0.9
"""Share of decisions that agree if rows belong to their position."""
_OTHER_WEIGHTS_FAR = 0.2
"""Share of log-probs that are far from the server's own if other weights sampled."""
_OTHER_WEIGHTS_RANK, _MIN_DECISIONS = 0.3, 8
"""Other weights of one training run mostly move experts next to the last chosen: median of their ranks, from 0 (the
next one) to 1 (the last of all), and the number of decisions below which it is chance."""


@dataclass(frozen=True)
class Tolerances:
    """Maximum differences that count as rounding."""

    tie: float = 0.05
    """Margin of a near tie, in the unit of margins: a few roundings of a bfloat16 logit near 4."""
    logprob: float = 0.05
    """Difference of log-probs in nats."""


@dataclass(frozen=True)
class Claim:
    """Trajectory with its claimed rows, log-probs and masks."""

    token_ids: np.ndarray
    """Prompt and outputs, int32 [T]."""
    rows: np.ndarray
    """Experts from the first token on, [R, M, K]; R is T or T - 1."""
    prompt_len: int
    logprobs: np.ndarray | None = None
    """Log-probs of the outputs at temperature 1, float [O]; None if they are not audited."""
    masks: Sequence[Sequence[int]] | None = None
    """Ids that each output was sampled from; an empty entry is no mask."""
    has_gates: bool = False
    """True if the pass under the claimed rows also has their claimed gates."""


@dataclass(frozen=True)
class Scored:
    """Values that the server has computed for the tokens of a claim."""

    native: np.ndarray
    """Routers' own choices [T, M, K]."""
    margins: np.ndarray
    """float32 [T, M], as `experts.native_choice`."""
    ranks: np.ndarray
    """int32 [T, M], likewise."""
    logprobs: np.ndarray
    """Log-probs of all tokens but the first, float32 [T - 1]."""


@dataclass(frozen=True)
class Parting:
    """Decision in which the claimed experts and the router's own differ."""

    token: int
    layer: int
    """Index among MoE layers."""
    claimed: list[int]
    native: list[int]
    margin: float
    rank: int


@dataclass(frozen=True)
class AuditReport:
    """Verdict about a trajectory with its reasons."""

    verdict: str
    num_tokens: int
    num_decisions: int
    """Decisions of the claimed rows: one per token and MoE layer."""
    first: Parting | None = None
    """First decision, token by token and layer by layer, that differs by more than rounding."""
    first_tie: Parting | None = None
    """First decision that differs at a near tie."""
    num_differing: int = 0
    num_ties: int = 0
    """Near ties among the differing decisions."""
    mismatch_rate: float = 0.0
    """Mean share of a decision's experts that are not the router's, as MaxText logs it."""
    differing_by_layer: list[int] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    """(token, MoE layer) of differing decisions, at most MAX_PLACES."""
    shift: int | None = None
    """Distance of the position that rows belong to, for shifted rows."""
    max_logprob_difference: float | None = None
    """Maximum over the outputs, under the claimed rows."""
    k3: float | None = None
    """Mean of exp(d) - 1 - d over the outputs, in nats per token."""
    first_logprob: int | None = None
    """Position of the first output with a log-prob beyond the tolerance."""
    first_mask: int | None = None
    """Position of the first output that its mask excludes."""


def needs_free_pass(claim: Claim, forced: Scored, *, tolerances: Tolerances) -> bool:
    """Return True if the verdict depends on a pass without forced rows."""
    return bool(_far_decisions(claim, forced, tolerances).any())


def judge(
    claim: Claim, forced: Scored, *, free: Scored | None, num_experts: int, tolerances: Tolerances
) -> AuditReport:
    """Return the verdict about a claim by a pass under its rows, and a free pass if `needs_free_pass`."""
    differs_RM = _differs(claim.rows, forced.native)
    far_RM = _far_decisions(claim, forced, tolerances)
    difference_O = _logprob_difference(claim, forced)
    is_far_O = np.zeros(0, bool) if difference_O is None else ~(np.abs(difference_O) <= tolerances.logprob)
    first, first_mask, shift = _first(far_RM), _excluded_by_mask(claim), None
    if first is not None:
        assert free is not None, "a failing claim takes a free pass"
        shift = _shift(claim, free, first_token=first[0])
        verdict = (
            SHIFTED_ROWS
            if shift is not None
            else _wrong_rows(
                claim,
                free,
                ranks=forced.ranks[: len(claim.rows)][far_RM],
                num_experts=num_experts,
                tolerances=tolerances,
            )
        )
        if verdict == WRONG_ROWS and claim.has_gates and not _differs(claim.rows, free.native)[first]:
            verdict = WRONG_GATES  # the rows are the server's own without them
    elif first_mask is not None:
        verdict = WRONG_MASK
    elif is_far_O.any():
        verdict = WRONG_LOGPROBS
    else:
        verdict = NUMERICS_ONLY if differs_RM.any() else RIGHT
    tie = _first(differs_RM & ~far_RM)
    return AuditReport(
        verdict,
        num_tokens=len(claim.token_ids),
        num_decisions=differs_RM.size,
        first=None if first is None else _parting(claim, forced, *first),
        first_tie=None if tie is None else _parting(claim, forced, *tie),
        num_differing=int(differs_RM.sum()),
        num_ties=int((differs_RM & ~far_RM).sum()),
        mismatch_rate=_mismatch_rate(claim.rows, forced.native),
        differing_by_layer=differs_RM.sum(axis=0).tolist(),
        places=[(int(token), int(layer)) for token, layer in np.argwhere(differs_RM)[:MAX_PLACES]],
        shift=shift,
        max_logprob_difference=None if difference_O is None else _maximum(np.abs(difference_O)),
        k3=None if difference_O is None else _k3(difference_O),
        first_logprob=claim.prompt_len + int(np.argmax(is_far_O)) if is_far_O.any() else None,
        first_mask=first_mask,
    )


def worst(verdicts: Sequence[str]) -> str:
    """Return the verdict of a batch: the last of its verdicts in the order of `VERDICTS`."""
    return max(verdicts, key=VERDICTS.index, default=RIGHT)


def _wrong_rows(claim: Claim, free: Scored, *, ranks: np.ndarray, num_experts: int, tolerances: Tolerances) -> str:
    """Return `wrong version` if other weights explain the rows, else `wrong rows`.

    The server's own rows give the claimed log-probs if only the rows are wrong. Without log-probs, the `ranks` of the
    claimed experts in differing decisions tell.
    """
    difference_O = _logprob_difference(claim, free)
    if difference_O is not None and len(difference_O) > 1:
        is_far_O = ~(np.abs(difference_O) <= tolerances.logprob)
        return WRONG_VERSION if is_far_O.mean() > _OTHER_WEIGHTS_FAR and is_far_O.sum() > 1 else WRONG_ROWS
    top_k = claim.rows.shape[2]
    relative = (ranks - top_k - 1) / max(1, num_experts - top_k - 1)
    is_near = len(relative) >= _MIN_DECISIONS and float(np.median(relative)) <= _OTHER_WEIGHTS_RANK
    return WRONG_VERSION if is_near else WRONG_ROWS


def _shift(claim: Claim, free: Scored, *, first_token: int) -> int | None:
    """Return the shift under which claimed rows from the first wrong one on are the server's, or None.

    Rows may be shifted to the end of the trajectory, or only to the end of the prompt.
    """
    rows, native, num_rows = _in_order(claim.rows), _in_order(free.native), len(claim.rows)
    shifts = sorted({*range(-MAX_SHIFT, MAX_SHIFT + 1), -claim.prompt_len, claim.prompt_len} - {0}, key=abs)
    for end in sorted({num_rows, min(claim.prompt_len, num_rows)}, reverse=True):
        own = _agreement(rows[:end], native, first=first_token, shift=0)
        for shift in shifts:
            if (found := _agreement(rows[:end], native, first=first_token, shift=shift)) >= _FITS and found > own:
                return shift
    return None


def _agreement(rows: np.ndarray, native: np.ndarray, *, first: int, shift: int) -> float:
    """Return the share of decisions from row `first` on that agree with the server's of `shift` tokens later.

    Both are in order. Too few rows have 0.
    """
    first, end = max(first, -shift), min(len(rows), len(native) - shift)
    if end - first < _MIN_SHIFTED_ROWS:
        return 0.0
    return 1.0 - float((rows[first:end] != native[first + shift : end + shift]).any(axis=-1).mean())


def _differs(rows: np.ndarray, native: np.ndarray) -> np.ndarray:
    """Return flags of decisions with other experts than the router's, in any order, bool [R, M]."""
    return (_in_order(rows) != _in_order(native[: len(rows)])).any(axis=-1)


def _in_order(experts: np.ndarray) -> np.ndarray:
    """Return the experts of each decision in ascending order."""
    return np.sort(experts, axis=-1)


def _far_decisions(claim: Claim, forced: Scored, tolerances: Tolerances) -> np.ndarray:
    """Return flags of decisions that differ by more than rounding, bool [R, M]."""
    return _differs(claim.rows, forced.native) & ~(forced.margins[: len(claim.rows)] <= tolerances.tie)


def _mismatch_rate(rows: np.ndarray, native: np.ndarray) -> float:
    is_shared = (rows[..., None] == native[: len(rows), :, None]).any(axis=-1)
    return 1.0 - float(is_shared.mean()) if is_shared.size else 0.0


def _logprob_difference(claim: Claim, scored: Scored) -> np.ndarray | None:
    """Return the server's log-probs of the outputs minus the claimed ones, float64 [O]; None without claimed ones."""
    if claim.logprobs is None:
        return None
    return scored.logprobs[claim.prompt_len - 1 :].astype(np.float64) - claim.logprobs


def _excluded_by_mask(claim: Claim) -> int | None:
    """Return the position of the first output outside of its mask, or None."""
    outputs = claim.token_ids[claim.prompt_len :].tolist()
    found: Iterator[int] = (
        claim.prompt_len + index
        for index, (token, mask) in enumerate(zip(outputs, claim.masks or (), strict=False))
        if len(mask) and token not in mask
    )
    return next(found, None)


def _first(flags_RM: np.ndarray) -> tuple[int, int] | None:
    """Return the first set (token, layer), token by token, or None."""
    if not flags_RM.any():
        return None
    token, layer = np.unravel_index(int(np.argmax(flags_RM)), flags_RM.shape)
    return int(token), int(layer)


def _parting(claim: Claim, forced: Scored, token: int, layer: int) -> Parting:
    return Parting(
        token,
        layer,
        claim.rows[token, layer].tolist(),
        forced.native[token, layer].tolist(),
        float(forced.margins[token, layer]),
        int(forced.ranks[token, layer]),
    )


def _k3(difference_O: np.ndarray) -> float:
    with np.errstate(over="ignore"):
        return float(np.mean(np.expm1(difference_O) - difference_O)) if len(difference_O) else 0.0


def _maximum(values: np.ndarray) -> float:
    return float(values.max(initial=0.0))
