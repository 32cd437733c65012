"""Pausing and other weights over HTTP: in any order, while loaded, and nothing is lost when weights are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue

import pytest

from rayserve_moe.rollouts.alignment import decode_answer
from tests.http.conftest import assert_idle
from tests.http.test_control import ENDLESS, NUM_WANTED, PROMPT, native, running
from tests.support.checkpoints.broken_checkpoints import WAYS, broken_copy
from tests.support.engine import step_gate
from tests.support.serving.http_client import COMPLETIONS, GENERATE, ask, events_of, wait_until

pytestmark = pytest.mark.usefixtures("first_weights_afterwards")
UPDATE, PAUSE, CONTINUE = "/update_weights_from_disk", "/pause_generation", "/continue_generation"
SHORT = {"input_ids": PROMPT, "sampling_params": {**ENDLESS, "max_new_tokens": 6}, "return_logprob": True}


@contextmanager
def asking(ask_now: Callable[[], object]) -> Iterator[Future]:
    """Ask in another thread; yields the future of the answer at once."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(ask_now)


@pytest.mark.parametrize("mode", ["abort", "retract", pytest.param("in_place", marks=pytest.mark.slow)])
def test_a_pause_is_told_of_and_keeps_new_requests_waiting(http, engine, mode, unhurried):
    with running(http, engine, GENERATE, native(rid="early")) as early:
        for _ in range(2):
            assert ask(http, PAUSE, mode=mode)["success"]
        with asking(lambda: ask(http, GENERATE, **SHORT)) as late:
            wait_until(lambda: engine.loop.statistics()["requests_live"] == (1 if mode == "abort" else 2))
            steps = engine.loop.statistics()["steps"]
            for path in ("/health", "/health_generate", "/v1/loads"):
                assert http.get(path).status_code == 200
            loads = http.get("/v1/loads").json()
            assert loads["paused"] is True and engine.loop.statistics()["steps"] == steps
            for _ in range(2):
                assert ask(http, CONTINUE)["success"]
            assert len(late.result()["output_ids"]) == 6
        finish = early.result()["meta_info"]["finish_reason"]["type"]
        assert finish == ("abort" if mode == "abort" else "length")
    assert http.get("/v1/loads").json()["paused"] is False


@pytest.mark.parametrize(
    "mode", ["retract", *(pytest.param(mode, marks=pytest.mark.slow) for mode in (None, "in_place"))]
)
def test_other_weights_are_told_of_everywhere(http, engine, other_checkpoint, mode, unhurried):
    before = ask(http, GENERATE, **SHORT)
    with running(http, engine, GENERATE, native(rid="mine")) as answer:
        if mode:
            ask(http, PAUSE, mode=mode)
        done = ask(http, UPDATE, model_path=str(other_checkpoint), weight_version="step-7", flush_cache=False)
        assert done["success"] and done["message"] and done["num_paused_requests"] == (1 if mode else 0)
        assert done["weight_version"] == "step-7"
        ask(http, CONTINUE)
        told = answer.result()
    ((first, boundary, old), (also_boundary, end, new)) = told["meta_info"]["logprob_weight_versions"]
    spans = [
        (span["version"], span["start"] + first, span["end"] + first) for span in told["meta_info"]["weight_versions"]
    ]
    assert spans == [(old, first, boundary), (new, boundary, end)]
    assert (first, old, new) == (len(PROMPT), "0", "step-7") and boundary == also_boundary
    assert end == len(PROMPT) + NUM_WANTED and told["meta_info"]["weight_version"] == "step-7"
    routing = decode_answer(told, engine.loop.card.routing)
    assert not routing.missing and routing.weight_version[-1] == (boundary - 1, end - 1, "step-7")
    assert http.get("/get_weight_version").json() == {"weight_version": "step-7"}
    info = http.get("/model_info").json()
    assert (info["weight_version"], info["model_path"]) == ("step-7", str(other_checkpoint))
    assert info["tokenizer_path"] == str(engine.tokenizer.directory)
    assert http.get("/v1/models").json()["data"][0]["weight_version"] == "step-7"
    after = ask(http, GENERATE, **SHORT)
    assert after["meta_info"]["weight_version"] == "step-7" and after["output_ids"] != before["output_ids"]


def test_an_update_may_end_what_runs(http, engine, other_checkpoint, unhurried):
    with running(http, engine, GENERATE, native(rid="mine")) as answer:
        ask(http, UPDATE, model_path=str(other_checkpoint), abort_all_requests=True)
        told = answer.result()["meta_info"]
    assert told["finish_reason"]["type"] == "abort" and told["weight_version"] == "0"
    assert http.get("/get_weight_version").json() == {"weight_version": "1"}


def test_streams_go_on_under_other_weights(http, engine, other_checkpoint):
    """Each event tells the weights of the last token that it has: the old ones at first, the new ones in the end."""
    arrived = SimpleQueue()

    def read():
        for event in events_of(http, GENERATE, **native()):
            arrived.put(event["meta_info"]["weight_version"])

    with asking(read) as end:
        with step_gate.unhurried(engine.loop, delay_s=0.02):
            told = [arrived.get(timeout=step_gate.WITHIN_S)]
            ask(http, UPDATE, model_path=str(other_checkpoint), weight_version="new")
        end.result(step_gate.WITHIN_S)
    told += [arrived.get() for _ in range(arrived.qsize())]
    assert (told[0], told[-1]) == ("0", "new") and told == sorted(told)
    assert len(ask(http, COMPLETIONS, prompt=PROMPT, max_tokens=3)["choices"]) == 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", WAYS)
def test_weights_that_do_not_fit_leave_the_old_ones_serving(http, engine, checkpoint, tmp_path, way):
    before = ask(http, GENERATE, **SHORT)
    place = tmp_path / "zq7-marker"
    broken_copy(checkpoint, way, place)
    answer = http.post(UPDATE, json={"model_path": str(place), "weight_version": "zq7-version"})
    assert answer.status_code == 400 and "zq7" not in answer.text and str(tmp_path) not in answer.text
    told = answer.json()
    assert told["success"] is False and told["num_paused_requests"] == 0
    assert WAYS[way][1] in told["message"] == told["error"]["message"] and told["error"]["code"] == "weights_refused"
    assert http.get("/get_weight_version").json() == {"weight_version": "0"}
    after = ask(http, GENERATE, **SHORT)
    assert after["output_ids"] == before["output_ids"] and after["meta_info"]["weight_version"] == "0"
    assert_idle(engine)


def test_commands_come_in_any_order_while_loaded(http, engine, checkpoint, other_checkpoint, unhurried):
    commands = [
        (CONTINUE, {}),
        (PAUSE, {"mode": "retract"}),
        (UPDATE, {"model_path": str(other_checkpoint)}),
        (PAUSE, {"mode": "in_place"}),
        (UPDATE, {"model_path": str(checkpoint)}),
        (CONTINUE, {}),
        (UPDATE, {"model_path": str(other_checkpoint)}),
        (PAUSE, {}),
        (PAUSE, {"mode": "retract"}),
        ("/abort_request", {"abort_all": True}),
        (CONTINUE, {}),
    ]
    with running(http, engine, GENERATE, native(n=12)) as answers:
        for path, body in commands:
            assert ask(http, path, **body)["success"]
            engine.loop.check_integrity()
        for answer in answers.result():
            assert answer["meta_info"]["finish_reason"]["type"] in ("abort", "length")
    assert http.get("/get_weight_version").json() == {"weight_version": "3"}
    assert_idle(engine)
