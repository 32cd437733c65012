"""The rows of a prompt go with one choice where all have the same, and with every choice that has others."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.records import GenerationRequest, ModelCard, RoutedExperts, RoutingLayout, SamplingParams
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.serving.api.answers.routing import RoutingWriter

LAYOUT = RoutingLayout(num_hidden_layers=2, layer_ids=(0, 1), num_experts=8, top_k=2)
CARD = ModelCard("", 64, 64, (), LAYOUT, returns_routing=True)
REQUEST = GenerationRequest("one", np.arange(4, dtype=np.int32), SamplingParams(n=2), return_routed_experts=True)
FIRST = RoutedExperts(
    np.arange(6 * 4).reshape(6, 2, 2).astype(np.uint8) % 8, weight_version=((0, 6, "a"),), source=((0, 6, "computed"),)
)
LACKING = np.concatenate([FIRST.rows[:1], 7 - FIRST.rows[1:2], FIRST.rows[2:]])
OTHER_TAIL = np.concatenate([FIRST.rows[:4], 7 - FIRST.rows[4:]])


def rows_told_of(second: RoutedExperts) -> list[int]:
    writer = RoutingWriter(CARD, "binary", shares_prompt_rows=True, request_of_choice=[REQUEST] * 2)
    results = [ChoiceResult(finish=FinishReason("length"), routing=routing) for routing in (FIRST, second)]
    told = [writer.fields(choice, result)["routed_experts_info"] for choice, result in enumerate(results)]
    assert [info["start"] + info["shape"][0] for info in told] == [6, 6]
    for info, rows in zip(told, writer.raw_rows, strict=True):
        assert len(rows) == info["shape"][0] - sum(last - first for first, last in info["missing"])
    return [info["shape"][0] for info in told]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rows": OTHER_TAIL}, [6, 2]),
        ({"source": ((0, 4, "cached"), (4, 6, "computed"))}, [6, 2]),
        ({"weight_version": ((0, 4, "a"), (4, 6, "b"))}, [6, 2]),
        ({"weight_version": ((0, 2, "a"), (2, 6, "b"))}, [6, 6]),
        ({"rows": FIRST.rows[::-1].copy()}, [6, 6]),
        ({"missing": ((1, 2),), "rows": LACKING}, [6, 2]),
        ({"missing": ((1, 2),), "rows": FIRST.rows[::-1].copy()}, [6, 6]),
        ({"missing": ((1, 2),), "weight_version": ((0, 2, "b"), (2, 6, "a"))}, [6, 6]),
        ({"missing": ((0, 4),), "weight_version": ((4, 6, "b"),)}, [6, 6]),
    ],
)
def test_a_choice_brings_the_prompt_rows_in_which_it_differs(changes, told):
    assert rows_told_of(dataclasses.replace(FIRST, **changes)) == told
