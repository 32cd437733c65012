"""Miles' training data: slime's plus weight versions. Read at radixark/miles 31f1ca96: `train_data_conversion.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rayserve_moe.requests.records import RoutingLayout
from rayserve_moe.rollouts.adapters import slime
from rayserve_moe.rollouts.adapters.trajectory import Trajectory, versions_of


def train_data(
    trajectories: Sequence[Trajectory], layout: RoutingLayout, *, rewards: Sequence[float]
) -> dict[str, list[Any]]:
    """Build the result of `convert_samples_to_train_data`: slime's, plus `weight_versions` of each sample.

    Miles itself records a single version per answer, the last. Here each token has its version, so that
    `oldest_weight_version`, by which `max_weight_staleness` drops samples, reflects an update within an answer. For
    that the versions must be written as integers. Raises ValueError if rows are missing.
    """
    data = slime.train_data(trajectories, layout, rewards=rewards)
    return {**data, "weight_versions": [versions_of(each) for each in trajectories]}
