"""Columns: cut and joined anywhere, they are the same; a request gets those that it asks for, and no others."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.requests.columns import (
    OUTPUT_COLUMNS,
    PROBED_COLUMNS,
    WANTS_COLUMNS,
    WANTS_MASK,
    ColumnLog,
    Columns,
    Ragged,
    as_array,
    concat,
    evidence_row,
    names_in,
    output_widths,
    ragged,
    take,
)
from rayserve_moe.requests.records import GenerationRequest, ListedInPrompt, SamplingParams
from rayserve_moe.scheduling.token_probe import IS_FINITE, probe_for

PROMPT = np.arange(10, 30, dtype=np.int32)
EVERYTHING: dict[str, Any] = {
    "num_top_logprobs": 2,
    "logprob_token_ids": (7, 9, 11),
    "return_entropy": True,
    "return_sampling_mask": True,
}


OF_OTHERS = {"native_experts", "expert_margins", "expert_ranks", "sketches", "layer_states"}
"""Columns that audits and teachers ask for."""


def request(**fields: Any) -> GenerationRequest:
    return GenerationRequest("r", PROMPT, SamplingParams(max_new_tokens=8), **fields)


def step_columns(count: int, *, seed: int = 0) -> Columns:
    """What a step may find for `count` samples, wider than any request wants."""
    generator = np.random.default_rng(seed)
    masks = [generator.integers(0, 99, generator.integers(0, 4)).astype(np.int32) for _ in range(count)]
    return {
        "top_ids": generator.integers(0, 99, (count, 5)).astype(np.int32),
        "top_logprobs": generator.random((count, 5), np.float32),
        "entropy": generator.random(count, np.float32),
        "listed_logprobs": generator.random((count, 6), np.float32),
        "drafted": generator.integers(0, 2, count).astype(np.int8),
        "mask_ids": ragged(masks),
        "mask_logprobs": generator.random(count, np.float32),
    }


def as_lists(columns: Columns) -> dict[str, list]:
    return {name: values.tolist() for name, values in columns.items()}


@given(count=st.integers(0, 7), cuts=st.lists(st.integers(0, 7), max_size=3), seed=st.integers(0, 9))
def test_pieces_make_the_whole(count: int, cuts: list[int], seed: int):
    whole = step_columns(count, seed=seed)
    borders = [0, *sorted(min(cut, count) for cut in cuts), count]
    pieces = [take(whole, slice(first, last)) for first, last in pairwise(borders)]
    assert as_lists(concat(pieces)) == as_lists(whole)
    is_kept = np.random.default_rng(seed).random(count) < 0.5
    kept = take(whole, is_kept)
    assert as_lists(kept) == {
        n: [v for v, k in zip(each, is_kept, strict=True) if k] for n, each in as_lists(whole).items()
    }


@pytest.mark.parametrize("name", OUTPUT_COLUMNS)
def test_a_choice_logs_what_its_request_wants_and_no_more(name: str):
    asked = {
        "top_ids": {"num_top_logprobs": 2},
        "top_logprobs": {"num_top_logprobs": 2},
        "entropy": {"return_entropy": True},
        "listed_logprobs": {"logprob_token_ids": (7, 9, 11)},
        "drafted": {"return_draft_tokens": True},
        "mask_ids": {"return_sampling_mask": True},
        "mask_logprobs": {"return_sampling_mask": True},
    }[name]
    widths = output_widths(request(**asked))
    log, found = ColumnLog(widths), step_columns(4)
    entries = {key: values.entries() if isinstance(values, Ragged) else values for key, values in found.items()}
    for index in (2, 0):
        log.append(entries, index)
    assert name in log.slice(0, 2) and output_widths(request()) == {}
    for key, values in log.slice(0, 2).items():
        expected = [found[key].tolist()[index] for index in (2, 0)]
        assert values.tolist() == ([row[: widths[key]] for row in expected] if widths[key] else expected)
    assert len(log.slice(1, 1)[name]) == 0
    again = ColumnLog(widths)
    again.extend(log.slice(0, 2))
    assert as_lists(again.slice(0, 2)) == as_lists(log.slice(0, 2))


def test_steps_are_asked_for_the_columns_that_they_compute():
    log = ColumnLog(output_widths(request(**EVERYTHING)))
    assert names_in(log.bits, source="step") == ("top_ids", "top_logprobs")
    assert set(names_in(log.bits, source="evidence")) == {"entropy", "listed_logprobs", "mask_ids", "mask_logprobs"}
    assert names_in(ColumnLog({}).bits, source="step") == ()


@pytest.mark.parametrize(
    ("fields", "row"),
    [
        ({}, None),
        ({"num_top_logprobs": 2}, None),
        ({"raw_logprobs": True}, [1 + WANTS_COLUMNS, -1, -1]),
        ({"return_entropy": True}, [WANTS_COLUMNS, -1, -1]),
        ({"return_sampling_mask": True}, [WANTS_MASK, -1, -1]),
        ({"return_draft_tokens": True}, None),
        ({"return_sampling_mask": True, "raw_logprobs": True}, [1 + WANTS_MASK + WANTS_COLUMNS, -1, -1]),
        ({"logprob_token_ids": (5, 6)}, [WANTS_COLUMNS, 5, 6]),
    ],
)
def test_the_evidence_program_is_asked_in_one_row(fields: dict[str, Any], row: list[int] | None):
    asking = request(**fields)
    found = evidence_row(asking, output_widths(asking))
    assert (found is None) if row is None else (found is not None and found[:3].tolist() == row)


def test_a_probe_has_each_column_over_its_own_positions():
    listed = ListedInPrompt(4, np.full((3, 2), 5, np.int32))
    asking = replace(
        request(num_top_logprobs=2), score_prompt_from=12, listed_in_prompt=listed, return_hidden_states="last"
    )
    probe = probe_for(asking, "7")
    assert probe is not None and set(probe.columns) == set(PROBED_COLUMNS) - OF_OTHERS and probe.frontier == 4
    pending = probe.pending(0, 100)
    assert pending is not None and (pending.position, pending.end) == (4, 20)
    assert pending.targets.tolist() == [-1] * 8 + [*range(23, 30), -1]
    assert pending.listed[:4].tolist() == [[5, 5]] * 3 + [[-1, -1]]
    assert probe.needs_block(4, 5) and not probe.needs_block(0, 4) and probe.needs_block(7, 8)
    assert not probe.needs_block(19, 20), "its hidden state alone is wanted"
    count = len(pending.targets)
    found: Columns = {name: np.zeros((count, 3), np.float32) for name in ("top_ids", "top_logprobs", "hidden")}
    found |= {"listed_logprobs": np.zeros((count, 4), np.float32), "ranks": np.ones(count, np.int32)}
    found |= {"logprobs": -np.arange(count, dtype=np.float32), IS_FINITE: np.ones(count, np.bool_)}
    probe.take(4, take(found, slice(0, 10)))
    half = probe.result()
    assert half.columns["logprobs"].tolist() == [-8.0, -9.0] and len(half.columns["hidden"]) == 0
    probe.take(14, take(found, slice(10, count)))
    whole = probe.result(np.ones((2, 3), np.float32))
    shapes = {name: as_array(values).shape for name, values in whole.columns.items()}
    assert shapes == {
        "logprobs": (7,),
        "ranks": (7,),
        "top_ids": (7, 2),
        "top_logprobs": (7, 2),
        "listed_logprobs": (3, 2),
        "hidden": (3, 3),
    }
    assert whole.starts == {**dict.fromkeys(shapes, 12), "listed_logprobs": 4, "hidden": 19}
    assert probe.is_complete and probe.pending(0, 100) is None and whole.weight_version == "7"


def test_a_change_of_weights_discards_a_probe_that_is_not_complete():
    probe = probe_for(replace(request(), score_prompt_from=17), "1")
    assert probe is not None
    columns: Columns = {
        "logprobs": np.zeros(1, np.float32),
        "ranks": np.ones(1, np.int32),
        IS_FINITE: np.ones(1, np.bool_),
    }
    probe.take(17, columns)
    probe.change_weights("2")
    assert probe.frontier == 17 and probe.result().weight_version == "2"
    for position in (17, 18):
        probe.take(position, columns)
    probe.change_weights("3")
    assert probe.is_complete and probe.result().weight_version == "2"
