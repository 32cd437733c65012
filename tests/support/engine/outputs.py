"""What a choice came to, in a form that two runs can be compared in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rayserve_moe import extract_routed_experts_from_meta_info
from rayserve_moe.requests.columns import Columns, PromptColumns, Ragged
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.records import RoutedExperts, RoutingLayout

LOGPROB_TOLERANCE = 1e-5
RECURRENT_TOLERANCE = 1e-4
"""Bound of log-probs of models with recurrent layers if sums have another order: states carry roundings on.

Measured: 5.2e-5 at most for qwen3_next-0, by other devices and by other shapes of products. Its logits in float32 are
4.5e-5 of their spread away from transformers.
"""
STATE_TOLERANCE = 3e-5
"""Of hidden states, whose numbers are of the size of 1 to 4."""


@dataclass
class Outcome:
    """Generated ids with their log-probs, the end, and routing [rows, MoE layers, k] where it was asked for.

    `num_cached` tokens of the prompt were found cached; `columns` and `prompt` hold what else was requested.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: FinishReason | None = None
    routing: RoutedExperts | None = None
    num_cached: int = 0
    columns: Columns = field(default_factory=dict)
    prompt: PromptColumns | None = None
    tolerance: float = LOGPROB_TOLERANCE
    """Bound of differences of log-probs of its model."""

    @property
    def rows(self) -> np.ndarray:
        assert self.routing is not None, "routing was not returned"
        return self.routing.rows


Outcomes = dict[tuple[str, int], Outcome]
"""By request id and choice index."""


def outcome_of_answer(answer: Mapping[str, Any], layout: RoutingLayout) -> Outcome:
    """Read an answer of `Engine.generate` that was asked for log-probs; index rows are left out."""
    meta = answer["meta_info"]
    reason = meta["finish_reason"]
    routing = None
    if meta.get("routed_experts") is not None:
        wire = extract_routed_experts_from_meta_info(answer).reshape(-1, layout.num_hidden_layers, layout.top_k)
        routing = RoutedExperts(wire[:, list(layout.layer_ids)].astype(layout.dtype))
    finish = FinishReason(reason["type"], reason.get("matched"), reason.get("message"))
    logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
    return Outcome(answer["output_ids"], logprobs, finish, routing, meta["cached_tokens"])


def assert_same(
    actual: Outcome,
    expected: Outcome,
    *,
    routing: bool = True,
    index: bool = True,
    tolerance: float = LOGPROB_TOLERANCE,
) -> None:
    """Assert that two runs of one choice agree: ids, end, log-probs, and every routing row, order included.

    So must all index rows, where there are any, unless `index` is false.

    So must all columns, where there are any.

    Rows are compared without excluding near ties: the models of the tests are float32, and no row of theirs has come
    out otherwise. A row that ever does deserves to be looked at before it is excused.
    """
    tolerance = max(tolerance, actual.tolerance, expected.tolerance)
    assert actual.ids == expected.ids
    assert actual.finish == expected.finish
    np.testing.assert_allclose(actual.logprobs, expected.logprobs, rtol=0, atol=tolerance)
    assert_same_columns(actual.columns, expected.columns, tolerance=tolerance)
    assert_same_prompt(actual.prompt, expected.prompt, tolerance=tolerance)
    if routing and actual.finish is not None and actual.finish.kind == "error" and not actual.ids:
        assert_known_rows_agree(actual, expected)
    elif routing:
        np.testing.assert_array_equal(actual.rows, expected.rows)
        assert actual.routing is not None and actual.routing.missing == ()
        if index:
            assert_same_index(actual.routing, expected.routing)
        assert_same_gates(actual.routing, expected.routing, tolerance=tolerance)


def assert_same_index(actual: RoutedExperts, expected: RoutedExperts | None) -> None:
    """Assert that index rows are equal and all known, if any are expected."""
    if expected is not None and expected.index is not None:
        assert actual.index is not None and all(row is not None for row in actual.index)
        np.testing.assert_array_equal(actual.index, expected.index)


def assert_same_gates(actual: RoutedExperts, expected: RoutedExperts | None, *, tolerance: float) -> None:
    """Assert that gates are equal and all known, where both outcomes captured them."""
    if actual.gates is not None and expected is not None and expected.gates is not None:
        assert not np.isnan(actual.gates).any()
        np.testing.assert_allclose(actual.gates, expected.gates, rtol=0, atol=tolerance)


def assert_known_rows_agree(actual: Outcome, expected: Outcome) -> None:
    """Assert that rows are the same where neither reports them missing: what has ended with an error before its first
    token has those that had arrived by then."""
    count = min(len(actual.rows), len(expected.rows))
    is_known = np.ones(count, bool)
    for each in (actual, expected):
        assert each.routing is not None
        for first, last in each.routing.missing:
            is_known[first - each.routing.start : last - each.routing.start] = False
    np.testing.assert_array_equal(actual.rows[:count][is_known], expected.rows[:count][is_known])


def assert_same_columns(actual: Columns, expected: Columns, *, tolerance: float = LOGPROB_TOLERANCE) -> None:
    """Assert that columns have the same ids, and numbers within the tolerance of their kind."""
    assert actual.keys() == expected.keys()
    for name, ours in actual.items():
        theirs = expected[name]
        if isinstance(ours, Ragged):
            assert ours.tolist() == theirs.tolist(), name
        elif np.issubdtype(ours.dtype, np.floating):
            is_state = name in ("hidden", "layer_states", "sketches", "expert_margins")
            bound = tolerance * (STATE_TOLERANCE / LOGPROB_TOLERANCE if is_state else 1.0)
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=bound, err_msg=name)
        elif name != "ranks":
            np.testing.assert_array_equal(ours, theirs, err_msg=name)


def assert_same_prompt(
    actual: PromptColumns | None, expected: PromptColumns | None, *, tolerance: float = LOGPROB_TOLERANCE
) -> None:
    """Assert that the same was found of a prompt."""
    assert (actual is None) == (expected is None)
    if actual is not None and expected is not None:
        assert actual.starts == expected.starts
        assert_same_columns(actual.columns, expected.columns, tolerance=tolerance)


def assert_all_same(
    actual: Outcomes,
    expected: Outcomes,
    *,
    routing: bool = True,
    index: bool = True,
    tolerance: float = LOGPROB_TOLERANCE,
) -> None:
    """Assert that two runs of the same requests agree choice by choice."""
    assert actual.keys() == expected.keys()
    for key, outcome in actual.items():
        assert_same(outcome, expected[key], routing=routing, index=index, tolerance=tolerance)


def assert_identical(actual: Outcomes, expected: Outcomes, *, routing: bool = True, index: bool = True) -> None:
    """Assert that two runs of the same requests agree choice by choice, in log-probs to the last bit."""
    assert_all_same(actual, expected, routing=routing, index=index)
    for key, outcome in actual.items():
        np.testing.assert_array_equal(outcome.logprobs, expected[key].logprobs)
        if routing and outcome.routing is not None:
            assert_same_gates(outcome.routing, expected[key].routing, tolerance=0.0)
