"""Times of tokens and choices are those of the clock, whatever steps bring at once, and across preemptions."""

from __future__ import annotations

import numpy as np
import pytest

from rayserve_moe.engine.output_dispatch import record_end, record_tokens
from rayserve_moe.observability.metrics import RequestMetrics
from rayserve_moe.requests.records import GenerationRequest, SamplingParams
from rayserve_moe.scheduling.row_table import RowTable
from rayserve_moe.scheduling.sequence import Sequence

PROMPT = np.array([1, 2, 3], np.int32)


@pytest.fixture
def table():
    return RowTable(num_rows=4, max_tokens=32, page_size=4)


@pytest.fixture
def metrics():
    return RequestMetrics()


def sequence_at(accepted_at, *, index=0):
    sequence = Sequence(GenerationRequest("r", PROMPT, SamplingParams(n=2)), index, seed=0, stop_token_ids=frozenset())
    sequence.times.accepted_at = accepted_at
    return sequence


def total(histogram):
    state = histogram.state()
    return state.at_or_below[-1], pytest.approx(state.total)


def test_first_tokens_and_gaps_are_told_apart(table, metrics):
    table.take(0, sequence_at(1.0))
    table.take(2, sequence_at(2.0))
    record_tokens(metrics, table, rows=np.array([0]), now=4.0)
    record_tokens(metrics, table, rows=np.array([0, 2]), now=5.0)
    record_tokens(metrics, table, rows=np.array([0, 2]), now=5.5)
    record_tokens(metrics, table, rows=np.zeros(0, np.int64), now=9.0)
    assert total(metrics.time_to_first_token) == (2, 3.0 + 3.0)
    assert total(metrics.inter_token) == (3, 1.0 + 0.5 + 0.5)


def test_a_preempted_choice_goes_on_from_its_last_token(table, metrics):
    sequence = sequence_at(0.0)
    table.take(1, sequence)
    record_tokens(metrics, table, rows=np.array([1]), now=1.0)
    table.leave(sequence)
    table.take(1, sequence_at(1.5))
    record_tokens(metrics, table, rows=np.array([1]), now=2.0)
    table.take(3, sequence)
    record_tokens(metrics, table, rows=np.array([3]), now=4.0)
    assert total(metrics.time_to_first_token) == (2, 1.0 + 0.5)
    assert total(metrics.inter_token) == (1, 3.0)


def test_a_choice_that_ends_is_counted_once_and_its_prompt_with_the_first(metrics):
    first, second = sequence_at(1.0), sequence_at(1.0, index=1)
    first.times.started_at, first.cache.num_cached = 3.0, 2
    record_end(metrics, first, kind="stop", now=6.0)
    record_end(metrics, second, kind="abort", now=6.0)
    assert metrics.finished == {"stop": 1, "abort": 1}
    assert total(metrics.queue_time) == (1, 2.0) and total(metrics.end_to_end) == (2, 10.0)
    assert total(metrics.prompt_tokens) == (1, 3.0) and total(metrics.output_tokens) == (2, 0.0)
    assert (metrics.num_prompt_tokens, metrics.num_cached_tokens) == (3, 2)
