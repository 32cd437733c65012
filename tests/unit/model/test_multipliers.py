"""The multipliers of a model are those of its weights: of the embedding, of what layers add, and of the head."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rayserve_moe.checkpoints.synthetic import write_checkpoint
from rayserve_moe.execution.runner import HostRunner
from rayserve_moe.model.spec import FactorSpec
from tests.support.engine.host_runners import TWO_SHAPES, new_runner
from tests.support.models.core import CORE_CONFIG
from tests.support.models.full_logits import prompt_logits_of

FACTORS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.6, "logits_divisor": 7.0}
SCALED = {
    "embedding_multiplier": {"table_VD": 3.0},
    "residual_multiplier": dict.fromkeys(("o_LHD", "down_MPFD", "down_NID"), 0.6),
    "logits_divisor": {"head_VD": 1 / 7},
}
"""The weights that may be multiplied instead."""
PROMPT = list(range(40, 64))


@pytest.fixture(scope="module")
def runner(tmp_path_factory) -> HostRunner:
    path = write_checkpoint(tmp_path_factory.mktemp("core") / "model", CORE_CONFIG, dtype="float32")
    runner = new_runner(path, **TWO_SHAPES)
    runner.load()
    return runner


def test_multipliers_are_those_of_weights_and_each_moves_the_logits(runner):
    served = runner.weights
    of_weights = prompt_logits_of(runner, longest=len(PROMPT))

    def with_scaled_weights(names) -> np.ndarray:
        factors = {name: factor for knob in names for name, factor in SCALED[knob].items()}
        runner.weights = replace(
            served,
            params={
                group: {name: array * np.float32(factors.get(name, 1)) for name, array in arrays.items()}
                for group, arrays in served.params.items()
            },
        )
        return of_weights(PROMPT)

    wanted = with_scaled_weights(FACTORS)
    runner.weights = served
    multiplied = replace(runner.config.spec, factors=FactorSpec(**FACTORS))
    logits = prompt_logits_of(runner, longest=len(PROMPT), spec=multiplied)(PROMPT)
    np.testing.assert_allclose(logits, wanted, atol=1e-5 * np.abs(wanted).max())
    for knob in FACTORS:
        without = with_scaled_weights(set(FACTORS) - {knob})
        assert np.abs(without - logits).max() > 1e-4, f"{knob} does nothing"
    runner.weights = served
