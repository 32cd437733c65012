"""Adapters over HTTP: merged under load by the routes of trainers, answered as a merged checkpoint, and unloaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from rayserve_moe.checkpoints.adapters.directory import NO_ADAPTER
from rayserve_moe.checkpoints.bucket import SentTensor, write_bucket
from rayserve_moe.config.settings import ServerSettings
from rayserve_moe.engine.control import WeightOrder
from rayserve_moe.serving.api.routes.unsupported import REASONS
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.http import create_api
from tests.http.test_control import NUM_WANTED, PROMPT, native, running
from tests.http.test_tensor_routes import samples, send
from tests.http.test_weight_routes import CONTINUE, PAUSE, UPDATE
from tests.support.checkpoints.adapters import make_adapter
from tests.support.engine.step_gate import unhurried
from tests.support.serving.http_client import GENERATE, ask, check_error
from tests.support.serving.http_server import running as serving
from tests.support.serving.local_fleet import local_fleet

pytestmark = pytest.mark.usefixtures("first_weights_afterwards")
LOAD, UNLOAD = "/load_lora_adapter", "/unload_lora_adapter"
ASK = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}}


@pytest.fixture(scope="module")
def made(checkpoint):
    return make_adapter(checkpoint, "fused")


@pytest.fixture(scope="module")
def adapter(made, tmp_path_factory):
    return made.write(tmp_path_factory.mktemp("adapters") / "v3")


@pytest.fixture(scope="module")
def merged(made, checkpoint, tmp_path_factory):
    return made.write_merged(checkpoint, tmp_path_factory.mktemp("merged") / "model")


def alike(ours, others):
    """Ids and rows are equal, log-probs but for the last bits."""
    for (ids, logprobs, rows, _), (wanted_ids, wanted, wanted_rows, _) in zip(ours, others, strict=True):
        assert ids == wanted_ids and rows == wanted_rows
        np.testing.assert_allclose([row[0] for row in logprobs], [row[0] for row in wanted], atol=1e-5, rtol=0)


def test_an_adapter_serves_as_a_merged_checkpoint_until_it_is_unloaded(http, engine, checkpoint, adapter, merged):
    before = samples(http)
    ask(http, UPDATE, model_path=str(merged), weight_version="1")
    wanted = samples(http)
    ask(http, UPDATE, model_path=str(checkpoint), weight_version="0")
    num_compilations = engine.runner.num_compilations_since_start
    with running(http, engine, GENERATE, native(rid="early", return_logprob=True)) as early:
        with unhurried(engine.loop, delay_s=0.2):  # the request outlasts the change
            done = ask(http, LOAD, lora_name="a-v3", lora_path=str(adapter))
        meta = early.result()["meta_info"]
    assert done["success"] and done["loaded_adapters"] == {"a-v3": str(adapter)} and done["weight_version"] == "1"
    assert 0 < done["max_rounding"] < 1e-6
    assert meta["completion_tokens"] == NUM_WANTED
    assert [span["version"] for span in meta["weight_versions"]] == ["0", "1"]
    alike(samples(http), wanted)
    assert samples(http)[0][0] != before[0][0]
    ask(http, PAUSE, mode="retract")
    done = ask(http, UNLOAD, lora_name="a-v3", weight_version="0")
    ask(http, CONTINUE)
    assert done["success"] and done["loaded_adapters"] == {}
    assert samples(http) == before
    assert engine.runner.num_compilations_since_start == num_compilations


def test_requests_and_listings_name_the_merged_adapter(http, adapter):
    name = "a-v3"
    ask(http, LOAD, lora_name=name, lora_path=str(adapter))
    assert [each["id"] for each in http.get("/v1/models").json()["data"]] == ["tiny", name]
    assert http.get(f"/v1/models/{name}").json()["parent"] == "tiny"
    assert http.get("/model_info").json()["adapter"] == name
    for model in (name, f"tiny:{name}", "tiny"):
        ask(http, "/v1/completions", model=model, prompt=PROMPT, max_tokens=2)
    for lora_path in (name, None, [name]):
        ask(
            http,
            GENERATE,
            **ASK | {"input_ids": [PROMPT] if isinstance(lora_path, list) else PROMPT},
            lora_path=lora_path,
        )
    stale = check_error(http.post(GENERATE, json={**ASK, "lora_path": "a-v2"}), 404)
    assert stale["message"] == "no such adapter (loaded: `a-v3`)" and stale["param"] == "lora_path"
    body = {"model": "a-v2", "prompt": PROMPT, "max_tokens": 2}
    assert "serves `tiny`, `a-v3`" in check_error(http.post("/v1/completions", json=body), 404)["message"]
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 2, "lora_path": "a-v2"}
    check_error(http.post("/v1/completions", json=body), 404)
    check_error(http.post(GENERATE, json={**ASK, "lora_path": [name, name]}), 400)
    for wrong in (5, [5], ["a" * 257]):
        assert check_error(http.post(GENERATE, json={**ASK, "lora_path": wrong}), 400)["param"] == "lora_path"
    ask(http, UNLOAD, lora_name=name)
    assert "no adapter is loaded" in check_error(http.post(GENERATE, json={**ASK, "lora_path": name}), 404)["message"]
    assert [each["id"] for each in http.get("/v1/models").json()["data"]] == ["tiny"]


@pytest.mark.parametrize("prefix", ["/v1", "/skyrl/v1"])
def test_the_routes_of_other_servers_answer_as_these_do(http, adapter, prefix):
    done = http.post(f"{prefix}{LOAD}", json={"lora_name": "a", "lora_path": str(adapter), "load_inplace": False})
    assert done.status_code == 200
    if prefix == "/v1":
        assert done.text == "Success: LoRA adapter 'a' added successfully."
    again = http.post(f"{prefix}{LOAD}", json={"lora_name": "a", "lora_path": str(adapter)})
    assert again.status_code == 200
    done = http.post(f"/v1{UNLOAD}", json={"lora_name": "a"})
    assert done.text == "Success: LoRA adapter 'a' removed successfully."
    check_error(http.post(f"/v1{UNLOAD}", json={"lora_name": "a"}), 404)


def test_a_directory_of_weights_may_be_an_adapter(http, adapter):
    """prime-rl pushes adapters under the model's own name by the route of whole checkpoints."""
    first = ask(http, LOAD, lora_name="x", lora_path=str(adapter)) and samples(http)
    done = ask(http, "/update_weights", weight_dir=str(adapter))
    assert done["success"] and done["max_rounding"] > 0
    assert http.get("/model_info").json()["adapter"] == "tiny"
    assert len(http.get("/v1/models").json()["data"]) == 1
    assert [each[:3] for each in samples(http)] == [each[:3] for each in first]


RECORDED = json.loads((Path(__file__).parent / "lora_requests.json").read_text(encoding="utf-8"))["requests"]
"""Recorded load requests by trainer, with the adapter name in the next request."""
UNLOADS = {"prime-rl 559b4477": "r16-a32", "SGLang, any": "a"}
"""Adapter that a recorded request alone unloads."""


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda each: f"{each['who']} {each['path']}")
def test_what_trainers_send_is_served_or_answered_501_with_the_alternative(http, adapter, recorded):
    paths = recorded["path"].split(" then ")
    bodies = recorded["body"] if isinstance(recorded["body"], list) else [recorded["body"]] * len(paths)
    if "unload" in paths[0]:
        ask(http, LOAD, lora_name=UNLOADS[recorded["who"]], lora_path=str(adapter))
    for path, body in zip(paths, bodies, strict=True):
        body = body | ({"lora_path": str(adapter)} if "lora_path" in body else {})
        answer = http.post(path, json=body)
        if path in REASONS:
            assert "/load_lora_adapter" in REASONS[path] or "/update_weights_from_tensor" in REASONS[path]
            check_error(answer, 501)
        elif body["lora_name"] == "a-v1":  # of a window that this server does not keep: a best effort of its client
            check_error(answer, 404)
        else:
            assert answer.status_code == 200, answer.text
    if paths[0] not in REASONS and "then" in recorded:
        named = {key: value for key, value in recorded["then"].items() if key != "path"}
        assert http.post(recorded["then"]["path"], json=NEXT[recorded["then"]["path"]] | named).status_code == 200


NEXT = {
    GENERATE: ASK,
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 2},
    "/inference/v1/generate": {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}},
    "/skyrl/v1/generate": {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}},
}
"""The rest of the body of a request that follows, by route."""


def body_of(tensors, config):
    sent = [SentTensor(name, np.ascontiguousarray(value)) for name, value in tensors.items()]
    return b"".join(bytes(part) for part in write_bucket(sent, adapter_config=config))


def test_an_adapter_may_be_sent_as_safetensors(http, made, adapter):
    ask(http, LOAD, lora_name="x", lora_path=str(adapter))
    wanted = samples(http)
    body = body_of(made.tensors, json.dumps(made.config))
    done = send(http, body, update_id="adapter", last=True, weight_version="1", lora_name="sent")
    assert done.status_code == 200, done.text
    assert http.get("/model_info").json()["adapter"] == "sent"
    assert [each[:3] for each in samples(http)] == [each[:3] for each in wanted]
    assert send(http, NO_ADAPTER, update_id="none", last=True).status_code == 200
    assert http.get("/model_info").json()["adapter"] is None
    assert "send it as the only bucket" in refusal(send(http, body, update_id="early"))
    for config, fault in (("[]", "must be a JSON object"), ('{"r": 0}', "r: 0 is no rank")):
        answer = send(http, body_of(made.tensors, config), update_id=f"config {len(config)}", last=True)
        assert fault in refusal(answer)


def refusal(answer):
    """Return the message of a refusal, which has SGLang's fields beside the error."""
    told = answer.json()
    assert answer.status_code == 400 and told["success"] is False and told["error"]["code"] == "weights_refused"
    assert told["message"] == told["error"]["message"]
    return told["message"]


def broken(adapter, path, *, config=None, tensors=None):
    shutil.copytree(adapter, path)
    if config is not None:
        (path / "adapter_config.json").write_text(config, encoding="utf-8")
    if tensors is not None:
        save_file(tensors, path / "adapter_model.safetensors")
    return path


def test_what_cannot_be_merged_is_refused_with_its_name_and_changes_nothing(http, made, adapter, tmp_path):
    before = samples(http)
    name = "base_model.model.model.layers.0.self_attn.zq7.lora_A.weight"
    unknown = {key: np.ascontiguousarray(value) for key, value in made.tensors.items()}
    unknown |= {name: np.zeros((4, 8), np.float32), name.replace("_A", "_B"): np.zeros((8, 4), np.float32)}
    lost = broken(adapter, tmp_path / "lost")
    (lost / "adapter_model.safetensors").unlink()
    nan = {key: value * np.float32(np.nan) for key, value in unknown.items()}
    cases = [
        (broken(adapter, tmp_path / "a", tensors=unknown), f"tensor {name}: the model has no matrix"),
        (broken(adapter, tmp_path / "b", config=json.dumps(made.config | {"use_dora": True})), "use_dora: DoRA"),
        (broken(adapter, tmp_path / "c", config=json.dumps(made.config | {"r": 8})), "rank 8 by the"),
        (broken(adapter, tmp_path / "d", config="{"), "not readable as JSON"),
        (broken(adapter, tmp_path / "e", tensors=nan), "holds values that are not finite"),
        (lost, "adapter_model.safetensors: file is missing"),
    ]
    for path, fault in cases:
        message = refusal(http.post(LOAD, json={"lora_name": "x", "lora_path": str(path)}))
        assert fault in message and str(tmp_path) not in message, message
    missing = check_error(http.post(LOAD, json={"lora_name": "x", "lora_path": str(tmp_path / "none")}), 404)
    assert missing["code"] == "adapter_not_found"
    for body in ({"lora_name": "", "lora_path": "/x"}, {"lora_name": "x", "lora_path": "x"}, {"lora_path": "/x"}):
        check_error(http.post(LOAD, json=body), 400)
    check_error(http.post(LOAD, json={"lora_name": "x", "lora_path": "gs://bucket/x"}), 400)
    assert http.get("/model_info").json()["adapter"] is None
    assert samples(http) == before


def test_adapters_lie_below_weight_roots(engine, adapter, tmp_path):
    state = ApiState(engine.loop, engine.tokenizer, ServerSettings(), weight_roots=(str(tmp_path),))
    with serving(create_api(state)) as url, httpx.Client(base_url=url, timeout=60) as http:
        outside = check_error(http.post(LOAD, json={"lora_name": "x", "lora_path": str(adapter)}), 400)
        assert outside["message"] == "`lora_path` lies outside of weight_roots"
        body = {"lora_name": "x", "lora_path": str(broken(adapter, tmp_path / "inside"))}
        assert http.post(LOAD, json=body).status_code == 200


def test_an_adapter_is_not_merged_into_weights_that_an_update_brought(
    http, checkpoint, other_checkpoint, adapter, made
):
    """Its base is the configured checkpoint: other weights would be lost by it without a word."""
    ask(http, UPDATE, model_path=str(other_checkpoint))
    refused = check_error(http.post(LOAD, json={"lora_name": "x", "lora_path": str(adapter)}), 409)
    assert "adapters are merged into the configured checkpoint" in refused["message"]
    body = body_of(made.tensors, json.dumps(made.config))
    check_error(send(http, body, update_id="sent onto others", last=True), 409)
    ask(http, UPDATE, model_path=str(checkpoint))
    ask(http, LOAD, lora_name="x", lora_path=str(adapter))


@pytest.mark.slow
def test_all_replicas_load_an_adapter_or_none_does(engine, second_engine, checkpoint, adapter):
    for one in (engine, second_engine):
        assert one.loop.control.update_weights(WeightOrder(str(checkpoint), "0")).result().success
    load = {"lora_name": "a-v3", "lora_path": str(adapter)}
    with local_fleet({"a": engine, "b": second_engine}) as fleet:
        first = fleet["a"].post(GENERATE, json=ASK).json()["output_ids"]
        fleet.calls.silent = {"b"}
        assert "replica b did not answer" in refusal(fleet["a"].post(LOAD, json=load))
        fleet.calls.silent = set()
        fleet.sync()
        assert engine.loop.control.adapter == "" and fleet["a"].post(GENERATE, json=ASK).json()["output_ids"] == first
        done = fleet["a"].post(LOAD, json=load).json()
        assert done["success"] and done["max_rounding"] > 0
        assert {one.loop.control.adapter for one in (engine, second_engine)} == {"a-v3"}
        answers = [fleet[name].post(GENERATE, json={**ASK, "lora_path": "a-v3"}).json() for name in "ab"]
        assert answers[0]["output_ids"] == answers[1]["output_ids"] != first
        assert fleet["b"].post("/v1/unload_lora_adapter", json={"lora_name": "a-v3"}).status_code == 200
        assert {one.loop.control.adapter for one in (engine, second_engine)} == {""}
        assert [fleet[name].post(GENERATE, json=ASK).json()["output_ids"] for name in "ab"] == [first, first]
