"""Decisions beside rows over HTTP: gates, masks and drafts on every path, as the engine answers them in process."""

from __future__ import annotations

import base64
import json
from typing import Any
from unittest.mock import patch

import httpx
import numpy as np
import pytest

from rayserve_moe import Engine, cli, extract_router_gates_from_meta_info
from rayserve_moe.engine.extension import extension_of
from rayserve_moe.engine.speculation.policy import Speculation
from rayserve_moe.engine.speculation.proposers import SiblingProposer
from rayserve_moe.engine.speculation.steps import DraftedSteps
from rayserve_moe.replay.encoding import ROLLOUT_MEDIA_TYPE, ROLLOUT_ZSTD_MEDIA_TYPE, decode_rollout
from rayserve_moe.rollouts import load
from rayserve_moe.rollouts.adapters import router_gates, trajectory_of
from rayserve_moe.rollouts.alignment import decode_answer, join_turns
from rayserve_moe.rollouts.answers import SampleRequest
from rayserve_moe.rollouts.batch_job import main
from rayserve_moe.rollouts.client import BlockingRolloutClient
from rayserve_moe.rollouts.records import decisions_of
from tests.http.conftest import assert_idle, served
from tests.http.test_journal import RESUME, all_events, begin, pair_over, told_of
from tests.support.engine.schedulers import some_reach
from tests.support.engine.shared_settings import SMALL
from tests.support.engine.step_gate import unhurried
from tests.support.models.families import family_case, write_family
from tests.support.serving.http_client import CHAT, COMPLETIONS, GENERATE, TOKENS, ask, check_error, stream, wait_until
from tests.support.serving.journal_server import OwnJournal

CASE = family_case("deepseek_v3-0")
PROMPT = [*range(30, 60)]
NUM_NEW, MAX_DRAFTS = 8, 3
ROWS = {"return_routed_experts": True, "return_router_gates": True}
GREEDY = {"temperature": 0, "ignore_eos": True}
SAMPLED = {"temperature": 1.0, "top_k": 5, "sampling_seed": 7, "ignore_eos": True, "max_new_tokens": NUM_NEW}
SETTINGS: dict[str, Any] = {
    **SMALL,
    "enable_return_router_gates": True,
    "enable_audit": True,
    "speculative_algorithm": "SIBLINGS",
    "speculative_num_steps": MAX_DRAFTS,
}
BODIES = {
    GENERATE: {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": NUM_NEW, **GREEDY}},
    COMPLETIONS: {"prompt": PROMPT, "max_tokens": NUM_NEW, **GREEDY},
    CHAT: {"messages": [{"role": "user", "content": "a"}], "input_ids": PROMPT, "max_tokens": NUM_NEW, **GREEDY},
    TOKENS: {"token_ids": PROMPT, "sampling_params": {"max_tokens": NUM_NEW, **GREEDY}},
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """Repeated requests draft from the previous answer."""
    path = write_family(CASE, tmp_path_factory.mktemp("decisions") / "model", seed=5)
    with Engine(str(path), **SETTINGS) as engine:
        cycle = engine.loop._cycle
        proposer = SiblingProposer(engine.runner.served.settings.speculation)
        fixed = Speculation(cycle.scheduler.table, proposer, max_drafts=MAX_DRAFTS, is_fixed=True, reach=some_reach())
        with patch.object(extension_of(cycle.extensions, DraftedSteps), "speculation", fixed):
            yield engine


@pytest.fixture(scope="module")
def server_url(engine):
    with served(engine) as url:
        yield url


@pytest.fixture
def client(server_url, engine):
    with httpx.Client(base_url=server_url, timeout=600) as client:
        yield client
    assert_idle(engine)


@pytest.fixture(scope="module")
def wanted(engine) -> np.ndarray:
    """Gates from the engine in process."""
    answer = engine.generate(input_ids=PROMPT, max_new_tokens=NUM_NEW, **GREEDY, **ROWS)
    return extract_router_gates_from_meta_info(answer)


@pytest.fixture(scope="module")
def sampled(engine) -> dict[str, Any]:
    """Sampled answer with masks from the engine in process."""
    answer = engine.generate(
        input_ids=PROMPT, sampling_params=SAMPLED, return_sampling_mask=True, return_logprob=True, **ROWS
    )
    return answer["meta_info"]


def part_of(answer: dict) -> dict:
    return answer["choices"][0] if "choices" in answer else answer


def gates_of(answer: dict) -> np.ndarray:
    return extract_router_gates_from_meta_info(part_of(answer))


def same(found: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("path", BODIES)
def test_every_route_returns_the_gates_of_the_engine(client, wanted, path):
    for form in ("sglang", "packed", "npy", "nested"):
        answer = ask(client, path, **BODIES[path], **ROWS, routed_experts_format=form)
        same(gates_of(answer), wanted)
        same(decode_answer(answer).gates, wanted)
    assert "router_gates" not in str(ask(client, path, **BODIES[path], return_routed_experts=True))


@pytest.mark.parametrize("path", BODIES)
def test_streamed_gates_add_up_to_the_whole(client, wanted, path, engine):
    with unhurried(engine.loop, delay_s=0.05):
        events = stream(client, path, **BODIES[path], **ROWS, stream_routed_experts=True)
    pieces = [event for event in events if has_gates(event)]
    assert len(pieces) > 2
    same(np.concatenate([gates_of(event) for event in pieces]), wanted)
    same(join_turns([decode_answer(event) for event in pieces]).gates, wanted)
    *earlier, last = [event for event in stream(client, path, **BODIES[path], **ROWS) if has_gates(event)]
    same(gates_of(last), wanted)
    assert not earlier


def has_gates(event: dict) -> bool:
    part = part_of(event) if event.get("choices", True) else {}
    return "router_gates" in part.get("meta_info", part)


@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS, TOKENS])
def test_gates_begin_where_rows_do(client, wanted, path):
    body = {**BODIES[path]}
    if path == TOKENS:
        body["sampling_params"] = {**body["sampling_params"], "routed_experts_prompt_start": 23}
    else:
        body["routed_experts_start_len"] = 23
    answer = ask(client, path, **body, **ROWS)
    same(gates_of(answer), wanted[23:])
    before = decode_answer(ask(client, GENERATE, **BODIES[GENERATE], **ROWS))
    same(join_turns([before, decode_answer(answer)]).gates, wanted)


@pytest.mark.parametrize("path", BODIES)
def test_every_route_takes_gates_to_replay(client, wanted, path):
    source = ask(client, GENERATE, **BODIES[GENERATE], **ROWS)
    text = [*PROMPT, *source["output_ids"]]
    gates = wanted * np.float32(0.5)
    experts = source["meta_info"]["routed_experts"]
    replay = {"forced_routed_experts": experts, "forced_router_gates": encoded(gates)}
    names = {GENERATE: "input_ids", COMPLETIONS: "prompt", CHAT: "input_ids", TOKENS: "token_ids"}
    body = {**BODIES[path], names[path]: text}
    answer = ask(client, path, **body, **ROWS, **replay)
    np.testing.assert_array_equal(gates_of(answer)[: len(gates)], gates)
    for wrong in ("%", encoded(gates[1:]), encoded(np.full_like(gates, np.inf))):
        error = check_error(client.post(path, json={**body, **replay, "forced_router_gates": wrong}), 400)
        assert error["param"] == "forced_router_gates"


def encoded(gates: np.ndarray) -> str:
    return base64.b64encode(gates.astype("<f4").tobytes()).decode()


def test_an_audit_takes_gates_and_finds_other_ones(client):
    """Halved gates at a position change its output's log-prob first."""
    params = {"max_new_tokens": NUM_NEW, "temperature": 1.0, "sampling_seed": 3, "ignore_eos": True}
    source = ask(client, GENERATE, input_ids=PROMPT, sampling_params=params, return_logprob=True, **ROWS)
    gates, meta = gates_of(source), source["meta_info"]
    sample = {
        "input_ids": [*PROMPT, *source["output_ids"]],
        "prompt_len": len(PROMPT),
        "forced_routed_experts": meta["routed_experts"],
        "logprobs": [entry[0] for entry in meta["output_token_logprobs"]],
    }
    halved = gates.copy()
    halved[len(PROMPT) + 2] *= 0.5
    samples = [{**sample, "forced_router_gates": encoded(each)} for each in (gates, halved, -gates)]
    right, wrong, negated = ask(client, "/audit", samples=[*samples], logprob_tolerance=1e-3)["samples"]
    assert (right["verdict"], right["first_logprob"]) == ("right", None)
    assert (wrong["verdict"], wrong["first_logprob"]) == ("wrong log-probs", len(PROMPT) + 3)
    assert negated["verdict"] == "wrong gates"
    for wrong_gates, status in (("%", 400), (encoded(np.full_like(gates, 3e38)), 422)):
        body = {"samples": [samples[0], {**sample, "forced_router_gates": wrong_gates}]}
        error = check_error(client.post("/audit", json=body), status)
        assert error["param"] == "samples" and error["message"].startswith("`samples[1]`")


@pytest.mark.parametrize("kind", [ROLLOUT_MEDIA_TYPE, ROLLOUT_ZSTD_MEDIA_TYPE])
def test_a_container_has_gates_and_masks_as_arrays(client, sampled, wanted, kind):
    """All choices share one copy of the prompt's gates."""
    body = {"input_ids": PROMPT, "sampling_params": {**SAMPLED, "n": 2}, "return_logprob": True, **ROWS}
    answer = client.post(GENERATE, json={**body, "return_sampling_mask": True}, headers={"accept": kind})
    assert answer.status_code == 200, answer.text
    header, _ = decode_rollout(answer.content)
    first, second = header["answers"]
    assert first["router_gates"].shape[0] == len(PROMPT) + NUM_NEW - 1 and len(second["router_gates"]) == NUM_NEW - 1
    same(first["router_gates"], np.asarray(extract_router_gates_from_meta_info({"meta_info": sampled})))
    same(decode_answer(answer.content, choice=1).gates, second["router_gates"])
    ids = np.split(first["sampling_mask_ids"], np.cumsum(first["sampling_mask_counts"])[:-1])
    assert [each.tolist() for each in ids] == sampled["output_token_sampling_mask"]
    assert "output_token_sampling_mask" not in first["meta_info"]
    assert max(map(len, ids)) <= SAMPLED["top_k"]
    same(first["meta_info"]["output_token_sampling_logprobs"], sampled["output_token_sampling_logprobs"])


def test_tokens_have_their_masks_as_vllm_writes_them(client, sampled):
    """Compare a whole answer, a stream with each token's mask, and a container."""
    params = {"max_tokens": NUM_NEW, "temperature": 1.0, "top_k": 5, "seed": 7, "ignore_eos": True}
    body = {"token_ids": PROMPT, "sampling_params": params, "return_sampling_mask": True}
    (choice,) = ask(client, TOKENS, **body)["choices"]
    mask = sampled["output_token_sampling_mask"]
    assert choice["sampling_mask"] == mask
    same(choice["sampling_logprobs"], sampled["output_token_sampling_logprobs"])
    events = [event["choices"][0] for event in stream(client, TOKENS, **body)]
    assert [ids for event in events for ids in event["sampling_mask"]] == mask
    assert all(len(event["sampling_mask"]) == len(event["token_ids"]) for event in events)
    answer = client.post(TOKENS, json=body, headers={"accept": ROLLOUT_MEDIA_TYPE})
    (choice,) = decode_rollout(answer.content)[0]["choices"]
    assert choice["sampling_mask_counts"].tolist() == list(map(len, mask)) and "sampling_mask" not in choice
    plain = ask(client, TOKENS, token_ids=PROMPT, sampling_params=params)["choices"][0]
    assert plain["token_ids"] == [entry[1] for entry in sampled["output_token_logprobs"]]
    assert "sampling_mask" not in plain


def test_the_log_prob_of_the_policy_is_the_other_one_within_the_mask(engine, sampled):
    """Compare with the log-softmax over the log-probs of the mask's ids."""
    for place, mask in enumerate(sampled["output_token_sampling_mask"]):
        prompt = [*PROMPT, *(entry[1] for entry in sampled["output_token_logprobs"][:place])]
        answer = engine.generate(
            input_ids=prompt,
            sampling_params={"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True},
            return_logprob=True,
            token_ids_logprob=mask,
        )
        (entries,) = answer["meta_info"]["output_token_ids_logprobs"]
        values = np.array([entry[0] for entry in entries])
        logprob, token_id, _ = sampled["output_token_logprobs"][place]
        assert token_id in mask
        expected = logprob - np.logaddexp.reduce(values)
        assert sampled["output_token_sampling_logprobs"][place] == pytest.approx(expected, abs=2e-5)


def test_accepted_drafts_are_named(client, wanted):
    """The number of named drafts equals the counter, 0 without drafts. The answer does not change."""
    body = {**BODIES[GENERATE], "return_draft_tokens": True, **ROWS}
    answers = [ask(client, GENERATE, **body) for _ in range(2)]
    meta = answers[1]["meta_info"]
    drafted = meta["output_token_drafted"]
    assert len(drafted) == NUM_NEW and sum(drafted) == meta["spec_accept_token_num"] > 0
    assert answers[1]["output_ids"] == answers[0]["output_ids"]
    same(gates_of(answers[1]), wanted)
    plain = ask(client, GENERATE, **body, speculative=False)["meta_info"]
    assert plain["output_token_drafted"] == [0] * NUM_NEW
    *_, last = stream(client, GENERATE, **body)
    assert len(last["meta_info"]["output_token_drafted"]) == NUM_NEW


def test_the_client_of_rollouts_gets_all_parts(server_url, sampled):
    request = SampleRequest(
        "p",
        PROMPT,
        {"max_new_tokens": NUM_NEW, "temperature": 1.0, "top_k": 5, "ignore_eos": True},
        seed=7,
        count=2,
        returns_gates=True,
        returns_mask=True,
        returns_drafts=True,
    )
    with BlockingRolloutClient(server_url) as client:
        ((first, second),) = client.generate([request])
    same(first.router_gates, extract_router_gates_from_meta_info({"meta_info": sampled}))
    assert first.sampling_mask.tolist() == sampled["output_token_sampling_mask"]
    same(first.sampling_logprobs, sampled["output_token_sampling_logprobs"])
    assert first.drafted.dtype == np.bool_ and len(second.router_gates) == len(PROMPT) + NUM_NEW - 1
    np.testing.assert_array_equal(second.router_gates[: len(PROMPT)], first.router_gates[: len(PROMPT)])


def test_a_job_keeps_all_parts_in_its_shards(server_url, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    sampling = {"temperature": 1.0, "top_k": 5, "ignore_eos": True}
    prompts.write_text(json.dumps({"input_ids": PROMPT, "sampling_params": sampling}) + "\n")
    arguments = ["--prompts", str(prompts), "--url", server_url, "--max-new-tokens", str(NUM_NEW), "--n", "2"]
    assert main([*arguments, "--gates", "--masks", "--drafts", "--out", str(tmp_path / "out")]) == 0
    assert cli.main(["audit", str(tmp_path / "out"), "--server", server_url, "--gates"]) == 0
    loaded = load(tmp_path / "out")
    with BlockingRolloutClient(server_url) as client:
        for sample in range(2):
            row = loaded.table.slice(sample, 1).to_pylist()[0]
            request = SampleRequest(
                "p",
                PROMPT,
                {"max_new_tokens": NUM_NEW, **sampling},
                seed=row["seed"],
                first=row["sample_index"],
                returns_gates=True,
                returns_mask=True,
            )
            ((again,),) = client.generate([request])
            kept = decisions_of(loaded, sample)
            same(kept.router_gates, again.router_gates)
            assert kept.sampling_mask.tolist() == again.sampling_mask.tolist()
            same(kept.sampling_logprobs, again.sampling_logprobs)
            assert kept.drafted.tolist() == [False] * NUM_NEW and kept.gate_scale == again.gate_scale
            np.testing.assert_array_equal(router_gates(trajectory_of([again])), again.router_gates)


@pytest.mark.slow
def test_a_request_goes_on_with_its_gates_and_masks(engine):
    """Resume at another replica: committed tokens keep their parts."""
    params = {**SAMPLED, "max_new_tokens": 40}
    body = {"input_ids": PROMPT, "sampling_params": params, "stream": True, "return_sampling_mask": True, **ROWS}
    whole = engine.generate(input_ids=PROMPT, sampling_params=params, return_sampling_mask=True, **ROWS)
    with pair_over(OwnJournal(), {"a": engine, "b": engine}) as pair, unhurried(engine.loop):
        begun = begin(pair["a"], GENERATE, {**body, "rid": "parts"}, num_events=5)
        told = told_of(begun[-1][0])
        wait_until(lambda: engine.loop.statistics()["requests_live"] == 0)
        *_, (_, last) = all_events(pair["b"], RESUME, {"rid": "parts", "from_token": told})
        assert last["output_ids"] == whole["output_ids"] and 0 < told[0] < 40
        same(gates_of(last), extract_router_gates_from_meta_info(whole))
        assert last["meta_info"]["output_token_sampling_mask"] == whole["meta_info"]["output_token_sampling_mask"]
