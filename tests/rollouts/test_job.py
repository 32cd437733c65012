"""The job against a server: every sample once, the same whatever happens on the way."""

from __future__ import annotations

import errno
import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.types import Message

from rayserve_moe import Engine, cli, extract_routed_experts_from_meta_info
from rayserve_moe.balancing.migration import Migration
from rayserve_moe.balancing.placement import identity_placement
from rayserve_moe.engine.eplb.steps import EplbSteps
from rayserve_moe.rollouts import load
from rayserve_moe.rollouts.driver import MAX_FAULTS
from rayserve_moe.rollouts.shards import RolloutDirectory
from rayserve_moe.text.chat import encode_chat
from tests.rollouts.conftest import PROMPTS, UnreliableRoad, prompts_in
from tests.rollouts.support import (
    NEW_TOKENS,
    Samples,
    assert_equal,
    by_engine,
    errors_in,
    job,
    samples_in,
    summary_in,
)
from tests.support.serving.http_server import KEY


@pytest.fixture(scope="module")
def finished(server: tuple[str, UnreliableRoad], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Prompts, and the directory of a run over them that nothing happened to."""
    directory = tmp_path_factory.mktemp("undisturbed")
    file = directory / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYSERVE_MOE_API_KEY", KEY)
        assert job(file, directory / "out", "--url", server[0]) == 0
    return file, directory / "out"


@pytest.fixture(scope="module")
def undisturbed(finished: tuple[Path, Path]) -> Samples:
    """Three samples of every prompt."""
    return samples_in(finished[1])


def test_samples_are_the_engines_own(undisturbed: Samples, engine: Engine) -> None:
    """Each equals what the engine gives when this one sample is asked for alone, under the seed that is documented."""
    wanted = by_engine(engine, PROMPTS, n=3)
    assert {key: sample["output_ids"] for key, sample in undisturbed.items()} == wanted
    for sample in undisturbed.values():
        num_tokens = len(sample["prompt_ids"]) + len(sample["output_ids"])
        assert len(sample["rows"]) == num_tokens - 1 and len(sample["logprobs"]) == len(sample["output_ids"])
    assert len({tuple(undisturbed["ids 0", i]["output_ids"]) for i in range(3)}) == 3


def test_routing_is_the_models_own(undisturbed: Samples, engine: Engine) -> None:
    """Rows and log-probs of a sample come about again when its tokens are fed as a prompt."""
    for key in (("ids 1", 0), ("ids 1", 2), ("text 0", 1)):
        sample = undisturbed[key]
        scored = engine.generate(
            input_ids=sample["prompt_ids"] + sample["output_ids"],
            sampling_params={"max_new_tokens": 0},
            return_logprob=True,
            logprob_start_len=len(sample["prompt_ids"]) - 1,
            return_routed_experts=True,
        )
        told = [entry[0] for entry in scored["meta_info"]["input_token_logprobs"][1:]]
        np.testing.assert_allclose(sample["logprobs"], told, atol=1e-4)
        layout = engine.loop.card.routing
        rows = extract_routed_experts_from_meta_info(scored).reshape(-1, layout.num_hidden_layers, layout.top_k)
        assert np.array_equal(rows[:-1, list(layout.layer_ids)], sample["rows"])


def test_a_job_moves_the_servers_experts_once_all_is_sampled(
    url: str, engine: Engine, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server whose experts cannot move says so, and the samples are complete all the same."""
    assert job(prompts, tmp_path / "kept", "--url", url, "--place-experts", "8") == 0
    assert "experts stay: experts stay where they are" in summary_in(tmp_path / "kept")["experts"]
    layout = engine.loop.card.routing
    start = identity_placement(len(layout.layer_ids), layout.num_experts, ep_size=4, num_redundant=4)
    eplb = EplbSteps(Migration(start, hosts=1, slots_per_step=1))
    monkeypatch.setattr(engine.loop, "eplb", eplb)
    assert job(prompts, tmp_path / "moved", "--url", url, "--place-experts", "8") == 0
    assert summary_in(tmp_path / "moved")["experts"] == "experts move to placement 1"
    assert eplb.state() is None, "a migration is requested"
    assert job(prompts, tmp_path / "without", "--url", url, "--place-experts", "8", "--no-routing") == 2


def test_a_run_again_does_nothing(
    url: str, road: UnreliableRoad, finished: tuple[Path, Path], undisturbed: Samples
) -> None:
    prompts, out = finished
    told = ["--prompts", str(prompts), "--out", str(out), "--n", "3", "--max-new-tokens", str(NEW_TOKENS), "--url", url]
    assert cli.main(["rollout", *told]) == 0
    assert road.num_asked == 0 and summary_in(out)["samples_done_before"] == len(undisturbed)
    assert_equal(samples_in(out), undisturbed)


def test_more_samples_are_only_what_is_missing(
    url: str, prompts: Path, tmp_path: Path, undisturbed: Samples, engine: Engine
) -> None:
    out = tmp_path / "out"
    assert job(prompts, out, "--url", url, n=1) == 0
    sampled = engine.loop.statistics()["tokens_sampled"]
    assert job(prompts, out, "--url", url, n=3) == 0
    found = samples_in(out)
    num_new = sum(len(sample["output_ids"]) for (_, number), sample in found.items() if number > 0)
    assert engine.loop.statistics()["tokens_sampled"] - sampled == num_new
    assert_equal(found, undisturbed)


def test_bad_rows_end_in_the_errors(url: str, prompts: Path, tmp_path: Path, undisturbed: Samples) -> None:
    """Those that do not parse, and those that the server refuses; once each, and again only when asked to."""
    lines = prompts.read_text(encoding="utf-8").splitlines()
    bad = ["not json", '{"input_ids": [1, 2, 99999]}', '{"text": "a", "sampling_params": {"max_new_tokens": 5000}}']
    prompts.write_text("\n".join([*lines[:3], *bad, *lines[3:]]), encoding="utf-8")
    out = tmp_path / "out"
    for _ in range(2):
        assert job(prompts, out, "--url", url) == 0
        assert_equal(samples_in(out), undisturbed)
        errors = errors_in(out)
        assert sorted(errors) == [3, 4, 5] and errors[3] == "not JSON"
        assert "vocabulary" in errors[4] and "context" in errors[5]
    assert job(prompts, out, "--url", url, "--retry-errors") == 0
    assert len(list((out / "errors").iterdir())) == 2 and summary_in(out)["prompts_failed"] == 3


def test_a_bad_road_changes_nothing(
    url: str, road: UnreliableRoad, prompts: Path, tmp_path: Path, undisturbed: Samples
) -> None:
    """Broken connections, answers cut short or altered, refusals of a proxy, busy servers: all is asked for again."""
    road.road = bad_road
    out = tmp_path / "out"
    assert job(prompts, out, "--url", url) == 0
    assert_equal(samples_in(out), undisturbed)
    assert summary_in(out)["retries"] >= 10 and not errors_in(out)


def bad_road(number: int, _: dict[str, Any], messages: list[Message]) -> list[Message] | None:
    start, body = messages[0], b"".join(message.get("body", b"") for message in messages[1:])
    altered = body[:-3] + bytes([body[-3] ^ 1]) + body[-2:]
    outcomes: list[list[Message] | None] = [
        None,
        [start, {"type": "http.response.body", "body": body[:100], "more_body": True}],
        [start, {"type": "http.response.body", "body": altered}],
        answer(503, b"no replica"),
        answer(500, b"Internal Server Error"),
        answer(404, b"Path '/generate' not found"),
        answer(429, b'{"error": {"message": "busy"}}', (b"retry-after", b"1")),
        answer(422, b'{"error": {"message": "the model failed"}}'),
        answer(200, b"no container"),
        answer(200, body[:2]),
    ]
    return outcomes[number] if number < len(outcomes) else messages


def answer(status: int, body: bytes, *headers: tuple[bytes, bytes]) -> list[Message]:
    return [
        {"type": "http.response.start", "status": status, "headers": headers},
        {"type": "http.response.body", "body": body},
    ]


def test_answers_that_stay_wrong_are_given_up(
    url: str, road: UnreliableRoad, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One prompt never gets a right answer: it ends in the errors, the others do not suffer."""
    monkeypatch.setattr("rayserve_moe.rollouts.driver.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("rayserve_moe.rollouts.driver.MAX_PAUSE_S", 0.01)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "input_ids": [5]}\n{"id": "b", "input_ids": [6, 7]}\n', encoding="utf-8")
    road.road = lambda _, asked, messages: answer(200, b"no container") if [5] in prompts_in(asked) else messages
    assert job(prompts, tmp_path / "out", "--url", url, n=2) == 0
    assert set(samples_in(tmp_path / "out")) == {("b", 0), ("b", 1)}
    (reason,) = errors_in(tmp_path / "out").values()
    assert "not an answer" in reason and summary_in(tmp_path / "out")["retries"] == MAX_FAULTS - 1


def test_aborted_samples_are_asked_for_again(
    url: str, prompts: Path, tmp_path: Path, undisturbed: Samples, engine: Engine
) -> None:
    """Somebody aborts everything, over and over, for a second."""
    stop = threading.Event()

    def abort() -> None:
        until = time.monotonic() + 1.0
        while time.monotonic() < until and not stop.is_set():
            engine.loop.abort_all()
            time.sleep(0.002)

    aborting = threading.Thread(target=abort)
    aborting.start()
    try:
        assert job(prompts, tmp_path / "out", "--url", url) == 0
    finally:
        stop.set()
        aborting.join()
    assert_equal(samples_in(tmp_path / "out"), undisturbed)
    summary = summary_in(tmp_path / "out")
    assert summary["retries"] > 0 and set(summary["finish_reasons"]) <= {"length", "stop"}


def test_messages_become_prompts_by_the_chat_template(url: str, tmp_path: Path, engine: Engine) -> None:
    messages = [{"role": "user", "content": "What is 2+2?"}]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "m", "messages": messages}) + "\n", encoding="utf-8")
    assert job(prompts, tmp_path / "out", "--url", url, n=1) == 0
    (sample,) = samples_in(tmp_path / "out").values()
    assert sample["prompt_ids"] == encode_chat(engine.tokenizer, messages)
    assert len(sample["output_ids"]) <= NEW_TOKENS


@pytest.mark.slow
def test_small_shards_hold_the_same(url: str, prompts: Path, tmp_path: Path, undisturbed: Samples) -> None:
    """One sample at a time, a shard for nearly each of them."""
    out = tmp_path / "out"
    assert job(prompts, out, "--url", url, "--in-flight", "1", "--flush-s", "0.02") == 0
    assert len(list((out / "rollouts").iterdir())) > 2
    assert_equal(samples_in(out), undisturbed)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--n", "0"], "--n must be greater"),
        (["--sampling", "{"], "not JSON"),
        (["--sampling", '{"n": 2}'], "may only hold"),
        (["--prompts", "/absent.jsonl"], "absent"),
        (["--seed", "1"], "another seed"),
        (["--no-routing"], "another routing"),
        (["--index-rows"], "index rows are not captured"),
        (["--index-rows", "--no-routing"], "--no-routing excludes --index-rows"),
        (["--tokenizer", "/absent"], "tokenizer.json is missing"),
        (["--out", "out"], "give an absolute path"),
        (["--out", "/tmp/ray/session/runtime_resources/working_dir_files/x/out"], "Ray's copy"),
    ],
)
def test_wrong_use_is_told_at_once(
    url: str,
    finished: tuple[Path, Path],
    undisturbed: Samples,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    reason: str,
) -> None:
    prompts, out = finished
    assert job(prompts, out, "--url", url, *more, n=4) == 2
    assert reason in capsys.readouterr().err
    assert_equal(samples_in(out), undisturbed)


def test_damaged_shards_are_sampled_again_by_wish(
    url: str, prompts: Path, tmp_path: Path, undisturbed: Samples, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert job(prompts, out, "--url", url, "--in-flight", "1", "--flush-s", "0.02") == 0
    shard = sorted((out / "rollouts").iterdir())[1]
    shard.write_bytes(shard.read_bytes().replace(b"sto", b"stO", 1)[:-5] + b"wrong")
    assert job(prompts, out, "--url", url) == 2
    assert shard.name in capsys.readouterr().err and shard.exists()
    assert job(prompts, out, "--url", url, "--resample-damaged") == 0
    assert 0 < summary_in(out)["samples_written"] < len(undisturbed)
    assert_equal(samples_in(out), undisturbed)


def test_other_fields_and_reasons_are_told(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Samples carry their row's other fields; the summary says where they are, and why rows were given up."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    prompts.write_text('{"id": "a", "text": "1+1=", "answer": {"sum": 2}}\n{"text": "a", "id": [1]}\nbad\nbad\n')
    assert job(prompts, out, "--url", url, n=2) == 0
    assert load(out).prompt_fields == [{"answer": {"sum": 2}}] * 2
    told = capsys.readouterr()
    assert f"writes to {out}" in told.err and f"in {out}" in told.out and "2 given up: not JSON" in told.out
    assert summary_in(out)["reasons"] == {"not JSON": 2, "`id` should be a whole number or a string": 1}


def test_a_full_disk_ends_the_job(
    url: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its reason, and a rate of what was sampled over the time it took."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(RolloutDirectory, "write_rollouts", refuse)
    assert job(prompts, tmp_path / "out", "--url", url) == 1
    summary = summary_in(tmp_path / "out")
    assert "no space left" in summary["reason"] and "no space left" in capsys.readouterr().out
    assert summary["samples_written"] == 0 and summary["sampling_s"] > 0
    assert summary["output_tokens_per_s"] <= summary["output_tokens"] / summary["sampling_s"] * 1.01 + 1


def test_a_server_that_never_answers_is_given_up(prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert job(prompts, out, "--url", "http://127.0.0.1:9", "--give-up-s", "0.5") == 1
    assert "no answer" in summary_in(out)["reason"]


def test_a_wrong_key_ends_the_job(url: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No prompt is blamed."""
    out = tmp_path / "out"
    monkeypatch.setenv("RAYSERVE_MOE_API_KEY", "wrong")
    assert job(prompts, out, "--url", url) == 1
    assert "key" in summary_in(out)["reason"] and not errors_in(out)


def test_other_weights_end_the_job(url: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Samples count under the version that is wanted, and none of another is kept."""
    out = tmp_path / "out"
    assert job(prompts, out, "--url", url, "--weight-version", "0", n=1) == 0
    before = samples_in(out)
    assert job(prompts, out, "--url", url, "--weight-version", "1", n=1) == 1
    assert "weight version 0, but 1 is required" in summary_in(out)["reason"]
    assert_equal(samples_in(out), before)
    capsys.readouterr()
