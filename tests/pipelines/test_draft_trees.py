"""Trees of drafts change nothing but time: of every path what is sampled counts, and nothing of another one shows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe import Engine
from rayserve_moe.engine import cycle as step_cycle
from rayserve_moe.engine.extension import extension_of
from rayserve_moe.engine.routing import capture
from rayserve_moe.engine.speculation.policy import Speculation
from rayserve_moe.engine.speculation.proposers import PROPOSERS
from rayserve_moe.engine.speculation.steps import DraftedSteps
from rayserve_moe.execution.step import inputs as step_input
from rayserve_moe.execution.step import samples as step_samples
from rayserve_moe.kernels.cpu_native import calls
from rayserve_moe.kernels.kv_pool import Moves
from rayserve_moe.kernels.reference import attention as attention_reference
from rayserve_moe.scheduling import verify_rows
from tests.pipelines.test_speculation import answers_of, check_store
from tests.support.engine.engine_store import EngineStore
from tests.support.engine.run_requests import cycle_for, run_on, run_together, speculation_of
from tests.support.engine.schedulers import some_reach
from tests.support.engine.workload import request_for
from tests.support.models.core import PAGE_SIZE
from tests.support.speculation.random_requests import (
    PLAIN,
    TREES,
    assert_unchanged,
    check_mix,
    max_drafts,
    oracle_for,
    random_requests,
)


@pytest.fixture
def growing(engine_with: EngineStore) -> Engine:
    return engine_with(**TREES)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(2))
def test_trees_do_not_show(growing: Engine, seed: int):
    check_mix(growing, seed, count=16)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(500, 512))
def test_trees_do_not_show_in_many_mixes(growing: Engine, seed: int):
    check_mix(growing, seed, count=32)


@pytest.mark.slow
@pytest.mark.float32("devices add up parts of sums")
@pytest.mark.parametrize("backend", ["replicated", "all_to_all"])
@pytest.mark.parametrize("seed", range(600, 603))
def test_trees_do_not_show_over_two_data_ranks(engine_with: EngineStore, backend, seed):
    engine = engine_with(**TREES, devices_per_host=4, data_parallel_size=2, expert_backend=backend)
    check_mix(engine, seed, count=24)


@pytest.mark.slow
def test_large_trees_do_not_show_over_small_pages(engine_with: EngineStore):
    """Of 32 nodes and 7 levels: a tree reaches over many pages, and gets one more at most."""
    large = {"speculative_num_steps": 7, "speculative_num_draft_tokens": 32, "speculative_eagle_topk": 8}
    engine = engine_with(**(TREES | large), page_size=16)
    requests = random_requests(5, count=24, layout=engine.card.routing)
    way = replace(PLAIN, page_size=16)
    plain = run_together(engine.runner, engine.card, requests, way=way)
    for num_pages in (40, way.num_pages):
        trees = replace(way, proposer=oracle_for(engine, plain, share=0.9), num_drafts=31, num_pages=num_pages)
        assert_unchanged(engine, run_together(engine.runner, engine.card, requests, way=trees), plain)


def test_trees_that_hold_what_follows_take_fewer_steps(growing: Engine):
    requests = [request_for(np.arange(5, 25), max_new_tokens=24)]
    plain = run_together(growing.runner, growing.card, requests, way=PLAIN)
    way = replace(PLAIN, proposer=oracle_for(growing, plain, share=1.0), num_drafts=max_drafts(growing))
    cycle = cycle_for(growing.runner, growing.card, way)
    assert_unchanged(growing, run_on(cycle, growing.card, requests, constraints=PLAIN.constraints), plain)
    cycle.scheduler.flush()
    assert cycle.statistics()["tokens_sampled"] == 24
    assert cycle.statistics()["steps"] <= 14
    totals = speculation_of(cycle).totals
    assert totals.accepted >= 10 and totals.drafted > 3 * totals.accepted


@pytest.mark.parametrize("algorithm", ["NGRAM", "SIBLINGS"])
def test_answers_are_those_without_trees(growing: Engine, algorithm: str):
    cycle = growing.loop._cycle
    proposer = PROPOSERS[algorithm](replace(growing.runner.served.settings.speculation, shortest_match=1))
    how = {"max_drafts": max_drafts(growing), "are_trees": True, "reach": some_reach()}
    fixed = Speculation(cycle.scheduler.table, proposer, **how, is_fixed=True)
    plain = answers_of(growing, speculative=False)
    with patch.object(extension_of(cycle.extensions, DraftedSteps), "speculation", fixed):
        drafted = answers_of(growing)
    assert fixed.totals.drafted > fixed.totals.accepted > 0
    for answer, expected in zip(drafted, plain, strict=True):
        assert answer["output_ids"] == expected["output_ids"]
        assert answer["meta_info"]["routed_experts"] == expected["meta_info"]["routed_experts"]


def run_with_trees(engine: Engine) -> None:
    requests = random_requests(5, count=12, layout=engine.card.routing)
    plain = run_together(engine.runner, engine.card, requests, way=PLAIN)
    way = replace(PLAIN, proposer=oracle_for(engine, plain, share=0.8), num_drafts=max_drafts(engine))
    cycle = cycle_for(engine.runner, engine.card, way)
    try:
        found = run_on(cycle, engine.card, requests, intervene=check_store, constraints=PLAIN.constraints)
        assert_unchanged(engine, found, plain)
    finally:
        engine.runner.execute(cycle.scheduler.empty_plan())


def test_no_row_of_another_branch_is_kept(growing: Engine):
    run_with_trees(growing)


def _of_the_wrong_branch(schedule: Any, counts: np.ndarray) -> np.ndarray:
    """Routing of a sibling in place of that of the draft that was right (SGLang #37949)."""
    plan, belongs = schedule.plan, true_belongs(schedule, counts)
    for place in range(1, plan.num_tokens):
        if len(belongs) == plan.num_chunks and belongs[place] and plan.chunks.ancestors[place] > 1:
            rows, starts = plan.chunks.rows, plan.chunks.starts
            others = (rows == rows[place]) & (starts == starts[place]) & ~belongs
            if others.any():
                belongs[np.flatnonzero(others)[0]], belongs[place] = True, False
    return belongs


true_belongs = verify_rows.tokens_that_count
true_counts = verify_rows.samples_that_count


def _one_more(table: Any, schedule: Any, *, result: Any) -> np.ndarray | None:
    counts = true_counts(table, schedule, result=result)
    if counts is not None:
        counts[np.flatnonzero(~counts)[:1]] = True
    return counts


HOST_FAULTS = {
    "routing of the wrong branch": (capture, "tokens_that_count", _of_the_wrong_branch),
    "one draft too many": (step_cycle, "samples_that_count", _one_more),
}


@pytest.mark.parametrize("fault", list(HOST_FAULTS))
def test_faults_on_the_host_would_be_seen(growing: Engine, fault: str):
    module, name, faulty = HOST_FAULTS[fault]
    with patch.object(module, name, faulty), pytest.raises(AssertionError):
        run_with_trees(growing)


def _noise_by_node(sampling: Callable[..., Any]) -> Callable[..., Any]:
    """Each node of a tree draws with noise of its own."""

    def by_node(state: Any, rows_S: Any, *, positions_S: Any) -> Any:
        batch, penalties = sampling(state, rows_S, positions_S=positions_S)
        is_new = jnp.append(True, rows_S[1:] != rows_S[:-1])
        nodes = jnp.arange(len(rows_S))
        node = nodes - jnp.maximum.accumulate(jnp.where(is_new, nodes, 0))
        return replace(batch, seed_S=batch.seed_S + node.astype(batch.seed_S.dtype)), penalties

    return by_node


def _no_moves(*given: Any) -> Moves:
    return true_moves(*given)._replace(num=jnp.int32(0))


true_moves = step_samples._moves_of


def _rows_by_position(kv_pages: Any, pages_P: Any, key_positions_S: Any, position: Any, ancestors: Any) -> Any:
    """What lies where a chain would have its keys."""
    page_size = kv_pages.shape[1]
    return kv_pages[pages_P.at[key_positions_S // page_size].get(mode="clip"), key_positions_S % page_size]


Patches = tuple[tuple[Any, str, Any], ...]
by_node = _noise_by_node(step_input.sampling_of)
DEVICE_FAULTS: dict[str, Patches] = {
    "noise by node": ((step_input, "sampling_of", by_node), (step_samples, "sampling_of", by_node)),
    "keys of right drafts stay where they are": ((step_samples, "_moves_of", _no_moves),),
    "keys of rejected drafts are read": (
        (attention_reference, "_rows_on_path", _rows_by_position),
        (calls, "trees_of", lambda _: ()),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", list(DEVICE_FAULTS))
def test_faults_on_the_devices_would_be_seen(core_checkpoint, growing: Engine, fault: str):
    requests = random_requests(5, count=32, layout=growing.card.routing)
    plain = run_together(growing.runner, growing.card, requests, way=PLAIN)
    kept = {"num_pages": 200, "page_size": PAGE_SIZE, "enable_return_routed_experts": True, "compile_cache": "off"}
    with ExitStack() as stack:
        for module, name, faulty in DEVICE_FAULTS[fault]:
            stack.enter_context(patch.object(module, name, faulty))
        engine = stack.enter_context(Engine(str(core_checkpoint), **TREES, **kept))
        way = replace(PLAIN, proposer=oracle_for(engine, plain, share=0.9), num_drafts=max_drafts(engine))
        found = run_together(engine.runner, engine.card, requests, way=way)
    with pytest.raises(AssertionError):
        assert_unchanged(growing, found, plain)
