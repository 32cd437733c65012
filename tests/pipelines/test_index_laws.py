"""Rows, ids and log-probs of sparse attention by the native kernels are the same bits, however they are computed."""

from __future__ import annotations

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
from rayserve_moe.requests.records import GenerationRequest, ModelCard
from rayserve_moe.requests.results import ChoiceResult
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
from tests.support.speculation.draft_checkpoints import with_prediction_layer

NAMES = ("glm_moe_dsa-1", "deepseek_v32-0")
"""Cases; of the first, keys of 8 bits too."""
PARAMS = [(NAMES[0], "auto"), (NAMES[1], "auto"), (NAMES[0], "fp8")]
DRAFTS = 3
NATIVE: dict[str, Any] = {
    "dtype": "bfloat16",
    "cpu_kernels": "native",
    "enable_return_routed_experts": True,
    "enable_return_indexer_topk": True,
}
DRAFTED: dict[str, Any] = {"speculative_algorithm": "NEXTN", "speculative_num_steps": DRAFTS}
WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "small chunks": {"chunk_tokens": 7, "num_rows": 3},
    "chunks of a page": {"chunk_tokens": 16, "overlaps": False},
    "nothing cached": {"caches_prefixes": False},
    "preempted": {"intervene": preempt_every(5)},
    "preempted, pages lost": {"num_pages": 29, "intervene": preempt_every(11, forgets=True)},
    "drafts of its own layer": {"proposer": ModelProposer("drafts"), "num_drafts": DRAFTS},
    "drafts, preempted": {
        "proposer": ModelProposer("drafts"),
        "num_drafts": DRAFTS,
        "chunk_tokens": 7,
        "intervene": preempt_every(7),
    },
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
    """A sparse model with a prediction layer, which has an index of its own."""
    need_native_kernels()
    (case,) = [case for case in FAMILY_CASES if case.name == kept[0]]
    directory = tmp_path_factory.mktemp(case.name)
    plain = write_family(case, directory / "plain", seed=5, dtype="bfloat16")
    return with_prediction_layer(directory / "model", plain)


@pytest.fixture(scope="module")
def card(checkpoint: Path) -> ModelCard:
    return card_of(checkpoint, enable_return_indexer_topk=True)


@pytest.fixture(scope="module")
def runner(checkpoint: Path, kept: tuple[str, str]) -> HostRunner:
    sizes = {**TWO_SHAPES, "precompile_bs_paddings": [WAY.num_rows * (1 + DRAFTS)], "index_cache_dtype": kept[1]}
    return prepared_runner(checkpoint, **sizes, **NATIVE, **DRAFTED, speculative_draft_model_path=str(checkpoint))


@pytest.fixture(scope="module")
def alone(runner: HostRunner, card: ModelCard) -> Outcomes:
    """Each request alone, without drafts and with nothing cached."""
    return run_alone(runner, card, mixed_workload(), way=replace(WAY, caches_prefixes=False))


def chosen_of(outcome: Outcome, card: ModelCard) -> np.ndarray:
    """Index rows of an outcome; none may be missing."""
    assert outcome.routing is not None and card.index is not None
    rows, known = index_rows_of(outcome.routing, card.index)
    assert known.all()
    return rows


def test_many_tokens_do_not_see_all_before_them(alone: Outcomes, card: ModelCard):
    """Or the laws would say little: most rows leave tokens out."""
    assert card.index is not None
    rows = np.concatenate([chosen_of(outcome, card) for outcome in alone.values()])
    assert ((rows != np.arange(card.index.top_k)).any(-1) & (rows >= 0).all(-1)).mean() > 0.5


@pytest.mark.parametrize("changes", WAYS.values(), ids=WAYS.keys())
def test_the_way_does_not_show(runner: HostRunner, card: ModelCard, alone: Outcomes, changes: dict[str, Any]):
    cycle = cycle_for(runner, card, replace(WAY, **changes))
    found = run_on(cycle, card, mixed_workload(), intervene=changes.get("intervene"))
    cycle.scheduler.flush()
    assert_identical(found, alone)
    if "proposer" in changes:
        assert speculation_of(cycle).totals.drafted > 100


def test_cached_prompts_have_their_rows(runner: HostRunner, card: ModelCard, alone: Outcomes):
    cycle = cycle_for(runner, card, WAY)
    for _ in range(2):
        found = run_on(cycle, card, mixed_workload())
        assert_identical(found, alone)
    assert sum(outcome.num_cached for outcome in found.values()) > 500
    cycle.scheduler.flush()


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


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    need_native_kernels()
    (case,) = [case for case in FAMILY_CASES if case.name == NAMES[0]]
    paths = tuple(
        write_family(case, tmp_path_factory.mktemp("versions") / str(seed), seed=seed, dtype="bfloat16")
        for seed in (5, 6)
    )
    with Engine(str(paths[0]), **{**TWO_SHAPES, **NATIVE}) as engine:
        yield Served(engine, (paths[0], paths[1]))


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
