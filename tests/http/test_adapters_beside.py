"""Several adapters over HTTP: loaded by the routes of trainers, named per prompt, on every replica, and resumed."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from rayserve_moe.checkpoints.adapters.directory import NO_ADAPTER
from rayserve_moe.checkpoints.bucket import SentTensor, write_bucket
from rayserve_moe.config.settings import ServerSettings
from rayserve_moe.engine.updates.adapters import LOST_WHILE_LOADING
from rayserve_moe.engine.updates.orders import WeightOutcome
from rayserve_moe.inprocess.engine import Engine
from rayserve_moe.replay.encoding import decode_rollout
from rayserve_moe.serving.api.routes.unsupported import REASONS
from rayserve_moe.serving.api_state import ApiState
from rayserve_moe.serving.control import membership
from rayserve_moe.serving.control.membership import OffersOfOthers
from rayserve_moe.serving.http import create_api
from tests.http.conftest import assert_idle
from tests.http.test_adapters import LOAD, NEXT, RECORDED, UNLOAD, UNLOADS, refusal
from tests.http.test_journal import NATIVE, RESUME, all_events, begin, last_answers, pair_over, shown
from tests.http.test_tensor_routes import send
from tests.support.checkpoints.adapters import make_adapter_beside
from tests.support.engine.shared_settings import SERVED, write_served
from tests.support.serving import local_fleet as local_fleet_module
from tests.support.serving.http_client import GENERATE, ask, check_error
from tests.support.serving.http_server import running as serving
from tests.support.serving.journal_server import OwnJournal
from tests.support.serving.local_fleet import local_fleet

pytestmark = pytest.mark.slow
PROMPT = [5, 6, 7, 8, 9]
WITHIN_S = 60.0
ASK = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}}
BESIDE = {**SERVED, "max_loras": 2, "max_lora_rank": 4, "max_cpu_loras": 4, "structured_output": False}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_served(tmp_path_factory.mktemp("served") / "tiny", seed=11)


@pytest.fixture(scope="module")
def engines(base):
    with ExitStack() as closing:
        yield {name: closing.enter_context(Engine(str(base), **BESIDE)) for name in "ab"}


@pytest.fixture(scope="module")
def made(base):
    return [make_adapter_beside(base, seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def paths(made, tmp_path_factory):
    return [str(each.write(tmp_path_factory.mktemp("adapters") / "v")) for each in made]


@pytest.fixture(autouse=True)
def no_adapter_before(engines):
    for engine in engines.values():
        assert_idle(engine)
        for name in list(engine.loop.control.adapters.table.current):
            assert engine.unload_lora_adapter(name).success


@pytest.fixture
def http(engines):
    engine = engines["a"]
    state = ApiState(engine.loop, engine.tokenizer, ServerSettings())
    with serving(create_api(state)) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def ids_of(http, path=GENERATE, **fields):
    return ask(http, path, **ASK | fields)["output_ids"]


def test_requests_name_adapters_by_every_field_that_servers_have(http, paths):
    base = ids_of(http)
    for name, path in zip("xy", paths, strict=True):
        done = ask(http, LOAD, lora_name=name, lora_path=path)
        assert done["success"] and done["loaded_adapters"][name] == path and "max_rounding" not in done
    x, y = (ids_of(http, lora_path=name) for name in "xy")
    assert len({tuple(each) for each in (base, x, y)}) == 3
    batch = ask(http, GENERATE, **ASK | {"input_ids": [PROMPT] * 4}, lora_path=["x", None, "y", ""])
    assert [each["output_ids"] for each in batch] == [x, base, y, base]
    assert batch[0]["meta_info"]["weight_version"].startswith("0+x@")
    listed = http.get("/v1/models").json()["data"]
    assert [each["id"] for each in listed] == ["tiny", "x", "y"]
    assert listed[1]["parent"] == "tiny" and listed[1]["adapter"].startswith("x@")
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    for model, wanted in (("x", x), ("tiny:y", y), ("tiny", base), (None, base)):
        choice = ask(http, "/v1/completions", **body, model=model)["choices"][0]
        assert choice["token_ids"] == wanted, model
        tokens = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 6, "temperature": 0, "ignore_eos": True}}
        assert ask(http, "/inference/v1/generate", **tokens, model=model)["choices"][0]["token_ids"] == wanted
    assert ask(http, "/v1/completions", **body, lora_path="x")["choices"][0]["token_ids"] == x
    check_error(http.post("/v1/completions", json=body | {"model": "x", "lora_path": "y"}), 400)
    for fields in ({"lora_path": "z"}, {"lora_path": ["z"]}):
        told = check_error(http.post(GENERATE, json=ASK | {"input_ids": [PROMPT]} | fields), 404)
        assert told["message"] == "no such adapter (loaded: `x`, `y`)"
    assert (
        "serves `tiny`, `x`, `y`"
        in check_error(http.post("/v1/completions", json=body | {"model": "z"}), 404)["message"]
    )
    assert "adapters_resident" in http.get("/metrics").text
    ask(http, LOAD, lora_name="tiny:x", lora_path=paths[1])
    choice = ask(http, "/v1/completions", **body, model="tiny:x")["choices"][0]
    assert choice["token_ids"] == y, "a whole name comes before the served name and a name"
    ask(http, UNLOAD, lora_name="tiny:x")
    assert ask(http, UNLOAD, lora_name="x")["loaded_adapters"] == {"y": paths[1]}
    check_error(http.post(GENERATE, json=ASK | {"lora_path": "x"}), 404)
    check_error(http.post(UNLOAD, json={"lora_name": "x"}), 404)
    assert ids_of(http, lora_path="y") == y


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda each: f"{each['who']} {each['path']}")
def test_what_trainers_send_is_served_or_answered_501(http, paths, recorded):
    """Adapters of a trainer's window are kept; the least recently used ones beyond it are dropped."""
    routes = recorded["path"].split(" then ")
    bodies = recorded["body"] if isinstance(recorded["body"], list) else [recorded["body"]] * len(routes)
    if "unload" in routes[0]:
        ask(http, LOAD, lora_name=UNLOADS[recorded["who"]], lora_path=paths[0])
    for version in range(6 if recorded["who"].startswith("AReaL") else 0):
        ask(http, LOAD, lora_name=f"a-v{version}", lora_path=paths[version % 2])
    for route, body in zip(routes, bodies, strict=True):
        body = body | ({"lora_path": paths[0]} if "lora_path" in body else {})
        answer = http.post(route, json=body)
        if route in REASONS:
            check_error(answer, 501)
        else:
            assert answer.status_code in ((200, 404) if body["lora_name"] == "a-v1" else (200,)), answer.text
    if routes[0] not in REASONS and "then" in recorded:
        named = {key: value for key, value in recorded["then"].items() if key != "path"}
        assert http.post(recorded["then"]["path"], json=NEXT[recorded["then"]["path"]] | named).status_code == 200


def test_a_directory_of_weights_is_merged_if_it_is_an_adapter(http, paths):
    base = ids_of(http)
    assert ask(http, "/update_weights", weight_dir=paths[0])["success"]
    merged = ids_of(http)
    assert ask(http, LOAD, lora_name="x", lora_path=paths[1])["success"]
    assert ids_of(http) == merged != base
    ask(http, UNLOAD, lora_name="tiny", weight_version="0")
    assert ids_of(http) == base


def test_adapters_are_sent_merged_and_refused(http, made, paths):
    body = b"".join(
        bytes(part)
        for part in write_bucket(
            [SentTensor(name, np.ascontiguousarray(value)) for name, value in made[0].tensors.items()],
            adapter_config=json.dumps(made[0].config),
        )
    )
    base = ids_of(http)
    assert send(http, body, update_id="sent", last=True, lora_name="sent").status_code == 200
    ask(http, LOAD, lora_name="x", lora_path=paths[0])
    assert ids_of(http, lora_path="sent") == ids_of(http, lora_path="x") != base
    assert send(http, NO_ADAPTER, update_id="none", last=True, lora_name="sent").status_code == 200
    check_error(http.post(GENERATE, json=ASK | {"lora_path": "sent"}), 404)
    done = ask(http, LOAD, lora_name="m", lora_path=paths[1], merge=True)
    assert done["max_rounding"] > 0 and http.get("/model_info").json()["adapter"] == "m"
    assert -1e-12 < done["probe_kl"] < 1e-9, "in float32 both are alike"
    assert [each["id"] for each in http.get("/v1/models").json()["data"]] == ["tiny", "x", "m"]
    merged = ids_of(http)
    assert ids_of(http, lora_path="m") == merged != base
    ask(http, UNLOAD, lora_name="m", weight_version="0")
    assert ids_of(http) == base
    assert "exceeds max_lora_rank" in refusal(
        http.post(LOAD, json={"lora_name": "r", "lora_path": large(made[0], paths)})
    )


def test_samplers_of_tinker_name_saved_weights_by_path(engines, made, paths, tmp_path):
    """Each sampler keeps its own weights, on every replica, also once its adapter was dropped."""
    saved = [f"tinker://run-1/sampler_weights/step-{step}" for step in (1, 2)]
    for each, path in zip(made, saved, strict=True):
        each.write(tmp_path / path.removeprefix("tinker://"))

    def samples(name, sampler, seq_id):
        chunks, sampling = [{"tokens": PROMPT}], {"max_tokens": 6, "temperature": 0.0, "stop": []}
        order = {"prompt": {"chunks": chunks}, "sampling_params": sampling, "seq_id": seq_id}
        order |= {"sampling_session_id": sampler}
        request_id = ask(fleet[name], "/api/v1/asample", **order)["request_id"]
        tokens = ask(fleet[name], "/api/v1/retrieve_future", request_id=request_id)["sequences"][0]["tokens"]
        evidence = fleet[name].get(f"/api/v1/rollout_evidence/{request_id}:0")
        return tokens, decode_rollout(evidence.content)[0]["meta_info"]["weight_version"]

    with local_fleet(engines) as fleet:
        for name in "ab":
            object.__setattr__(fleet.calls.replicas[name], "weight_roots", (str(tmp_path), str(Path(paths[0]).parent)))
        samplers = []
        for number, path in enumerate(saved):
            body = {"session_id": "s", "sampling_session_seq_id": number, "model_path": path}
            samplers.append(ask(fleet["a"], "/api/v1/create_sampling_session", **body)["sampling_session_id"])
        found = [samples("a", sampler, 0) for sampler in samplers]
        ask(fleet["a"], LOAD, lora_name="x", lora_path=paths[0])
        wanted = fleet["b"].post(GENERATE, json={**ASK, "lora_path": "x"}).json()["output_ids"]
        assert found[0][0] == wanted != found[1][0]
        assert [version.partition("+")[2].rpartition("@")[0] for _, version in found] == saved
        shutil.rmtree(tmp_path / "run-1/sampler_weights/step-1")
        assert [samples("b", sampler, 1) for sampler in samplers] == found, "loaded once"
        for path in saved:
            ask(fleet["b"], UNLOAD, lora_name=path)
        assert samples("b", samplers[1], 2) == found[1], "loaded again"
        body = {"session_id": "s", "sampling_session_seq_id": 2, "base_model": "x"}
        refused = check_error(fleet["a"].post("/api/v1/create_sampling_session", json=body), 404)
        assert "name it by `model_path`" in refused["message"]
        order = {"prompt": {"chunks": [{"tokens": PROMPT}]}, "seq_id": 3, "sampling_session_id": samplers[0]}
        assert "no such weights" in check_error(fleet["b"].post("/api/v1/asample", json=order), 404)["message"]


def large(made, paths):
    """Write an adapter of a rank above the server's."""
    tensors = {name: np.repeat(value, 2, axis=0 if "lora_A" in name else 1) for name, value in made.tensors.items()}
    config = made.config | {"r": 2 * made.config["r"]}
    return str(type(made)(config, tensors, {}).write(Path(paths[0]).parent / "large"))


def test_every_replica_has_an_adapter_or_refuses_its_requests(engines, paths):
    with local_fleet(engines) as fleet:
        base = fleet["b"].post(GENERATE, json=ASK).json()["output_ids"]
        assert fleet["a"].post(LOAD, json={"lora_name": "x", "lora_path": paths[0]}).json()["success"]
        answers = [fleet[name].post(GENERATE, json={**ASK, "lora_path": "x"}).json() for name in "ab"]
        assert answers[0]["output_ids"] == answers[1]["output_ids"] != base
        versions = {answer["meta_info"]["weight_version"] for answer in answers}
        assert len(versions) == 1, "replicas name the same bytes alike"
        fleet.calls.silent = {"b"}
        assert "replica b did not answer" in refusal(
            fleet["a"].post(LOAD, json={"lora_name": "y", "lora_path": paths[1]})
        )
        fleet.calls.silent = set()
        check_error(fleet["b"].post(GENERATE, json={**ASK, "lora_path": "y"}), 404)
        assert fleet["b"].post(UNLOAD, json={"lora_name": "x"}).status_code == 200
        for name in "ab":
            check_error(fleet[name].post(GENERATE, json={**ASK, "lora_path": "x"}), 404)


def answers_alike(fleet, names):
    """Both replicas answer by each adapter with the same ids and version; return their versions."""
    versions = []
    for name in names:
        first, second = (fleet[each].post(GENERATE, json={**ASK, "lora_path": name}).json() for each in "ab")
        assert first["output_ids"] == second["output_ids"]
        versions.append(first["meta_info"]["weight_version"])
        assert second["meta_info"]["weight_version"] == versions[-1]
    return versions


def test_a_replica_that_starts_holds_the_adapters_of_the_others_before_it_serves(engines, paths, monkeypatch):
    loads = engines["b"].loop.control.adapters
    with local_fleet(engines) as fleet:
        offers = OffersOfOthers(fleet.calls)
        fleet.calls.listed = {"a": "RUNNING", "b": "STARTING"}
        for name, path in (("x", paths[0]), ("x", paths[1]), ("y", paths[0])):
            assert engines["a"].load_lora_adapter(path, lora_name=name).success
        fleet.calls.silent, ask_once = {"a", "b"}, fleet.calls.ask

        async def late(*arguments, **fields):
            answered = await ask_once(*arguments, **fields)
            fleet.calls.silent.discard("a")
            return answered

        with monkeypatch.context() as slow:
            slow.setattr(membership, "RETRY_S", 0.0)
            slow.setattr(fleet.calls, "ask", late)
            offers.take_adapters(loads)
        assert fleet.calls.asked == ["offered_adapters"] * 2, "a silent replica is asked again"
        assert len(set(answers_alike(fleet, "xy"))) == 2
        fleet.calls.asked.clear()
        with monkeypatch.context() as other_settings:
            other_settings.setattr(engines["a"].loop.control, "adapters", None)
            offers.take_adapters(loads)
        fleet.calls.listed = {}
        offers.take_adapters(loads)
        assert fleet.calls.asked == ["offered_adapters"] * 2, "nothing to wait for"


def test_a_replica_does_not_serve_without_an_adapter_of_the_others(engines, paths):
    outcomes = [LOST_WHILE_LOADING, "refused"]

    class Loads:
        def load(self, *_, **__):
            done = Future()
            done.set_result(WeightOutcome(False, outcomes.pop(0), "0"))
            return done

    with local_fleet(engines) as fleet:
        fleet.calls.listed = {"a": "RUNNING", "b": "STARTING"}
        assert engines["a"].load_lora_adapter(paths[0], lora_name="x").success
        with pytest.raises(RuntimeError, match="the adapter x of other replicas is not loaded: refused"):
            OffersOfOthers(fleet.calls).take_adapters(Loads())
    assert not outcomes, "the loss of a host is no refusal"


def test_two_loads_of_a_name_through_two_replicas_leave_the_same_bytes_everywhere(engines, paths, monkeypatch):
    """The second load begins when only one replica has applied the first."""
    with local_fleet(engines) as fleet, ThreadPoolExecutor(1) as pool:
        second, waits, ask_state, ask_all = Future(), threading.Event(), fleet.state.ask, local_fleet_module.answer

        async def noting(method, *arguments):
            if method == "begin" and second.running():
                waits.set()
            return await ask_state(method, *arguments)

        async def answer(replica, call, *, arguments):
            if replica is fleet.calls.replicas["b"] and call == "load_adapter" and not second.running():
                second.set_running_or_notify_cancel()
                body = {"lora_name": "x", "lora_path": paths[1]}
                done = pool.submit(fleet["b"].post, LOAD, json=body)
                done.add_done_callback(lambda ended: (second.set_result(ended.result()), waits.set()))
                assert await asyncio.to_thread(waits.wait, WITHIN_S)
            return await ask_all(replica, call, arguments=arguments)

        monkeypatch.setattr(fleet.state, "ask", noting)
        monkeypatch.setattr(local_fleet_module, "answer", answer)
        assert fleet["a"].post(LOAD, json={"lora_name": "x", "lora_path": paths[0]}).json()["success"]
        assert second.result(WITHIN_S).json()["success"]
        answers_alike(fleet, "x")


def test_a_replica_that_joins_while_the_only_other_one_loads_has_the_adapter_too(engines, paths, monkeypatch):
    with local_fleet(engines) as fleet:
        alone, loads = fleet.member("a"), engines["a"].loop.control.adapters
        both, load = alone.view, loads.load
        alone.view = replace(both, members=frozenset("a"))

        def load_and_join(*args, **fields):
            loaded = load(*args, **fields)
            alone.view = both
            return loaded

        monkeypatch.setattr(loads, "load", load_and_join)
        assert fleet["a"].post(LOAD, json={"lora_name": "x", "lora_path": paths[0]}).json()["success"]
        answers_alike(fleet, "x")


def test_a_request_resumes_elsewhere_with_the_bytes_that_it_began_with(engines, paths):
    with pair_over(OwnJournal(), engines) as pair:
        for engine in engines.values():
            assert engine.load_lora_adapter(paths[0], lora_name="x").success
        body = {**NATIVE, "stream": True, "lora_path": "x"}
        wanted = last_answers(all_events(pair["a"], GENERATE, body | {"rid": "whole"}))[0]
        begun = begin(pair["a"], GENERATE, body | {"rid": "early"}, num_events=2)
        assert engines["b"].load_lora_adapter(paths[1], lora_name="x").success
        cursor = [int(begun[-1][0])]
        gone = pair["b"].post(RESUME, json={"rid": "early", "from_token": cursor})
        assert check_error(gone, 409)["code"] == "adapter_gone"
        again = all_events(pair["a"], RESUME, {"rid": "early", "from_token": cursor})
        assert shown(last_answers(again)[0]) == shown(wanted)
        assert engines["b"].load_lora_adapter(paths[0], lora_name="x").success
        begin(pair["a"], GENERATE, body | {"rid": "late"}, num_events=2)
        elsewhere = all_events(pair["b"], RESUME, {"rid": "late", "from_token": [0]})
        assert shown(last_answers(elsewhere)[0]) == shown(wanted)
