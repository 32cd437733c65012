"""A request whose logits are not finite ends with an error; nobody else notices, then or later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import jax
import numpy as np
import pytest

from rayserve_moe import Engine
from tests.support.engine.outputs import Outcomes, assert_same, outcome_of_answer
from tests.support.engine.run_requests import Way, run_together
from tests.support.engine.workload import engine_arguments, mixed_workload, request_for
from tests.support.models.core import CORE_CONFIG


@contextmanager
def poisoned(engine: Engine, token_id: int) -> Iterator[None]:
    """Make the embedding of one token NaN, in the weights that the compiled steps are given."""
    clean = engine.runner.weights
    embedding = clean.params["embedding"]
    table = np.array(embedding["table_VD"])
    table[token_id] = np.nan
    on_device = jax.device_put(table, embedding["table_VD"].sharding)
    params = {**clean.params, "embedding": {**embedding, "table_VD": on_device}}
    engine.runner.weights = replace(clean, params=params)
    try:
        yield
    finally:
        engine.runner.weights = clean


@pytest.fixture(scope="module")
def workload() -> list:
    return [request_for(request.prompt_ids, request.request_id, max_new_tokens=12) for request in mixed_workload()]


@pytest.fixture(scope="module")
def clean_run(engine: Engine, workload: list) -> Outcomes:
    return run_together(engine.runner, engine.card, workload)


@pytest.fixture(scope="module")
def poison(workload: list, clean_run: Outcomes) -> int:
    """An id that the workload neither reads nor writes."""
    used = {int(token) for request in workload for token in request.prompt_ids}
    used |= {token for outcome in clean_run.values() for token in outcome.ids}
    return next(token for token in range(3, CORE_CONFIG.vocab_size) if token not in used)


def test_a_poisoned_token_anywhere_in_the_prompt_fails_its_request(engine: Engine, poison: int):
    for prompt in ([poison], [poison, *range(10, 90)], [*range(10, 90), poison], [*range(10, 50), poison, 7]):
        with poisoned(engine, poison):
            outcome = run_together(engine.runner, engine.card, [request_for(prompt, max_new_tokens=4)])["r", 0]
        assert outcome.finish is not None and outcome.finish.kind == "error"
        assert "not finite" in (outcome.finish.message or "")
        assert outcome.ids == []


@pytest.mark.parametrize("way", [Way(), Way(num_pages=29, num_rows=4, chunk_tokens=16)], ids=["roomy", "tight"])
def test_company_is_not_affected(engine: Engine, workload: list, clean_run: Outcomes, poison: int, way: Way):
    bad = [request_for([*range(10, 10 + 40 * i), poison], f"bad{i}", max_new_tokens=12, n=i) for i in (1, 2)]
    with poisoned(engine, poison):
        together = run_together(engine.runner, engine.card, [bad[0], *workload[:8], bad[1], *workload[8:]], way=way)
    for (request_id, index), outcome in together.items():
        if request_id.startswith("bad"):
            assert outcome.finish is not None and outcome.finish.kind == "error"
        else:
            assert_same(outcome, clean_run[request_id, index])


def test_the_engine_goes_on_and_the_pages_it_used_are_clean(
    engine: Engine, workload: list, clean_run: Outcomes, poison: int
):
    num_pages = int(engine.loop.statistics()["pages_total"])
    with poisoned(engine, poison):
        # Fill the whole pool with keys and values that are not numbers.
        failed = engine.generate(input_ids=[[poison] * 400] * (num_pages // 25), max_new_tokens=5, temperature=0)
        assert all(answer["meta_info"]["finish_reason"]["type"] == "error" for answer in failed)
        engine.loop.check_health()
        for request in workload:
            found = outcome_of_answer(engine.generate(**engine_arguments(request)), engine.card.routing)
            assert_same(found, clean_run[request.request_id, 0])


def test_padding_may_be_poisoned_too(engine: Engine, workload: list, clean_run: Outcomes):
    """Padding tokens carry id 0: what they compute and write must reach nobody."""
    chosen = [request for request in workload if 0 not in clean_run[request.request_id, 0].ids]
    assert len(chosen) >= 5, "too few requests stay clear of id 0 to show anything"
    with poisoned(engine, 0):
        together = run_together(engine.runner, engine.card, chosen, way=Way(chunk_tokens=21))
    for key, outcome in together.items():
        assert_same(outcome, clean_run[key])
