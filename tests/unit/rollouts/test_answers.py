"""Samples have the rows that the server knows of them, whichever of them came with those of the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from rayserve_moe.replay.encoding import encode_rollout
from rayserve_moe.replay.index_rows import packed_index
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.records import (
    GenerationRequest,
    IndexLayout,
    ModelCard,
    RoutedExperts,
    RoutingLayout,
    SamplingParams,
)
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.rollouts.answers import Faulty, SampleRequest, rollouts_in
from rayserve_moe.serving.api.answers.routing import RoutingWriter
from tests.support.routing.routing_arrays import random_rows, same

LAYOUT = RoutingLayout(num_hidden_layers=2, layer_ids=(0, 1), num_experts=8, top_k=2)
INDEX = IndexLayout((0,), (0, 1), top_k=2)
CARD = ModelCard("", 64, 64, (), LAYOUT, returns_routing=True, index=INDEX)
PROMPT, NUM_OUTPUTS = (5, 6, 7, 8), 3
NUM_ROWS = len(PROMPT) + NUM_OUTPUTS - 1


def sample(*versions: str, seed: int = 0, missing: tuple = ()) -> RoutedExperts:
    """Routing of a prompt and of outputs; of the versions, one has the prompt, and the next the outputs."""
    rows = np.concatenate([random_rows(LAYOUT, 4, seed=ord(versions[0])), random_rows(LAYOUT, NUM_ROWS - 4, seed=seed)])
    rows[[p for first, last in missing for p in range(first, last)]] = 0
    ranges = ((0, 4, versions[0]), (4, NUM_ROWS, versions[1])) if len(versions) > 1 else ((0, NUM_ROWS, versions[0]),)
    return RoutedExperts(rows, missing=missing, source=((0, NUM_ROWS, "computed"),), weight_version=ranges)


def container(routings: Sequence[RoutedExperts], *, index: bool = False) -> bytes:
    """The answer to a request for as many samples, as the server writes it."""
    sampling = SamplingParams(n=len(routings))
    asked = GenerationRequest("r", np.asarray(PROMPT, np.int32), sampling, True, return_indexer_topk=index)
    writer = RoutingWriter(
        CARD,
        "binary",
        shares_prompt_rows=True,
        request_of_choice=[asked] * len(routings),
        index_form="packed",
    )
    told = {
        "prompt_tokens": len(PROMPT),
        "cached_tokens": 0,
        "weight_version": "b",
        "finish_reason": {"type": "length"},
        "e2e_latency": 0.1,
        "output_token_logprobs": [[-0.5, 9, None]] * NUM_OUTPUTS,
    }
    answers = [
        {"text": "", "output_ids": [9] * NUM_OUTPUTS, "meta_info": {**told, **writer.sglang_fields(choice, result)}}
        for choice, result in enumerate(ChoiceResult(finish=FinishReason("length"), routing=rows) for rows in routings)
    ]
    return encode_rollout({"answers": answers}, writer.raw_rows)


@pytest.mark.parametrize(
    "routings",
    [
        [sample("a"), sample("a", seed=1), sample("a", seed=2)],
        [sample("a", "b"), sample("a", "b", seed=1)],
        [sample("b", "a"), sample("b", seed=1)],
        [sample("a"), sample("b", seed=1), sample("a", seed=2), sample("b", seed=3)],
        [sample("b", missing=((1, 2),)), sample("a", seed=1), sample("a", seed=2)],
        [sample("a"), sample("b", seed=1, missing=((0, 4),))],
    ],
    ids=["one version", "changed after prompts", "prompts anew", "one later", "the first lacks rows", "one lacks all"],
)
def test_every_sample_has_its_own_rows(routings: list[RoutedExperts]) -> None:
    request = SampleRequest("p", PROMPT, {}, seed=0, count=len(routings))
    (rollouts,) = rollouts_in(container(routings), [request], started_at=0.0)
    for rollout, routing in zip(rollouts, routings, strict=True):
        assert rollout.routing is not None and same(rollout.routing, routing)


def test_a_row_that_a_sample_lacks_is_that_of_another_under_the_same_weights() -> None:
    lacking, request = sample("a", missing=((1, 2),), seed=1), SampleRequest("p", PROMPT, {}, seed=0, count=2)
    ((_, rollout),) = rollouts_in(container([sample("a"), lacking]), [request], started_at=0.0)
    assert rollout.routing is not None and same(rollout.routing, sample("a", seed=1))


def indexed(routing: RoutedExperts, *, missing: Sequence[int] = ()) -> RoutedExperts:
    """The same with index rows: each token sees itself alone, in either layer."""
    chosen = np.full((NUM_ROWS, 1, 2), -1, np.int32)
    chosen[:, 0, 0] = np.arange(NUM_ROWS)
    index = packed_index(chosen)
    index[list(missing)] = None
    return replace(routing, parts={"index": index})


def test_every_sample_has_its_index_rows() -> None:
    routings = [indexed(sample("a")), indexed(sample("a", seed=1)), indexed(sample("a", seed=2), missing=[2, 5])]
    request = SampleRequest("p", PROMPT, {}, seed=0, count=3, returns_index=True)
    (rollouts,) = rollouts_in(container(routings, index=True), [request], started_at=0.0)
    for rollout, routing in zip(rollouts, routings, strict=True):
        assert rollout.routing is not None and rollout.index_layout == INDEX
        assert rollout.routing.index.tolist() == routing.index.tolist()
    assert rollouts[0].index_rows.shape == (NUM_ROWS, 2, 2) and rollouts[2].index_rows is None
    (plain,) = rollouts_in(container(routings[:1]), [SampleRequest("p", PROMPT, {}, seed=0)], started_at=0.0)
    assert plain[0].index_layout is None and plain[0].index_rows is None


def test_index_rows_of_other_positions_are_faulty() -> None:
    body = container([indexed(sample("a"))], index=True)
    short = body.replace(b'"start":0,"layer_ids":[0,1],"indexer', b'"start":1,"layer_ids":[0,1],"indexer')
    assert short != body
    request = SampleRequest("p", PROMPT, {}, seed=0, returns_index=True)
    with pytest.raises(Faulty, match="indexer_topk does not have the positions of routed_experts"):
        rollouts_in(short, [request], started_at=0.0)


def test_samples_without_a_prompt_are_faulty() -> None:
    bodiless = [replace(sample("a"), start=4, rows=sample("a").rows[4:], weight_version=((4, 6, "a"),), source=())] * 2
    with pytest.raises(Faulty, match="does not have all rows"):
        rollouts_in(container(bodiless), [SampleRequest("p", PROMPT, {}, seed=0, count=2)], started_at=0.0)


@pytest.mark.parametrize("prompt", [(5, 6, 7), (5, 6, 7, 8, 9)])
def test_the_answer_to_another_prompt_is_faulty(prompt: tuple[int, ...]) -> None:
    request = SampleRequest("p", prompt, {}, seed=0, returns_routing=False)
    with pytest.raises(Faulty, match="another prompt"):
        rollouts_in(container([sample("a")]), [request], started_at=0.0)
