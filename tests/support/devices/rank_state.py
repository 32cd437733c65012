"""The state of one data rank's device, for what is tested without a model."""

from __future__ import annotations

from typing import Any

import numpy as np

from rayserve_moe.execution.step.pytrees import DeviceState
from rayserve_moe.execution.step.row_updates import MAX_BIASES
from rayserve_moe.scheduling.step_plan import NUM_FLOATS, NUM_INTEGERS


def state_of_rows(num_rows: int, **given: Any) -> DeviceState:
    """A state with the arrays that are given, and something that is not zero in all others."""
    arrays: dict[str, Any] = {
        "seen_RV": np.ones((num_rows, 7), np.int32),
        "bias_ids_RB": np.ones((num_rows, MAX_BIASES), np.int32),
        "bias_values_RB": np.ones((num_rows, MAX_BIASES), np.float32),
        "pools": {"kv": (np.ones((num_rows, 4, 2, 1), np.float32),)},
        "expert_counts_ME": np.ones((1, 2), np.int32),
        "page_table_RP": np.arange(num_rows * 4, dtype=np.int32).reshape(num_rows, 4),
        "sampling_floats_RF": np.full((num_rows, NUM_FLOATS), 0.25, np.float32),
        "sampling_integers_RI": np.full((num_rows, NUM_INTEGERS), 4, np.uint32),
        "last_tokens_R": np.arange(num_rows, dtype=np.int32),
    }
    return DeviceState(**{**arrays, **given})
