"""Weights change while requests run: every log-prob and row is of the weights that the answer names for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from rayserve_moe import Engine
from tests.pipelines.conftest import EngineStore, ReferenceFactory
from tests.support.checkpoints.send_weights import send_weights
from tests.support.checkpoints.weight_versions import Answer, VersionedReference
from tests.support.engine.run_requests import kept_tokens, tolerance_of
from tests.support.engine.shared_settings import MOVING, ONE_BUCKET
from tests.support.engine.step_gate import WITHIN_S, held_steps, wait_for_tokens
from tests.support.engine.workload import draw_prompt

NUM_CLIENTS = 6
MODES = (None, "in_place", "retract", "abort")
CHANGING = {"max_running_requests": 4, "num_pages": 61}
"""Settings of the engine whose weights change; others may have changed them: a test that compares loads its own."""


@pytest.fixture
def changing(engine_with: EngineStore) -> Engine:
    """Few rows and pages: some requests wait, and some are preempted."""
    return engine_with(**ONE_BUCKET, **CHANGING)


@pytest.fixture
def paths(core_checkpoint: Path, other_checkpoint: Path) -> list[Path]:
    """Both checkpoints, the one that serves at the start first."""
    return [core_checkpoint, other_checkpoint]


@pytest.fixture
def reference(changing: Engine, paths: list[Path], reference_for: ReferenceFactory) -> VersionedReference:
    """Knows the version that serves now: the first checkpoint, loaded once more under a name of this test's own."""
    references, tolerance = {path: reference_for(path) for path in paths}, tolerance_of(changing.runner)
    reference = VersionedReference(references, changing.card.routing, tolerance=tolerance)
    version = f"start {time.monotonic_ns()}"
    assert changing.update_weights_from_disk(paths[0], weight_version=version).success
    reference.note(version, paths[0], is_recomputed=True)
    return reference


@dataclass
class Load:
    """Clients that keep an engine busy, and what they were answered."""

    answers: list[tuple[list[int], Answer]]
    errors: list[BaseException]


@contextmanager
def loaded(engine: Engine, *, longest: int = 90) -> Iterator[Load]:
    """Have clients ask for one answer after the other until the block ends; then wait for the last of them."""
    load, is_over = Load([], []), threading.Event()

    def ask(seed: int) -> None:
        generator = np.random.default_rng(seed)
        for i in count():
            if is_over.is_set():
                return
            prompt = draw_prompt(generator, int(generator.integers(1, 60))).tolist()
            sampling = {"temperature": float(i % 2), "max_new_tokens": int(generator.integers(1, longest))}
            try:
                answer = engine.generate(
                    input_ids=prompt, ignore_eos=True, **sampling, return_logprob=True, return_routed_experts=True
                )
            except BaseException as error:
                load.errors.append(error)
                raise
            assert isinstance(answer, dict)
            load.answers.append((prompt, answer))

    threads = [threading.Thread(target=ask, args=(seed,), daemon=True) for seed in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        is_over.set()
        engine.continue_generation()
        for thread in threads:
            thread.join(WITHIN_S)
        assert not any(thread.is_alive() for thread in threads), "an answer does not come"


@pytest.mark.parametrize("num_updates", [8, pytest.param(20, marks=pytest.mark.slow)])
def test_every_log_prob_and_row_is_of_the_weights_that_the_answer_names(
    changing: Engine, paths: list[Path], reference: VersionedReference, num_updates: int
) -> None:
    """Whether hosts read the weights or are sent them."""
    num_compilations = changing.runner.num_compilations_since_start
    with loaded(changing) as load:
        for update in range(num_updates):
            mode, path, version = MODES[(update + update // 4) % 4], paths[(update + 1) % 2], f"v{update}"
            wait_for_tokens(changing.loop, 40)
            if mode is not None:
                changing.pause_generation(mode)
            change = send_weights if update % 3 == 1 else Engine.update_weights_from_disk
            outcome = change(changing, path, weight_version=version)
            assert outcome.success and outcome.weight_version == version == changing.card.weight_version
            assert mode in (None, "abort") or outcome.num_paused > 0
            reference.note(version, path, is_recomputed=mode in ("retract", "abort"))
            changing.continue_generation()
    assert not load.errors
    for prompt, answer in load.answers:
        assert answer["meta_info"]["finish_reason"]["type"] in ("length", "abort")
        reference.check(prompt, answer)
    reference.tally.check()
    assert reference.num_ranges > len(load.answers) and reference.num_mixed > 0
    assert changing.runner.num_compilations_since_start == num_compilations


@pytest.mark.slow
def test_an_answer_that_spans_versions_names_each_of_them(
    changing: Engine, paths: list[Path], reference: VersionedReference
) -> None:
    """With every pause a retraction, all of it is recomputed under the new weights, and all of it is compared."""
    with loaded(changing, longest=300) as load:
        for update in range(6):
            wait_for_tokens(changing.loop, 80)
            changing.pause_generation("retract")
            assert changing.loop.statistics()["requests_running"] == 0
            path, version = paths[(update + 1) % 2], f"retracted {update}"
            assert changing.update_weights_from_disk(path, weight_version=version).success
            reference.note(version, path, is_recomputed=True)
            changing.continue_generation()
    assert not load.errors
    for prompt, answer in load.answers:
        reference.check(prompt, answer)
    reference.tally.check()
    assert max(len(answer["meta_info"]["logprob_weight_versions"]) for _, answer in load.answers) > 2


def test_scores_of_a_prompt_are_all_of_one_version(
    changing: Engine, paths: list[Path], reference: VersionedReference
) -> None:
    """A prompt that was computed in part when the weights changed is computed and scored anew."""
    other = paths[1]
    prompt = draw_prompt(np.random.default_rng(5), 400).tolist()

    def score() -> Answer:
        answer = changing.generate(input_ids=prompt, max_new_tokens=1, return_logprob=True, logprob_start_len=0)
        assert isinstance(answer, dict)
        return answer

    before = changing.loop.statistics()["tokens_computed"]
    with ThreadPoolExecutor(1) as pool, held_steps(changing.loop) as steps:
        told = pool.submit(score)
        steps.let_run(3)
        steps.meet()
        paused = changing.loop.control.pause("in_place")
        steps.let_run()
        paused.result(WITHIN_S)
        assert 0 < changing.loop.statistics()["tokens_computed"] - before < len(prompt)
        assert changing.update_weights_from_disk(other, weight_version="scored").success
        reference.note("scored", other, is_recomputed=True)
        steps.open()
        changing.continue_generation()
        meta = told.result(WITHIN_S)["meta_info"]
    assert meta["logprob_weight_versions"] == [[1, len(prompt) + 1, "scored"]]
    scores = [entry[0] for entry in meta["input_token_logprobs"][1:]]
    np.testing.assert_allclose(scores, reference.of("scored").logprobs(prompt), atol=1e-5)


def test_cached_prefixes_of_old_weights_are_never_found_again(
    changing: Engine, paths: list[Path], reference: VersionedReference
) -> None:
    """Not even when weights of that name come back."""
    prompt = draw_prompt(np.random.default_rng(6), 100).tolist()

    def ask() -> Answer:
        answer = changing.generate(
            input_ids=prompt, max_new_tokens=4, temperature=0, return_logprob=True, return_routed_experts=True
        )
        assert isinstance(answer, dict)
        return answer

    ask()
    assert ask()["meta_info"]["cached_tokens"] == 99 // kept_tokens(changing.runner) * kept_tokens(changing.runner)
    for path in (paths[1], paths[0], paths[1]):
        assert changing.update_weights_from_disk(path, weight_version=path.name).success
        reference.note(path.name, path, is_recomputed=True)
        answer = ask()
        assert answer["meta_info"]["cached_tokens"] == 0
        reference.check(prompt, answer)


def test_a_retraction_or_a_freeze_does_not_show_in_what_comes_out(changing: Engine) -> None:
    """Without other weights, an answer is the same however often its engine is paused."""
    prompts = [draw_prompt(np.random.default_rng(seed), 5 + 9 * seed).tolist() for seed in range(6)]
    keywords = {"max_new_tokens": 120, "temperature": 0, "ignore_eos": True, "return_logprob": True}
    wanted = changing.generate(input_ids=prompts, **keywords)
    told: list[Answer] = []
    thread = threading.Thread(target=lambda: told.extend(changing.generate(input_ids=prompts, **keywords)), daemon=True)
    thread.start()
    for mode in ("retract", "in_place", "retract", "retract", "in_place", "retract"):
        wait_for_tokens(changing.loop, 20)
        changing.pause_generation(mode)
        steps = changing.loop.statistics()["steps"]
        running, waiting = (changing.loop.statistics()[f"requests_{state}"] for state in ("running", "waiting"))
        assert (running > 0) == (mode == "in_place") and running + waiting == 6
        changing.loop.check_health()
        changing.loop.check_integrity()
        assert changing.loop.statistics()["steps"] == steps
        changing.continue_generation()
    thread.join(WITHIN_S)
    assert not thread.is_alive(), "an answer does not come"
    for ours, theirs in zip(told, wanted, strict=True):
        assert ours["output_ids"] == theirs["output_ids"]
        pairs = zip(*(answer["meta_info"]["output_token_logprobs"] for answer in (ours, theirs)), strict=True)
        np.testing.assert_allclose(*zip(*((a[0], b[0]) for a, b in pairs), strict=True), atol=1e-5)


def test_an_update_is_answered_before_it_is_kept_and_experts_lie_still_until_then(
    engine_with: EngineStore, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they lie is part of what is kept; the next update waits."""
    engine = engine_with(**ONE_BUCKET, **MOVING)
    eplb, tensors = engine.loop.eplb, engine.loop._executor.tensors
    begun, may_end = threading.Event(), threading.Event()

    def keep() -> None:
        begun.set()
        assert may_end.wait(WITHIN_S)

    monkeypatch.setattr(tensors, "keep", keep)
    send_weights(engine, paths[1])
    assert begun.wait(WITHIN_S) and eplb._is_held
    engine.generate(input_ids=[5, 6, 7], max_new_tokens=4, ignore_eos=True)
    assert eplb._is_held
    monkeypatch.undo()
    with ThreadPoolExecutor(1) as pool:
        updated = pool.submit(engine.update_weights_from_disk, paths[0])
        assert not updated.done()
        may_end.set()
        assert updated.result(WITHIN_S).success
    deadline = time.monotonic() + WITHIN_S
    while eplb._is_held:
        assert time.monotonic() < deadline, "experts are not let go"
        time.sleep(0.01)
