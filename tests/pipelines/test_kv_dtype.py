"""Keys and values of 8 bits: as independent of scheduling as wider ones (`test_kv_pool`: how they round)."""

from __future__ import annotations

import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.execution.runner import HostRunner
from tests.support.engine.host_runners import TWO_SHAPES, WAY, card_of, prepared_runner
from tests.support.engine.outputs import Outcomes, assert_all_same
from tests.support.engine.run_requests import Way, run_alone, run_together
from tests.support.engine.workload import mixed_workload


def runner_with(path: Path, kv_cache_dtype: str) -> HostRunner:
    return prepared_runner(path, **TWO_SHAPES, kv_cache_dtype=kv_cache_dtype, enable_return_routed_experts=True)


@pytest.fixture(scope="module")
def narrow(core_checkpoint: Path) -> HostRunner:
    return runner_with(core_checkpoint, "fp8")


@pytest.fixture(scope="module")
def expected(narrow: HostRunner, core_checkpoint: Path) -> Outcomes:
    return run_alone(narrow, card_of(core_checkpoint), mixed_workload(), way=WAY)


def first_logprobs(outcomes: Outcomes) -> np.ndarray:
    """Of the first token of each choice; 0 where a choice ends without one."""
    return np.array([outcome.logprobs[0] if outcome.logprobs else 0.0 for outcome in outcomes.values()])


@pytest.mark.slow
@pytest.mark.parametrize("way", [Way(16, 32, 7), Way(3, 32, 32, caches_prefixes=False)], ids=str)
def test_outputs_do_not_depend_on_chunks_and_batches(way, narrow, expected, core_checkpoint):
    assert_all_same(run_together(narrow, card_of(core_checkpoint), mixed_workload(), way=way), expected)


@pytest.mark.slow
def test_they_are_rounded_to_a_byte_each(narrow, expected, core_checkpoint):
    wide = runner_with(core_checkpoint, "auto")
    found = run_alone(wide, card_of(core_checkpoint), mixed_workload(), way=WAY)
    assert (first_logprobs(found) != first_logprobs(expected)).any()
    pools = [runner.served.state(8).pools["kv"][0] for runner in (narrow, wide)]
    assert [math.prod(pool.shape) for pool in pools] == [math.prod(pools[0].shape)] * 2
    assert [pool.dtype.itemsize for pool in pools] == [1, jnp.dtype(wide.served.dtype).itemsize]
