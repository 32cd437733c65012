"""Trainers change the weights by their own sequences of requests while a rollout runs, and nothing is lost."""

from __future__ import annotations

import pytest

from tests.http.test_control import NUM_WANTED, native, running
from tests.http.test_trainer_control import going_on
from tests.http.test_weight_routes import SHORT
from tests.http.trainer_flows import CHECKPOINT, FLOWS
from tests.support.serving.http_client import GENERATE, ask, wait_until

__all__ = ["going_on"]

ENDS = {"slime", "AReaL by SGLang", "AReaL by vLLM", "verl", "NeMo-RL"}
"""Trainers whose requests end what runs; with the others it goes on."""


def answer_of(http, method, path, body):
    return http.request(method, path, json=body) if body is not None else http.request(method, path)


def holds(fields, answer):
    return {name: answer.get(name) for name in fields} == fields


def take_step(http, step, checkpoint):
    method, path, body, status, fields = step
    if body:
        body = {name: str(checkpoint) if value == CHECKPOINT else value for name, value in body.items()}
    if status is None:
        wait_until(lambda: answer_of(http, method, path, body).status_code == 200)
        wait_until(lambda: holds(fields, answer_of(http, method, path, body).json()), within_s=60)
        return
    answer = answer_of(http, method, path, body)
    assert answer.status_code == status, (path, answer.text)
    assert holds(fields, answer.json()), (path, answer.text)
    if status == 501:
        assert len(answer.json()["error"]["message"].split()) > 8


@pytest.mark.sampled(2)
@pytest.mark.parametrize("trainer", FLOWS)
def test_a_trainer_changes_the_weights_of_a_running_server(
    http, engine, going_on, other_checkpoint, unhurried, trainer
):
    before = http.get("/get_weight_version").json()["weight_version"]
    with running(http, engine, GENERATE, native(rid="rollout", return_logprob=True)) as rollout:
        for step in FLOWS[trainer]:
            take_step(http, step, other_checkpoint)
        meta = rollout.result()["meta_info"]
    after = http.get("/get_weight_version").json()["weight_version"]
    assert meta["finish_reason"]["type"] == ("abort" if trainer in ENDS else "length")
    assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] <= NUM_WANTED
    spans = meta["weight_versions"]
    assert spans[0]["version"] == before and spans[-1]["end"] == meta["completion_tokens"]
    if trainer not in ENDS:
        assert spans[-1]["version"] == after
    assert ask(http, GENERATE, **SHORT)["meta_info"]["weight_version"] == after
