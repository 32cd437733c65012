"""Control of several replicas by any of them: all do it, or it is said who does not; weights change for all or none."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import pytest
from safetensors.numpy import load_file

from rayserve_moe.checkpoints.bucket import SentTensor, write_bucket
from rayserve_moe.cluster.replica_engine import FirstWeights
from rayserve_moe.engine.control import WeightOrder
from rayserve_moe.fleet.wanted_state import ServedWeights
from tests.support.serving.http_client import GENERATE, wait_until
from tests.support.serving.local_fleet import LocalFleet, local_fleet

UPDATE, PAUSE, CONTINUE = "/update_weights_from_disk", "/pause_generation", "/continue_generation"
TENSORS = "/update_weights_from_tensor"
SAFETENSORS = {"content-type": "application/vnd.safetensors"}
ASK = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}}


@pytest.fixture
def fleet(engine, second_engine, checkpoint):
    for one in (engine, second_engine):
        one.loop.control.resume().result()
        serve_first(one, checkpoint)
    with local_fleet({"a": engine, "b": second_engine}) as fleet:
        yield fleet
    engine.loop.control.resume().result()
    serve_first(engine, checkpoint)


def serve_first(engine, checkpoint):
    assert engine.loop.control.update_weights(WeightOrder(str(checkpoint), "0")).result().success


def ids(fleet: LocalFleet, name: str) -> tuple[list[int], str]:
    answer = fleet[name].post(GENERATE, json=ASK).json()
    return answer["output_ids"], answer["meta_info"]["weight_version"]


def versions(fleet: LocalFleet) -> dict[str, str]:
    found = fleet["a"].get("/get_weight_version").json()
    assert found["missing"] == [] and found["agree"] == (len(set(found["replicas"].values())) == 1)
    return found["replicas"]


def test_replicas_answer_alike_whichever_is_asked(fleet):
    assert ids(fleet, "a") == ids(fleet, "b")
    for name in "ab":
        loads = fleet[name].get("/v1/loads").json()
        assert [load["replica"] for load in loads["loads"]] == ["a", "b"] and loads["missing"] == []
        assert set(fleet[name].get("/server_info").json()["replicas"]) == {"a", "b"}
        text = fleet[name].get("/metrics").text
        assert (
            'rayserve_moe_replica_up{model_name="tiny",replica="b"} 1.0' in text
            and text.count("# TYPE rayserve_moe_steps_total") == 1
        )
        assert 'rayserve_moe_steps_total{model_name="tiny",replica="a"}' in text
        state = fleet[name].get("/experts/state", params={"replica": "b"}).json()
        assert state["replica"] == "b" and state["replicas"] == ["a", "b"]
    assert fleet["a"].get("/experts/state", params={"replica": "c"}).status_code == 404


def test_a_pause_holds_all_replicas_and_those_that_come_later(fleet, engine):
    assert fleet["a"].post(PAUSE, json={"mode": "abort"}).status_code == 200
    assert all(load["paused"] for load in fleet["b"].get("/v1/loads").json()["loads"])
    with ExitStack() as closing:
        engine.loop.control.resume().result()  # as a process that has just started
        fleet.add("c", engine, closing)
        assert fleet["c"].get("/is_paused").json()["is_paused"]
        assert fleet["b"].post(CONTINUE).status_code == 200
        assert not fleet["c"].get("/is_paused").json()["is_paused"]
        assert len(ids(fleet, "a")[0]) == len(ids(fleet, "b")[0]) == 6


def test_weights_change_everywhere_and_for_those_that_come_later(fleet, engine, checkpoint, other_checkpoint):
    before, _ = ids(fleet, "a")
    answer = fleet["b"].post(UPDATE, json={"model_path": str(other_checkpoint)}).json()
    assert answer["success"] and answer["weight_version"] == "1" and versions(fleet) == {"a": "1", "b": "1"}
    after = ids(fleet, "a")
    assert after == ids(fleet, "b") and after[0] != before
    fleet.remove("a")
    with ExitStack() as closing:
        serve_first(engine, checkpoint)  # as a process that has just started
        fleet.add("c", engine, closing)
        assert ids(fleet, "c") == after
    assert fleet["b"].post("/update_weight_version", json={"new_version": "seven"}).status_code == 200
    assert ids(fleet, "b") == (after[0], "seven")


def test_weights_that_one_replica_cannot_read_change_nowhere(fleet, tmp_path):
    refused = fleet["a"].post(UPDATE, json={"model_path": str(tmp_path)})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "weights_refused"
    assert "replica " in refused.json()["message"] and "old weights serve on" in refused.json()["message"]
    assert versions(fleet) == {"a": "0", "b": "0"} and fleet.calls.asked[-2] == "discard"
    assert fleet.state.view().order_id is None


def test_weights_that_only_one_replica_refuses_are_dropped_by_the_other(fleet, other_checkpoint):
    staged = fleet.member("b").stage
    fleet.member("b").stage = lambda *_, **__: "its disk is full"
    try:
        refused = fleet["a"].post(UPDATE, json={"model_path": str(other_checkpoint)}).json()
    finally:
        fleet.member("b").stage = staged
    assert "replica b: its disk is full" in refused["message"]
    assert versions(fleet) == {"a": "0", "b": "0"} and fleet.member("a").staged_id == ""
    assert fleet["a"].post(UPDATE, json={"model_path": str(other_checkpoint)}).json()["success"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("path", [PAUSE, UPDATE, "/flush_cache", "/abort_request"])
def test_a_replica_that_does_not_answer_is_named_and_nothing_counts_as_done(fleet, path, other_checkpoint):
    fleet.calls.silent = {"b"}
    body = {UPDATE: {"model_path": str(other_checkpoint)}, "/abort_request": {"rid": "x"}}.get(path, {})
    answer = fleet["a"].post(path, json=body)
    assert answer.status_code == (400 if path == UPDATE else 503) and "replica b did not answer" in answer.text
    loads = fleet["a"].get("/v1/loads").json()
    assert loads["missing"] == ["b"] and [load["replica"] for load in loads["loads"]] == ["a"]
    assert 'rayserve_moe_replica_up{model_name="tiny",replica="b"} 0.0' in fleet["a"].get("/metrics").text
    fleet.calls.silent = set()
    assert versions(fleet) == {"a": "0", "b": "0"}
    fleet.sync()
    assert fleet["b"].get("/is_paused").json()["is_paused"] == (path == PAUSE)


def test_an_update_that_lost_its_caller_is_followed_or_dropped_by_what_was_decided(fleet, other_checkpoint):
    control = fleet.calls.replicas["b"].loop.control
    for is_decided in (False, True):
        order = f"order-{is_decided}"
        fleet.state.begin(order)
        assert fleet.member("b").stage(control, order, path=str(other_checkpoint)) == ""
        fleet.sync()
        assert fleet.member("b").staged_id == order  # its order still runs
        weights = fleet.state.view().wanted.weights.__class__(order, str(other_checkpoint), "9")
        if is_decided:
            fleet.state.commit(order, weights)
        fleet.state.end(order)
        fleet.sync()
        assert fleet.member("b").staged_id == ""
        assert versions(fleet) == ({"a": "9", "b": "9"} if is_decided else {"a": "0", "b": "0"})
    assert ids(fleet, "a") == ids(fleet, "b")


def test_weights_that_are_sent_to_one_serve_everywhere_or_nowhere(fleet, other_checkpoint, engine):
    tensors = list(load_file(other_checkpoint / "model.safetensors").items())

    def send(name, update_id, number, part, **options):
        body = b"".join(bytes(piece) for piece in write_bucket([SentTensor(*pair) for pair in part]))
        params = {"update_id": update_id, "bucket": number, **options}
        return fleet[name].post(TENSORS, params=params, content=body, headers=SAFETENSORS)

    half = len(tensors) // 2
    assert send("a", "of the fleet", 0, tensors[:half]).json()["success"]
    fleet.calls.silent = {"b"}
    lost = send("a", "of the fleet", 1, tensors[half:], last=True)
    assert lost.status_code == 400 and "replica b did not answer" in lost.json()["message"]
    fleet.calls.silent = set()
    assert versions(fleet) == {"a": "0", "b": "0"}
    assert send("b", "of the fleet", 1, tensors[half:], last=True).status_code == 409
    assert send("a", "of the fleet again", 0, tensors[:half]).json()["success"]
    assert versions(fleet) == {"a": "0", "b": "0"}
    done = send("b", "of the fleet again", 1, tensors[half:], last=True, weight_version="sent").json()
    assert done["success"] and versions(fleet) == {"a": "sent", "b": "sent"}
    assert ids(fleet, "a") == ids(fleet, "b")
    assert fleet.state.view().wanted.weights.path is None


def test_a_replica_that_cannot_have_what_was_sent_ends_and_one_that_starts_waits(fleet, checkpoint):
    control = fleet.calls.replicas["b"].loop.control
    weights = fleet.state.view().wanted.weights.__class__("sent", None, "9")
    fleet.state.begin("sent")
    fleet.state.commit("sent", weights)
    fleet.state.end("sent")
    member = fleet.member("b")
    member._ended.wait = lambda _: False  # its thread need not wait
    member.keep_up(control)
    assert fleet.given_up == ["b"]
    asked: list[str] = []
    offer = FirstWeights("", "9")

    def offered(order_id: str) -> FirstWeights | None:
        asked.append(order_id)
        return offer if len(asked) > 1 else None

    assert member.first_weights(offered, poll_s=0) is offer and asked == ["sent", "sent"]
    fleet.calls.listed.clear()
    first = member.first_weights(offered, poll_s=0)  # all that had them are gone
    assert (first.path, first.version, member.awaited) == ("", None, "9")
    assert fleet.state.view().wanted.weights == weights.__class__(awaited="9")


@pytest.mark.parametrize("is_sent", [True, False])
def test_nothing_is_answered_by_other_weights_than_those_that_were_lost(
    engine, checkpoint, other_checkpoint, is_sent, caplog
):
    serve_first(engine, checkpoint)
    with ExitStack() as closing, local_fleet({"before": engine}) as fleet:
        fleet.state.begin("sent")
        number = fleet.state.commit("sent", ServedWeights("sent", None, "9")).number
        fleet.state.end("sent")
        fleet.remove("before")
        fleet.state.forget(["before"])
        fleet.state.abandon(number)
        fleet.add("after", engine, closing)
        after = fleet["after"]
        sentence = "weights 9 were lost with all replicas that had them: push them again, or others"
        completion = {"prompt": [5, 6], "max_tokens": 2}
        asked = [("/v1/completions", {**completion, "stream": stream}) for stream in (False, True)]
        refused = [after.post(path, json=body) for path, body in ((GENERATE, ASK), *asked)]
        for one in (*refused, after.get("/ready"), after.get("/health_generate")):
            assert (one.status_code, one.json()["error"]["code"]) == (503, "weights_lost")
            assert one.json()["error"]["message"] == sentence and one.headers["retry-after"] == "5"
        assert after.get("/health").json() == {"status": "ok", "weights_awaited": "9"}
        assert after.get("/liveness").status_code == 200
        fleet.state.kept.restore(replace(fleet.state.view().wanted, number=number + 9))  # as after a loss of the actor
        fleet.sync()
        assert after.get("/ready").status_code == 503
        if is_sent:
            tensors = [SentTensor(*each) for each in load_file(other_checkpoint / "model.safetensors").items()]
            body, params = (
                b"".join(map(bytes, write_bucket(tensors))),
                {"update_id": "after the loss of all", "last": True, "weight_version": "9"},
            )
            pushed = after.post(TENSORS, params=params, content=body, headers=SAFETENSORS)
        else:
            pushed = after.post(UPDATE, json={"model_path": str(other_checkpoint), "weight_version": "9"})
        assert pushed.json()["success"], pushed.text
        assert after.get("/ready").status_code == 200 and after.get("/health").json() == {"status": "ok"}
        assert ids(fleet, "after")[1] == "9"
        serve_first(engine, checkpoint)


def test_a_lone_replica_answers_as_without_a_fleet_and_outlives_the_actor(engine, http, other_checkpoint, checkpoint):
    with local_fleet({"a": engine}) as fleet:
        for path in ("/get_weight_version", "/server_info", "/is_paused", "/v1/loads"):
            alone, plain = fleet["a"].get(path).json(), http.get(path).json()
            assert list(alone) == list(plain)
        fleet.state.is_lost = True
        assert fleet["a"].post(PAUSE, json={}).status_code == 200 and fleet["a"].get("/is_paused").json()["is_paused"]
        assert fleet["a"].post(CONTINUE).status_code == 200
        assert fleet["a"].post(UPDATE, json={"model_path": str(other_checkpoint)}).json()["success"]
        fleet.state.is_lost = False
        fleet.sync()
        assert fleet.state.view().wanted == fleet.member("a").applied
        assert fleet.state.view().wanted.weights.path == str(other_checkpoint)
        assert fleet["a"].post(UPDATE, json={"model_path": str(checkpoint), "weight_version": "0"}).json()["success"]


@pytest.mark.parametrize("path", ["/get_weight_version", "/server_info"])
def test_reports_tell_how_many_replicas_should_answer(path, engine, second_engine):
    """A lost replica is no longer listed, and its successor is not there yet: the number still tells."""
    with local_fleet({"a": engine, "b": second_engine}) as fleet:
        fleet.calls.wanted = 2
        both = fleet["a"].get(path).json()
        assert list(both["replicas"]) == ["a", "b"] and both["num_wanted_replicas"] == 2
        fleet.remove("b")
        fleet.sync()
        left = fleet["a"].get(path).json()
        assert list(left["replicas"]) == ["a"] and left["missing"] == [] and left["num_wanted_replicas"] == 2
        fleet.calls.wanted = 1  # scaled down: a single replica answers as one without a fleet
        assert "replicas" not in fleet["a"].get(path).json()


def test_control_of_a_fleet_without_its_actor_is_refused(fleet, other_checkpoint):
    fleet.state.is_lost = True
    for path, body in ((PAUSE, {}), (UPDATE, {"model_path": str(other_checkpoint)})):
        refused = fleet["a"].post(path, json=body)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "no_state"
    assert fleet["a"].post(GENERATE, json=ASK).status_code == 200


def test_a_batch_is_aborted_wherever_it_runs(fleet, second_engine):
    assert fleet["b"].post("/pause_generation", json={"mode": "in_place"}).status_code == 200
    second_engine.loop.control.pause("in_place").result()
    assert fleet["a"].post(CONTINUE).status_code == 200
    wait_until(lambda: not second_engine.loop.control.is_paused)
    assert fleet["a"].post("/abort_requests", json={}).json()["status"] == "aborted"
    assert fleet["a"].post("/pause", json={"mode": "wait"}).status_code == 200
    assert all(load["paused"] for load in fleet["a"].get("/v1/loads").json()["loads"])


RESPONSES = "/v1/responses"


def test_a_response_is_found_whichever_replica_is_asked(fleet):
    asked = {"input": "x", "max_output_tokens": 2, "temperature": 0}
    first = fleet["a"].post(RESPONSES, json=asked).json()
    assert fleet["b"].get(f"{RESPONSES}/{first['id']}").json() == first
    later = [
        fleet[name].post(RESPONSES, json={**asked, "previous_response_id": first["id"]}).json()["usage"]
        for name in "ab"
    ]
    assert later[0]["input_tokens"] == later[1]["input_tokens"] > first["usage"]["input_tokens"]
    unknown = fleet["b"].get(f"{RESPONSES}/resp_unknown")
    assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "response_not_found"
    fleet.calls.silent = {"a"}
    late = fleet["b"].post(RESPONSES, json={**asked, "previous_response_id": first["id"]})
    assert late.status_code == 503 and late.json()["error"]["code"] == "replica_missing"
    fleet.calls.silent = set()
    assert fleet["b"].delete(f"{RESPONSES}/{first['id']}").json()["deleted"]
    for name in "ab":
        assert fleet[name].delete(f"{RESPONSES}/{first['id']}").status_code == 404
        assert fleet[name].get(f"{RESPONSES}/{first['id']}").status_code == 404
