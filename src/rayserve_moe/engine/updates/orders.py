"""What is ordered of an update of weights, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass

LOST_WHILE_READING = "a host was lost while hosts read the new weights: the old ones serve on"
LOST_WHILE_CHANGING = "a host was lost before all served the new weights: the old ones serve on"

NOTHING_STAGED = "no weights are staged: the old ones serve on"


@dataclass(frozen=True)
class WeightOrder:
    """The checkpoint to take weights from: a directory that every host sees at the same absolute path, or a URL.

    Empty where weights are sent. Without `weight_version` the number after the last one is taken. `aborts_requests`
    aborts all requests when the weights change.
    """

    model_path: str
    weight_version: str | None = None
    aborts_requests: bool = False


@dataclass(frozen=True)
class WeightOutcome:
    """Whether the weights have changed, a sentence about it, and how many choices a pause holds.

    `weight_version` is that of the current weights, `gap_s` how long no step could run.
    """

    success: bool
    message: str
    weight_version: str
    num_paused: int = 0
    gap_s: float = 0.0
