"""Miles' training data: slime's, and versions. Read at radixark/miles 31f1ca96: `train_data_conversion.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rayserve_moe.requests.records import RoutingLayout
from rayserve_moe.rollouts.adapters import slime
from rayserve_moe.rollouts.adapters.trajectory import Trajectory, versions_of


def train_data(
    trajectories: Sequence[Trajectory], layout: RoutingLayout, *, rewards: Sequence[float]
) -> dict[str, list[Any]]:
    """What `convert_samples_to_train_data` returns: as in slime, with `weight_versions` of each sample.

    Miles itself notes one version per answer, the last one; here they are those of the tokens, so that
    `oldest_weight_version`, by which `max_weight_staleness` drops samples, sees an update within an answer. They have
    to be written as integers for that. ValueError for missing rows.
    """
    data = slime.train_data(trajectories, layout, rewards=rewards)
    return {**data, "weight_versions": [versions_of(each) for each in trajectories]}
