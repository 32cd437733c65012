"""Miles' training data: slime's plus weight versions and index rows.

Read at radixark/miles 31f1ca96: `train_data_conversion.py`, and `fill_replay_data` of its replay utilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rayserve_moe.requests.records import RoutingLayout
from rayserve_moe.rollouts.adapters import slime
from rayserve_moe.rollouts.adapters.trajectory import Trajectory, index_rows, versions_of


def train_data(
    trajectories: Sequence[Trajectory], layout: RoutingLayout, *, rewards: Sequence[float]
) -> dict[str, list[Any]]:
    """Build the result of `convert_samples_to_train_data`: slime's, plus `weight_versions` of each sample.

    Miles itself records a single version per answer, the last. Here each token has its version, so that
    `oldest_weight_version`, by which `max_weight_staleness` drops samples, reflects an update within an answer. For
    that the versions must be written as integers.

    Samples with index rows also have `rollout_indexer_topk`, int32 [tokens - 1, layers with sparse attention, top_k]:
    the trainer replays entry i of the second axis in its i-th such layer, and moves positions to where a sample lies in
    a packed batch. Raises ValueError if rows are missing.
    """
    data = slime.train_data(trajectories, layout, rewards=rewards)
    if any(each.index_layout is not None for each in trajectories):
        data["rollout_indexer_topk"] = [index_rows(each) for each in trajectories]
    return {**data, "weight_versions": [versions_of(each) for each in trajectories]}
