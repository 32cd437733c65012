"""Rows, ids and log-probs of sparse attention by the native kernels are the same bits, however they are computed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayserve_moe import Engine, extract_indexer_topk_from_meta_info
from rayserve_moe.engine.speculation.model_drafts import ModelProposer
from rayserve_moe.execution.runner import HostRunner
from rayserve_moe.replay.encoding import routing_until
from rayserve_moe.replay.encoding.index import index_rows_of
from rayserve_moe.replay.index_rows import packed_index
from rayserve_moe.requests.records import GenerationRequest, ModelCard, RoutedExperts, SamplingParams
from rayserve_moe.requests.results import ChoiceResult
from tests.support.engine.cached_prompts import check_cached_prompts
from tests.support.engine.host_runners import TWO_SHAPES, WAY, card_of, prepared_runner
from tests.support.engine.outputs import Outcome, Outcomes, assert_identical
from tests.support.engine.run_requests import (
    cycle_for,
    preempt_every,
    run_alone,
    run_on,
    run_together,
    speculation_of,
)
from tests.support.engine.step_gate import unhurried, wait_for_tokens
from tests.support.engine.workload import mixed_workload
from tests.support.kernels.native_kernels import need_native_kernels
from tests.support.models.families import FAMILY_CASES, write_family
from tests.support.speculation.draft_checkpoints import with_prediction_layer, write_eagle_head

NAMES = ("glm_moe_dsa-1", "deepseek_v32-0", "minimax_m3_vl_text-1")
"""Cases, the last with an index of blocks. All but the first are slow."""
CASES = {case.name: case for case in FAMILY_CASES if case.name in NAMES}
PARAMS = [*((name, "auto") for name in NAMES), (NAMES[0], "fp8")]
DRAFTS, ALTERED = 3, 60
"""Number of drafts, and position of the altered set."""
NATIVE: dict[str, Any] = {
    "dtype": "bfloat16",
    "cpu_kernels": "native",
    "enable_return_routed_experts": True,
    "enable_return_indexer_topk": True,
}
WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "small chunks": {"chunk_tokens": 7, "num_rows": 3},
    "chunks of a page": {"chunk_tokens": 16, "overlaps": False},
    "nothing cached": {"caches_prefixes": False},
    "drafts, preempted": {
        "proposer": ModelProposer("drafts"),
        "num_drafts": DRAFTS,
        "chunk_tokens": 7,
        "intervene": preempt_every(7),
    },
    "preempted": {"intervene": preempt_every(5)},
    "preempted, pages lost": {"num_pages": 29, "intervene": preempt_every(11, forgets=True)},
    "drafts": {"proposer": ModelProposer("drafts"), "num_drafts": DRAFTS},
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(each, id=" ".join(each), marks=pytest.mark.slow if i else ()) for i, each in enumerate(PARAMS)
    ],
)
def kept(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A case, and what keys of its index are kept in."""
    return request.param


@pytest.fixture(scope="module")
def checkpoint(kept: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sparse model."""
    need_native_kernels()
    return write_family(CASES[kept[0]], tmp_path_factory.mktemp(kept[0]) / "model", seed=5, dtype="bfloat16")


@pytest.fixture(scope="module")
def drafting(checkpoint: Path, kept: tuple[str, str]) -> dict[str, Any]:
    """Return the draft settings: a prediction layer with its own index, or a head for MiniMax-M3."""
    directory, name = checkpoint.parent / "draft", "NEXTN"
    if kept[0] == NAMES[2]:
        name = "EAGLE3"
        write_eagle_head(directory, json.loads((checkpoint / "config.json").read_text()))
    else:
        with_prediction_layer(directory, checkpoint)
    draft = {"speculative_algorithm": name, "speculative_draft_model_path": str(directory)}
    return {**draft, "speculative_num_steps": DRAFTS}


@pytest.fixture(scope="module")
def card(checkpoint: Path) -> ModelCard:
    return card_of(checkpoint, enable_return_indexer_topk=True)


@pytest.fixture(scope="module")
def runner(checkpoint: Path, kept: tuple[str, str], drafting: dict[str, Any]) -> HostRunner:
    sizes = {**TWO_SHAPES, "precompile_bs_paddings": [WAY.num_rows * (1 + DRAFTS)], "index_cache_dtype": kept[1]}
    return prepared_runner(checkpoint, **sizes, **NATIVE, **drafting)


@pytest.fixture(scope="module")
def alone(runner: HostRunner, card: ModelCard) -> Outcomes:
    """Run each request alone, without drafts or cached prompts."""
    return run_alone(runner, card, mixed_workload(), way=replace(WAY, caches_prefixes=False))


def chosen_of(outcome: Outcome, card: ModelCard) -> np.ndarray:
    """Index rows of an outcome, none of which is missing."""
    assert outcome.routing is not None and card.index is not None
    rows, known = index_rows_of(outcome.routing, card.index)
    assert known.all()
    return rows


@pytest.mark.slow
def test_many_tokens_do_not_see_all_before_them(alone: Outcomes, card: ModelCard):
    """Many rows leave out tokens or blocks; otherwise the laws would be weak."""
    assert card.index is not None
    rows = np.concatenate([chosen_of(outcome, card) for outcome in alone.values()])
    assert ((rows != np.arange(card.index.top_k)).any(-1) & (rows >= 0).all(-1)).mean() > 0.4


@pytest.mark.sampled(4)
@pytest.mark.parametrize("changes", WAYS.values(), ids=WAYS.keys())
def test_the_way_does_not_show(runner: HostRunner, card: ModelCard, alone: Outcomes, changes: dict[str, Any]):
    cycle = cycle_for(runner, card, replace(WAY, **changes))
    found = run_on(cycle, card, mixed_workload(), intervene=changes.get("intervene"))
    cycle.scheduler.flush()
    assert_identical(found, alone)
    if "proposer" in changes:
        assert speculation_of(cycle).totals.drafted > 100


def test_cached_prompts_have_their_rows(runner: HostRunner, card: ModelCard, alone: Outcomes):
    check_cached_prompts(runner, card, alone)


def test_a_replay_has_the_log_probs_of_the_run_and_an_altered_set_is_seen(
    runner: HostRunner, card: ModelCard, alone: Outcomes
):
    """Experts and sets of answers are forced over their tokens; then a token sees itself or its own block only, by one
    index, which moves its log-prob and none before it."""
    assert card.index is not None
    runs = [(request, alone[request.request_id, 0]) for request in mixed_workload()]
    runs = [(request, outcome) for request, outcome in runs if is_long_and_greedy(request)]
    replayed, altered = [], []
    for request, outcome in runs:
        ids = np.append(request.prompt_ids, outcome.ids).astype(np.int32)
        nothing_new = SamplingParams(max_new_tokens=0, seed=0)
        scored = replace(request, prompt_ids=ids, sampling=nothing_new, score_prompt_from=0)
        rows = chosen_of(outcome, card)
        replayed.append(
            replace(scored, forced_routing=RoutedExperts(outcome.rows, parts={"index": packed_index(rows)}))
        )
        rows[ALTERED, 0] = -1
        rows[ALTERED, 0, 0] = ALTERED // card.index.block_size
        altered.append(replace(scored, forced_routing=RoutedExperts(outcome.rows, parts={"index": packed_index(rows)})))
    same, changed = (run_together(runner, card, requests, way=WAY) for requests in (replayed, altered))
    for request, outcome in runs:
        found = [each[request.request_id, 0] for each in (same, changed)]
        ours, theirs = (each.prompt.columns["logprobs"] for each in found if each.prompt is not None)
        np.testing.assert_allclose(ours[len(request.prompt_ids) - 1 :], outcome.logprobs, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(chosen_of(found[0], card)[:-1], chosen_of(outcome, card))
        np.testing.assert_array_equal(theirs[:ALTERED], ours[:ALTERED])
        assert abs(theirs[ALTERED] - ours[ALTERED]) > 1e-4


def is_long_and_greedy(request: GenerationRequest) -> bool:
    return len(request.prompt_ids) > ALTERED and request.sampling.temperature == 0 < request.sampling.max_new_tokens


@pytest.mark.sampled(3)
@pytest.mark.parametrize("count", [1, 7, 13])
def test_a_request_of_a_lost_replica_goes_on_with_the_same_bits(
    runner: HostRunner, card: ModelCard, alone: Outcomes, count: int
):
    """Rows of the tokens that it had committed came with them; the other replica returns those that follow."""
    requests = [request for request in mixed_workload() if request.sampling.max_new_tokens > count]
    committed = [
        committed_of(request, choice, outcome=alone[request.request_id, choice], count=count)
        for request in requests
        for choice in range(request.sampling.n)
    ]
    streamed = [replace(request, stream_routed_experts=True) for request in requests]
    cycle = cycle_for(runner, card, WAY)
    found = run_on(cycle, card, streamed, committed=committed)
    cycle.scheduler.flush()
    for before in committed:
        key = before.request_id, before.choice_index
        whole, rest = alone[key], found[key]
        assert rest.ids == whole.ids and rest.logprobs == whole.logprobs
        assert rest.routing is not None and before.routing is not None
        assert rest.routing.start == before.routing.start + len(before.routing.rows)
        np.testing.assert_array_equal(rest.rows, whole.rows[rest.routing.start :])
        np.testing.assert_array_equal(chosen_of(rest, card), chosen_of(whole, card)[rest.routing.start :])


def committed_of(request: GenerationRequest, choice: int, *, outcome: Outcome, count: int) -> ChoiceResult:
    """Journal record of a choice after `count` generated tokens."""
    assert outcome.routing is not None
    rows = routing_until(outcome.routing, len(request.prompt_ids) + count - 1)
    ids, logprobs = outcome.ids[:count], outcome.logprobs[:count]
    return ChoiceResult(request.request_id, choice, ids, logprobs, ranks=[1] * len(ids), routing=rows)


def test_rows_that_the_store_has_dropped_are_missing_and_others_are_right(
    runner: HostRunner, card: ModelCard, alone: Outcomes
):
    """A store of a few kilobytes cannot keep the rows of all requests."""
    assert card.index is not None
    small = replace(card, index=replace(card.index, max_bytes=1 << 14))
    found = run_together(runner, small, mixed_workload(), way=WAY)
    assert_identical(found, alone, index=False)
    num_missing = num_known = 0
    for key, outcome in found.items():
        assert outcome.routing is not None and outcome.routing.missing == ()
        rows, known = index_rows_of(outcome.routing, card.index)
        np.testing.assert_array_equal(rows[known], chosen_of(alone[key], card)[known])
        num_missing, num_known = num_missing + int((~known).sum()), num_known + int(known.sum())
    assert num_missing > 500 and num_known > 100


class Served:
    """An engine, and what each of two checkpoints answers on its own."""

    def __init__(self, engine: Engine, paths: tuple[Path, Path]) -> None:
        self.engine, self.paths = engine, paths

    def rows_under(self, path: Path, token_ids: list[int]) -> np.ndarray:
        """Index rows of all tokens, recomputed under a checkpoint's weights with nothing cached."""
        assert self.engine.update_weights_from_disk(path, weight_version=f"check {time.monotonic_ns()}").success
        answer = self.engine.generate(input_ids=token_ids, max_new_tokens=0, return_indexer_topk=True)
        return extract_indexer_topk_from_meta_info(answer)


@pytest.fixture(scope="module", params=[NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    need_native_kernels()
    folder = tmp_path_factory.mktemp("versions")
    paths = tuple(
        write_family(CASES[request.param], folder / str(seed), seed=seed, dtype="bfloat16") for seed in (5, 6)
    )
    with Engine(str(paths[0]), **{**TWO_SHAPES, **NATIVE}) as engine:
        yield Served(engine, (paths[0], paths[1]))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_rows_are_of_the_weights_that_they_name(served: Served, mode: str):
    """Retracted, rows of the prompt are computed anew, and those of sampled tokens stay with their log-probs.

    In place, later tokens see keys of other weights, which no model alone has: their rows name the new weights.
    """
    engine, prompt = served.engine, list(range(3, 73))
    assert engine.update_weights_from_disk(served.paths[0], weight_version="old").success
    asked = {"max_new_tokens": 400, "temperature": 0, "ignore_eos": True, "return_indexer_topk": True}
    with ThreadPoolExecutor(1) as beside, unhurried(engine.loop):
        answering = beside.submit(engine.generate, input_ids=prompt, **asked)
        wait_for_tokens(engine.loop, 15)
        engine.pause_generation(mode)
        assert engine.update_weights_from_disk(served.paths[1], weight_version="new").success
        engine.continue_generation()
        answer = answering.result(600)
    rows, info = extract_indexer_topk_from_meta_info(answer), answer["meta_info"]["indexer_topk_info"]
    token_ids = [*prompt, *answer["output_ids"]]
    ranges = [tuple(entry) for entry in info["weight_version"]]
    assert {version for *_, version in ranges} == {"old", "new"} and ranges[-1][1] == len(rows) == len(token_ids) - 1
    wanted = {
        "old": served.rows_under(served.paths[0], token_ids),
        "new": served.rows_under(served.paths[1], token_ids),
    }
    assert (wanted["old"] != wanted["new"]).any()
    for first, last, version in ranges:
        if version == "old" or mode == "retract":
            np.testing.assert_array_equal(rows[first:last], wanted[version][first:last])
