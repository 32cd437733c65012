"""Weights over HTTP: they serve as those of a checkpoint do, whole, in part and as a delta, or nothing changes."""

from __future__ import annotations

import json
import socket
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file

from rayserve_moe.checkpoints.bucket import SentTensor, write_bucket
from tests.http.conftest import assert_idle, served
from tests.http.test_control import NUM_WANTED, PROMPT, native, running
from tests.http.test_weight_routes import CONTINUE, PAUSE, UPDATE
from tests.support.serving.http_client import GENERATE, ask, wait_until

pytestmark = pytest.mark.usefixtures("first_weights_afterwards")
PATH = "/update_weights_from_tensor"
SAFETENSORS = {"content-type": "application/vnd.safetensors"}
GATE, TABLE = "model.layers.2.mlp.gate.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def tensors(checkpoint):
    return load_file(checkpoint / "model.safetensors")


@pytest.fixture(scope="module")
def others(other_checkpoint):
    return load_file(other_checkpoint / "model.safetensors")


def bucket(tensors, **keywords):
    sent = [SentTensor(name, *(value if isinstance(value, tuple) else (value,))) for name, value in tensors.items()]
    return b"".join(bytes(part) for part in write_bucket(sent, **keywords))


def send(http, body, **query):
    return http.post(PATH, content=body, headers=SAFETENSORS, params=query)


def send_all(http, tensors, *, update_id, num_buckets=3, **query):
    """Send tensors in buckets; returns the last answer."""
    names = np.array_split(np.array(sorted(tensors)), num_buckets)
    for number, part in enumerate(names):
        is_last = number == num_buckets - 1
        answer = send(
            http,
            bucket({str(name): tensors[str(name)] for name in part}),
            update_id=update_id,
            bucket=number,
            **({"last": True, **query} if is_last else {}),
        )
        assert answer.status_code == 200, answer.text
    return answer.json()


def samples(http):
    """Tokens, log-probs and rows of a few prompts, all of them computed, each alone: bits depend on the batch."""
    ask(http, "/flush_cache")
    fields = "output_token_logprobs", "routed_experts", "weight_version"
    answers = []
    for prompt in (PROMPT, list(range(3, 40))):
        told = ask(
            http,
            GENERATE,
            input_ids=prompt,
            sampling_params={"temperature": 0, "ignore_eos": True, "max_new_tokens": 12},
            return_logprob=True,
            return_routed_experts=True,
        )
        answers.append((told["output_ids"], *(told["meta_info"][field] for field in fields)))
    return answers


def served_from_disk(http, path):
    assert ask(http, UPDATE, model_path=str(path), weight_version="n")["success"]
    return samples(http)


def test_sent_weights_answer_as_those_of_a_checkpoint(http, engine, checkpoint, other_checkpoint, others):
    """Bit for bit: tokens, log-probs and rows; and nothing is compiled for it."""
    wanted = served_from_disk(http, other_checkpoint)
    ask(http, UPDATE, model_path=str(checkpoint), weight_version="0")
    num_compilations = engine.runner.num_compilations_since_start
    done = send_all(http, others, update_id="whole", weight_version="n", flush_cache=False)
    assert done["success"] and done["weight_version"] == "n" and done["num_paused_requests"] == 0
    assert samples(http) == wanted
    assert http.get("/model_info").json()["model_path"] == str(checkpoint)
    assert engine.runner.num_compilations_since_start == num_compilations
    send_all(http, others, update_id="numbered", weight_version="7")
    assert send_all(http, others, update_id="again")["weight_version"] == "8"


def write_like(path, tensors):
    body = bucket(tensors)
    (path / "model.safetensors").write_bytes(body)
    return path


@pytest.fixture
def copy_of(checkpoint, tmp_path):
    """Write a checkpoint with some tensors changed."""

    def write(tensors):
        path = tmp_path / "copy"
        path.mkdir(exist_ok=True)
        for file in checkpoint.iterdir():
            if file.name != "model.safetensors":
                (path / file.name).write_bytes(file.read_bytes())
        return write_like(path, tensors)

    return write


def test_a_part_of_the_weights_may_be_sent(http, tensors, others, copy_of):
    """The router stays as it is, say; so too where the part comes after other weights that were sent."""
    some = {name: value for name, value in others.items() if "experts" in name or name == TABLE}
    wanted = served_from_disk(http, copy_of({**tensors, **some}))
    send_all(http, tensors, update_id="first")
    assert send_all(http, some, update_id="second", weight_version="n")["success"]
    assert samples(http) == wanted


def test_a_delta_changes_the_places_that_it_names(http, tensors, copy_of):
    changed, delta = dict(tensors), {}
    generator = np.random.default_rng(0)
    for name in (GATE, TABLE, "model.layers.0.mlp.experts.3.up_proj.weight", "model.norm.weight"):
        at = np.flatnonzero(generator.random(tensors[name].size) < 0.15).astype(np.uint32)
        changed[name] = tensors[name].copy()
        changed[name].reshape(-1)[at] = generator.standard_normal(len(at)).astype(np.float32)
        delta[name] = changed[name].reshape(-1)[at], at
    wanted = served_from_disk(http, copy_of(changed))
    send_all(http, tensors, update_id="delta base", weight_version="base")
    body = bucket(delta, base_version="base")
    assert send(http, body, update_id="delta", last=True, weight_version="n").json()["success"]
    assert samples(http) == wanted
    refused = send(http, body, update_id="delta again")
    assert send(http, bucket({}), update_id="delta again", last=True).status_code == 409
    assert refused.status_code == 409 and refused.json()["error"]["code"] == "weights_conflict"
    assert http.get("/get_weight_version").json() == {"weight_version": "n"}
    assert samples(http) == wanted


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", [None, "retract"])
def test_requests_cross_an_update_as_one_from_disk(http, engine, others, mode, unhurried):
    with running(http, engine, GENERATE, native(rid="mine")) as answer:
        if mode:
            ask(http, PAUSE, mode=mode)
        done = send_all(http, others, update_id=f"crossed {mode}", weight_version="new")
        assert done["num_paused_requests"] == (1 if mode else 0)
        ask(http, CONTINUE)
        told = answer.result()["meta_info"]
    ((_, boundary, old), (also_boundary, end, new)) = told["logprob_weight_versions"]
    assert (old, new, boundary) == ("0", "new", also_boundary) and end == len(PROMPT) + NUM_WANTED


def wrong_bodies(tensors):
    gate, whole = tensors[GATE], bucket({GATE: tensors[GATE], TABLE: tensors[TABLE]})
    return {
        "unknown": (bucket({"model.x": gate}), "the model has no tensor model.x"),
        "misshapen": (bucket({GATE: gate[:, :-1]}), f"tensor {GATE} is "),
        "mistyped": (bucket({GATE: gate.astype(np.int32)}), f"tensor {GATE} has dtype I32"),
        "not finite": (bucket({GATE: np.full_like(gate, np.inf)}), "holds values that are not finite"),
        "flipped": (whole[:-1] + bytes([whole[-1] ^ 1]), "does not match the crc32"),
        "truncated": (whole[:-100], "truncated"),
        "outside": (
            bucket({GATE: (gate[0, :1], np.array([gate.size], np.uint32))}, base_version="0"),
            "positions outside",
        ),
        "no safetensors": (b"PK" * 100, "the bucket: "),
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "way", wrong_bodies({GATE: np.zeros((16, 64), np.float32), TABLE: np.zeros((4, 4), np.float32)})
)
def test_what_is_wrong_with_a_bucket_leaves_the_old_weights(http, engine, tensors, others, way):
    """Refused in one line, with all that its update had sent before; the next update is not behind it."""
    before = samples(http)
    body, message = wrong_bodies(tensors)[way]
    assert send(http, bucket({GATE: others[GATE]}), update_id=way, bucket=0).status_code == 200
    answer = send(http, body, update_id=way, bucket=1, last=True)
    assert answer.status_code == 400 and message in answer.json()["message"] == answer.json()["error"]["message"]
    assert answer.json()["success"] is False and answer.json()["error"]["code"] == "weights_refused"
    assert send(http, bucket({}), update_id=way, last=True).status_code == 409
    assert http.get("/get_weight_version").json() == {"weight_version": "0"} and samples(http) == before
    assert_idle(engine)


def test_a_half_sent_update_can_be_dropped(http, others):
    before = samples(http)
    assert send(http, bucket(others), update_id="half").status_code == 200
    assert http.delete(PATH, params={"update_id": "half"}).json() == {"success": True, "was_open": True}
    assert http.delete(PATH, params={"update_id": "half"}).json() == {"success": True, "was_open": False}
    assert send(http, bucket({}), update_id="half", last=True).status_code == 409
    assert samples(http) == before


def test_another_update_or_time_ends_a_half_sent_one(http, engine, checkpoint, others, monkeypatch):
    """And what is left of it changes nothing."""
    before = samples(http)
    send(http, bucket(others), update_id="early")
    send(http, bucket({GATE: others[GATE]}), update_id="late")
    assert send(http, bucket({}), update_id="early", last=True).status_code == 409
    assert ask(http, UPDATE, model_path=str(checkpoint), weight_version="0")["success"]
    assert send(http, bucket({}), update_id="late", last=True).status_code == 409
    monkeypatch.setattr(engine.loop.control.tensors, "idle_s", 0.01)
    send(http, bucket({GATE: others[GATE]}), update_id="idle")
    wait_until(lambda: engine.loop.control.tensors._open is None)
    assert send(http, bucket({}), update_id="idle", last=True).status_code == 409
    assert samples(http) == before


def test_a_missing_bucket_is_noticed(http, others):
    before = samples(http)
    assert send(http, bucket({GATE: others[GATE]}), update_id="from the middle", bucket=1).status_code == 409
    assert send(http, bucket({GATE: others[GATE]}), update_id="gap", bucket=0).status_code == 200
    assert send(http, bucket({GATE: others[GATE]}), update_id="gap", bucket=2, last=True).status_code == 409
    assert samples(http) == before


def test_a_sender_that_is_lost_half_way_leaves_the_old_weights(http, url, engine, others):
    """Not even a bucket of it is kept, and the next sender finds nothing in its way."""
    before, address = samples(http), urlsplit(url)
    body = bucket(others)
    head = f"POST {PATH}?update_id=lost&last=true HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    send(http, bucket({GATE: others[GATE]}), update_id="lost")
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(head + body[: len(body) // 2])
    wait_until(lambda: engine.loop.control.tensors._open is None)
    assert http.get("/get_weight_version").json() == {"weight_version": "0"} and samples(http) == before
    assert send(http, bucket({}), update_id="lost", last=True).status_code == 409
    assert send_all(http, others, update_id="next")["success"]


def test_buckets_are_not_bound_by_the_limit_on_bodies(engine, others):
    body = bucket(others)
    with served(engine, max_body_bytes=1000) as url, httpx.Client(base_url=url, timeout=600) as small:
        assert small.post(GENERATE, content=body).status_code == 413
        assert send(small, body, update_id="long", last=True).json()["success"]


@pytest.mark.parametrize("content_type", ["application/json", "application/json; charset=utf-8"])
def test_pickled_tensors_are_refused(http, content_type):
    body = json.dumps({"serialized_named_tensors": ["gASV"], "flush_cache": False})
    answer = http.post(PATH, content=body, headers={"content-type": content_type})
    assert answer.status_code == 400 and "nothing from the network is unpickled" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({}, "update_id"),
        ({"update_id": ""}, "update_id"),
        ({"update_id": "x", "last": "maybe"}, "last"),
        ({"update_id": "x", "bucket": "-1"}, "bucket"),
        ({"update_id": "x", "bucket": "one"}, "bucket"),
        ({"update_id": "x", "weight_version": "v" * 300}, "weight_version"),
    ],
)
def test_a_wrong_query_is_named(http, query, param):
    answer = send(http, bucket({}), **query)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
