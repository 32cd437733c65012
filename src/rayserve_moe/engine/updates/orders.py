"""Orders and outcomes of weight updates."""

from __future__ import annotations

from dataclasses import dataclass

LOST_WHILE_READING = "a host was lost while hosts read the new weights: the old weights stay"
LOST_WHILE_CHANGING = "a host was lost before all hosts had the new weights: the old weights stay"

NOTHING_STAGED = "no weights are staged: the old weights stay"


@dataclass(frozen=True)
class WeightOrder:
    """Request to change the weights."""

    model_path: str
    """Checkpoint directory, at the same absolute path on every host, or URL; empty for sent weights."""
    weight_version: str | None = None
    """Version of the new weights; None for the number after the last version."""
    aborts_requests: bool = False
    """True to abort all requests when the weights change."""
    adapter: str | None = None
    """Name of the adapter that is merged into them; empty: the configured checkpoint; None: other weights."""


@dataclass(frozen=True)
class WeightOutcome:
    """Result of a weight update."""

    success: bool
    """True if the weights have changed or a bucket is staged."""
    message: str
    """Sentence for the caller."""
    weight_version: str
    """Version of the current weights."""
    num_paused: int = 0
    """Number of choices that a pause holds."""
    gap_s: float = 0.0
    """Seconds during which no step could run."""
    max_rounding: float | None = None
    """Largest |round(W) - W| of the matrices that an adapter was merged into; None for other weights."""
    probe_kl: float | None = None
    """KL divergence of a merged adapter from the same adapter beside the weights, in nats per sampled token; None if it
    is not measured."""
