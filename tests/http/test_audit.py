"""`/audit`: right trajectories pass, and planted faults are found at their token and layer."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest

from rayserve_moe.inprocess.engine import Engine
from rayserve_moe.replay.audit import judge
from rayserve_moe.replay.encoding import DIALECTS
from rayserve_moe.replay.sketches import compare_sketches
from rayserve_moe.requests.records import RoutedExperts
from rayserve_moe.rollouts.alignment import decode_answer
from rayserve_moe.serving.api.routes import audit
from tests.support.engine.shared_settings import ONE_ROW
from tests.support.serving.http_client import GENERATE, ask, check_error

AUDIT = "/audit"
NUM_NEW = 24
ROW, LAYER = 31, 1
"""Token and MoE layer of planted faults; the layer is the third hidden layer, behind a dense one."""


EXACT = 1e-4
"""Tie margin between two passes of a server in float32."""


class Trajectory(NamedTuple):
    """Sampled answer as a client keeps it."""

    ids: list[int]
    prompt_len: int
    rows: np.ndarray
    logprobs: list[float]
    masks: list[list[int]]


def sampled(http: Any, layout: Any, *, seed: int, count: int = 1, num_new: int = NUM_NEW) -> list[Trajectory]:
    generator = np.random.default_rng(seed)
    prompts = [generator.integers(10, 250, int(generator.integers(4, 20))).tolist() for _ in range(count)]
    params = {"max_new_tokens": num_new, "temperature": 1.0, "top_k": 20, "ignore_eos": True}
    answers = ask(
        http,
        GENERATE,
        input_ids=prompts,
        sampling_params=[{**params, "sampling_seed": seed + i} for i in range(count)],
        return_logprob=True,
        return_routed_experts=True,
        return_sampling_mask=True,
    )
    return [
        Trajectory(
            prompt + answer["output_ids"],
            len(prompt),
            decode_answer(answer, layout).rows,
            [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]],
            answer["meta_info"]["output_token_sampling_mask"],
        )
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def body_of(layout: Any, one: Trajectory, **fields: Any) -> dict[str, Any]:
    """Return a sample for a body; `fields` replace its rows, log-probs, masks or version."""
    rows = fields.pop("rows", one.rows)
    packed = DIALECTS["packed"].encode(RoutedExperts(rows), layout)
    own = {"logprobs": one.logprobs, "sampling_mask": one.masks, "weight_version": "0"}
    return {"input_ids": one.ids, "prompt_len": one.prompt_len, "forced_routed_experts": packed} | own | fields


def audited(http: Any, samples: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return ask(http, AUDIT, samples=samples, **fields)


@pytest.fixture(scope="module")
def two(url, engine) -> list[Trajectory]:
    with httpx.Client(base_url=url, timeout=600) as client:
        return sampled(client, engine.loop.card.routing, seed=5, count=2)


@pytest.mark.parametrize("num_batches", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_right_samples_pass(http, layout, num_batches):
    for batch in range(num_batches):
        trajectories = sampled(http, layout, seed=100 * batch, count=50, num_new=6)
        report = audited(http, [body_of(layout, each) for each in trajectories])
        assert report["verdict"] == "right" and report["verdicts"] == {"right": 50}
        assert all(each["num_differing"] == 0 and each["first"] is None for each in report["samples"])
        assert max(each["max_logprob_difference"] for each in report["samples"]) < 1e-4


def other_expert(rows: np.ndarray, num_experts: int) -> np.ndarray:
    """Rows with another expert in one decision: the last of those that the decision lacks."""
    changed = rows.copy()
    changed[ROW, LAYER, 0] = max(set(range(num_experts)) - set(rows[ROW, LAYER].tolist()))
    return changed


def late(rows: np.ndarray, first: int = 0) -> np.ndarray:
    """Delay rows by a token from a position on."""
    return np.concatenate([rows[: first + 1], rows[first:-1]])


def of_layers(rows: np.ndarray, order: list[int]) -> np.ndarray:
    return np.ascontiguousarray(rows[:, order])


def padding_row(rows: np.ndarray, num_experts: int) -> np.ndarray:
    changed = rows.copy()
    changed[ROW] = (ROW + np.arange(rows[ROW].size)).reshape(rows[ROW].shape) % num_experts
    return changed


def early(rows: np.ndarray) -> np.ndarray:
    return np.concatenate([rows[1:], rows[-1:]])


ROW_FAULTS: dict[str, tuple[Callable[[Trajectory, Trajectory, int], np.ndarray], str, int | None]] = {
    "a token late": (lambda one, _, n: late(one.rows), "shifted rows", -1),
    "a token early": (lambda one, _, n: early(one.rows), "shifted rows", 1),
    "outputs a token late": (lambda one, _, n: late(one.rows, one.prompt_len), "shifted rows", -1),
    "another sample's": (lambda one, other, n: np.resize(other.rows, one.rows.shape), "wrong rows", None),
    "one expert": (lambda one, _, n: other_expert(one.rows, n), "wrong rows", None),
    "layers as text": (lambda one, _, n: of_layers(one.rows, [0, 2, 1]), "wrong rows", None),
    "physical ids": (lambda one, _, n: (one.rows + 3) % n, "wrong rows", None),
    "a row of padding": (lambda one, _, n: padding_row(one.rows, n), "wrong rows", None),
}


@pytest.mark.parametrize("name", ROW_FAULTS)
@pytest.mark.parametrize("with_logprobs", [True, False])
def test_wrong_rows_are_found_where_they_begin(http, layout, two, name, with_logprobs):
    one, other = two
    plant, verdict, shift = ROW_FAULTS[name]
    rows = plant(one, other, layout.num_experts).astype(one.rows.dtype)
    differs = (np.sort(rows, axis=-1) != np.sort(one.rows, axis=-1)).any(axis=-1)
    token, layer = (int(index) for index in np.argwhere(differs)[0])
    fields = {} if with_logprobs else {"logprobs": None, "sampling_mask": None}
    samples = [body_of(layout, one), body_of(layout, one, rows=rows, **fields)]
    right, found = audited(http, samples, tie_tolerance=EXACT)["samples"]
    assert right["verdict"] == "right"
    assert (found["verdict"], found["shift"]) == (verdict, shift)
    first = found["first"]
    assert (first["token"], first["layer"]) == (token, layout.layer_ids[layer])
    assert sorted(first["claimed"]) == sorted(rows[token, layer].tolist())
    assert sorted(first["native"]) == sorted(one.rows[token, layer].tolist())
    assert first["margin"] > EXACT and first["rank"] > layout.top_k
    assert [token, layout.layer_ids[layer]] == found["places"][0]


@pytest.mark.slow
def test_rows_of_other_weights_are_named(http, layout, two, other_checkpoint):
    """The rows and log-probs come from other weights of the same shapes."""
    with Engine(model_path=str(other_checkpoint), **ONE_ROW | {"enable_return_routed_experts": True}) as engine:
        answer = engine.generate(
            input_ids=two[0].ids, sampling_params={"max_new_tokens": 8, "temperature": 0}, return_logprob=True,
            return_routed_experts=True,
        )  # fmt: skip
    ids = two[0].ids + answer["output_ids"]
    logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    other = Trajectory(ids, len(two[0].ids), decode_answer(answer, layout).rows, logprobs, [])
    (found,) = audited(http, [body_of(layout, other, sampling_mask=None)])["samples"]
    assert found["verdict"] == "wrong version" and found["first"]["token"] == 0


def test_a_wrong_mask_is_found(http, layout, two):
    one = two[0]
    place = 7
    masks = [list(mask) for mask in one.masks]
    masks[place].remove(one.ids[one.prompt_len + place])
    (found,) = audited(http, [body_of(layout, one, sampling_mask=masks)])["samples"]
    assert found["verdict"] == "wrong mask" and found["first_mask"] == one.prompt_len + place
    assert found["first"] is None
    shifted = [one.masks[-1], *one.masks[:-1]]
    (found,) = audited(http, [body_of(layout, one, sampling_mask=shifted)])["samples"]
    assert found["verdict"] == "wrong mask"
    (found,) = audited(http, [body_of(layout, one, sampling_mask=[[]] * NUM_NEW)])["samples"]
    assert found["verdict"] == "right"


def test_a_wrong_log_prob_is_found(http, layout, two):
    one = two[0]
    logprobs = [*one.logprobs]
    logprobs[3] -= 0.2
    (found,) = audited(http, [body_of(layout, one, logprobs=logprobs)])["samples"]
    assert (found["verdict"], found["first_logprob"]) == ("wrong log-probs", one.prompt_len + 3)
    assert found["max_logprob_difference"] == pytest.approx(0.2, abs=1e-3) and found["k3"] > 1e-4


def test_another_version_is_refused(http, layout, two):
    samples = [body_of(layout, two[0]), body_of(layout, two[1], weight_version="1")]
    error = check_error(http.post(AUDIT, json={"samples": samples}), 409)
    assert "sample 1" in error["message"] and "'0'" in error["message"]


def test_a_difference_within_the_tolerance_is_numerics(http, layout, two):
    """A fault whose margin is within the tolerance passes, and is still reported."""
    rows = other_expert(two[0].rows, layout.num_experts)
    sample = body_of(layout, two[0], rows=rows)
    wide = audited(http, [sample], tie_tolerance=1e6, logprob_tolerance=1e6)["samples"][0]
    assert wide["verdict"] == "numerics only" and wide["first"] is None
    assert (wide["first_tie"]["token"], wide["first_tie"]["layer"]) == (ROW, layout.layer_ids[LAYER])
    assert wide["num_ties"] == wide["num_differing"] > 0
    assert wide["mismatch_rate"] > 0 and sum(wide["differing_by_layer"]) == wide["num_differing"]


def test_sketches_find_the_layer_where_passes_part(http, layout, two):
    one = two[0]
    samples = [body_of(layout, one), body_of(layout, one, rows=other_expert(one.rows, layout.num_experts))]
    right, wrong = (
        np.frombuffer(base64.b64decode(each["sketches"]["data"]), "<f4").reshape(each["sketches"]["shape"])
        for each in audited(http, samples, return_sketches=True)["samples"]
    )
    assert right.shape == (len(one.ids), layout.num_hidden_layers + 1, 8)
    assert compare_sketches(right, right).first is None
    assert compare_sketches(right, right * (1 + 1e-5)).first is None
    found = compare_sketches(right, wrong, noise=1e-6)
    assert found.first == (ROW, layout.layer_ids[LAYER] + 1)
    with pytest.raises(ValueError, match="shapes"):
        compare_sketches(right, wrong[1:])


def test_verdicts_are_reached_beside_the_event_loop(http, layout, two, monkeypatch):
    threads: list[str] = []

    def judged(*arguments: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return judge(*arguments, **options)

    monkeypatch.setattr(audit, "judge", judged)
    audited(http, [body_of(layout, each) for each in two])
    assert len(threads) == 2 and all(name.startswith("encode") for name in threads)


def test_what_is_no_trajectory_is_refused(http, layout, two):
    one = two[0]
    good = body_of(layout, one)
    gates = base64.b64encode(np.ones(one.rows.shape, "<f4").tobytes()).decode()
    for name, sample in {
        "too few rows": body_of(layout, one, rows=one.rows[:-1]),
        "no rows": {**good, "forced_routed_experts": None},
        "rows from the second token on": {
            **good,
            "forced_routed_experts": DIALECTS["packed"].encode(RoutedExperts(one.rows[1:], 1), layout),
        },
        "an expert twice": body_of(layout, one, rows=np.zeros_like(one.rows)),
        "too few log-probs": {**good, "logprobs": one.logprobs[:-1]},
        "a prompt that is too long": {**good, "prompt_len": len(one.ids) + 1},
        "gates that the server cannot force": {**good, "forced_router_gates": gates},
        "no masks": {**good, "sampling_mask": [1] * NUM_NEW},
        "an id beyond the vocabulary": {**good, "input_ids": [*one.ids[:-1], 10**6]},
    }.items():
        error = check_error(http.post(AUDIT, json={"samples": [good, sample]}), 400)
        assert error["param"].startswith("samples"), name
    for field in ("forced_routed_experts", "forced_router_gates", "forced_indexer_topk"):
        error = check_error(http.post(AUDIT, json={"samples": [good, {**good, field: "no base64"}]}), 400)
        assert error["message"].startswith(f"`samples[1]`: `{field}`: ")
    check_error(http.post(AUDIT, json={"samples": []}), 400)
    check_error(http.post(AUDIT, json={"samples": [good] * 257}), 400)


@pytest.mark.slow
def test_a_server_that_was_not_started_for_it_says_how_it_would(small_http, layout, two):
    error = check_error(small_http.post(AUDIT, json={"samples": [body_of(layout, two[0])]}), 501)
    assert "enable_audit" in error["message"]
