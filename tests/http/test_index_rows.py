"""Index rows over HTTP: every route returns the same, in every form, whole, in streams, and after a resume."""

from __future__ import annotations

import base64
import json
from dataclasses import replace

import httpx
import numpy as np
import pytest

from rayserve_moe import Engine, extract_indexer_topk_from_meta_info
from rayserve_moe.replay.encoding import decode_index
from rayserve_moe.replay.encoding.index import over_sparse_layers
from rayserve_moe.replay.index_rows import unpacked_rows
from rayserve_moe.rollouts import Rollout, load
from rayserve_moe.rollouts.adapters import index_rows, trajectory_of
from rayserve_moe.rollouts.alignment import decode_answer, join_turns
from rayserve_moe.rollouts.answers import SampleRequest
from rayserve_moe.rollouts.batch_job import main
from rayserve_moe.rollouts.client import BlockingRolloutClient
from rayserve_moe.rollouts.records import index_layout_of
from tests.http.conftest import assert_idle, served
from tests.http.test_journal import RESUME, all_events, begin, pair_over, told_of
from tests.support.engine.shared_settings import INDEXED
from tests.support.engine.step_gate import unhurried
from tests.support.models.families import family_case, write_family
from tests.support.serving.http_client import CHAT, COMPLETIONS, GENERATE, TOKENS, ask, check_error, stream, wait_until
from tests.support.serving.journal_server import OwnJournal

CASES = ("glm_moe_dsa-1", pytest.param("minimax_m3_vl_text-1", marks=pytest.mark.slow))
"""Cases: a token index shared by layers, and a block index with two heads."""
PROMPT = [*range(30, 100)]
NUM_NEW = 8
ROWS = {"return_routed_experts": True, "return_indexer_topk": True}
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module", params=CASES)
def sparse(request, tmp_path_factory):
    case = family_case(request.param)
    path = write_family(case, tmp_path_factory.mktemp("sparse") / "model", seed=5)
    with Engine(str(path), **INDEXED) as engine:
        yield engine


@pytest.fixture(scope="module")
def sparse_url(sparse):
    with served(sparse) as url:
        yield url


@pytest.fixture
def client(sparse_url, sparse):
    with httpx.Client(base_url=sparse_url, timeout=600) as client:
        yield client
    assert_idle(sparse)


BODIES = {
    GENERATE: {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": NUM_NEW, **GREEDY}},
    COMPLETIONS: {"prompt": PROMPT, "max_tokens": NUM_NEW, **GREEDY},
    CHAT: {"messages": [{"role": "user", "content": "a"}], "input_ids": PROMPT, "max_tokens": NUM_NEW, **GREEDY},
    TOKENS: {"token_ids": PROMPT, "sampling_params": {"max_tokens": NUM_NEW, **GREEDY}},
}
DIALECT = {"routed_experts_format": "sglang"}


def part_of(answer: dict) -> dict:
    """The object that has the rows of an answer's only choice."""
    return answer["choices"][0] if "choices" in answer else answer


def rows_of(answer: dict) -> np.ndarray:
    return extract_indexer_topk_from_meta_info(part_of(answer))


@pytest.fixture(scope="module")
def layout(sparse):
    return sparse.card.index


@pytest.fixture(scope="module")
def wanted(sparse, layout):
    """Index rows from the Engine for all layers with sparse attention; some may share an index."""
    answer = sparse.generate(input_ids=PROMPT, max_new_tokens=NUM_NEW, **GREEDY, **ROWS)
    rows = extract_indexer_topk_from_meta_info(answer)
    assert rows.shape == (len(PROMPT) + NUM_NEW - 1, len(layout.sparse_layer_ids), layout.top_k)
    np.testing.assert_array_equal(rows, over_sparse_layers(rows[:, own_rows(layout)], layout))
    assert (rows[-1] != np.arange(layout.top_k)).any()
    return rows


def own_rows(layout):
    """Return the rows of layers with their own index."""
    if layout.layer_ids == layout.sparse_layer_ids:
        return np.arange(len(layout.layer_ids))
    return np.searchsorted(layout.sparse_layer_ids, layout.layer_ids)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["sglang", "packed"])
@pytest.mark.parametrize("path", BODIES)
def test_every_route_returns_the_rows_of_the_engine(client, wanted, layout, path, form):
    answer = ask(client, path, **BODIES[path], **ROWS, indexer_topk_format=form)
    np.testing.assert_array_equal(rows_of(answer), wanted)
    holder = part_of(answer).get("meta_info", part_of(answer))
    of_form = {"sglang": layout.sparse_layer_ids, "packed": layout.layer_ids}[form]
    assert holder["indexer_topk_num_layers"] == len(of_form)
    assert len(decode_answer(answer).index) == len(wanted)


def test_a_route_without_the_field_has_none_and_rows_need_no_routing(client, wanted):
    for path, body in BODIES.items():
        plain = ask(client, path, **body)
        assert "indexer_topk" not in str(plain)
        alone = ask(client, path, **body, return_indexer_topk=True, return_routed_experts=False)
        np.testing.assert_array_equal(rows_of(alone), wanted)
        assert "'routed_experts'" not in str(alone)


@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS, TOKENS])
def test_rows_begin_where_they_are_asked_for(client, wanted, path):
    """So a conversation carries the rows of its new tokens alone."""
    body = {**BODIES[path]}
    if path == TOKENS:
        body["sampling_params"] = {**body["sampling_params"], "routed_experts_prompt_start": 33}
    else:
        body["routed_experts_start_len"] = 33
    answer = ask(client, path, **body, **ROWS)
    np.testing.assert_array_equal(rows_of(answer), wanted[33:])
    before = ask(client, GENERATE, **BODIES[GENERATE], **ROWS)
    joined = join_turns([decode_answer(before), decode_answer(answer)])
    np.testing.assert_array_equal(joined.index, decode_answer(before).index)


@pytest.mark.parametrize("path", BODIES)
def test_streamed_rows_add_up_to_the_whole(client, wanted, path, sparse):
    """With routing, or alone; without streamed rows the last event has them all."""
    body = {**BODIES[path], "routed_experts_format": "packed"}
    for fields in (ROWS, {"return_indexer_topk": True}):
        with unhurried(sparse.loop, delay_s=0.05):
            events = stream(client, path, **body, **fields, stream_routed_experts=True)
        pieces = [rows_of(event) for event in events if has_rows(event)]
        assert len(pieces) > 2
        np.testing.assert_array_equal(np.concatenate(pieces), wanted)
    *earlier, last = [event for event in stream(client, path, **body, **ROWS) if has_rows(event)]
    np.testing.assert_array_equal(rows_of(last), wanted)
    assert not earlier


def has_rows(event: dict) -> bool:
    part = part_of(event) if event.get("choices", True) else {}
    return "indexer_topk" in part.get("meta_info", part)


def test_a_stop_string_cuts_index_rows_where_it_cuts_routing(client, wanted, sparse):
    whole = ask(client, COMPLETIONS, **BODIES[COMPLETIONS])["choices"][0]["text"]
    answer = ask(client, COMPLETIONS, **BODIES[COMPLETIONS], **ROWS, stop=[whole[-2:]])
    (choice,) = answer["choices"]
    routing = decode_answer(answer)
    assert choice["finish_reason"] == "stop" and len(routing.rows) == len(rows_of(answer))
    np.testing.assert_array_equal(rows_of(answer), wanted[: len(routing.rows)])


@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS, CHAT, TOKENS])
def test_every_route_takes_choices_to_replay(client, wanted, layout, path):
    """Force a token to see only itself or its own block; the answer returns that choice."""
    source = ask(client, GENERATE, **BODIES[GENERATE], **ROWS, routed_experts_format="packed")["meta_info"]
    text = [*PROMPT, *ask(client, GENERATE, **BODIES[GENERATE])["output_ids"]]
    chosen = wanted[:, own_rows(layout)]
    chosen[65] = -1
    chosen[65, :, 0] = 65 // layout.block_size
    replay = {"forced_routed_experts": source["routed_experts"], "forced_indexer_topk": encoded(chosen)}
    names = {GENERATE: "input_ids", COMPLETIONS: "prompt", CHAT: "input_ids", TOKENS: "token_ids"}
    body = {**BODIES[path], names[path]: text}
    answer = ask(client, path, **body, **ROWS, **replay)
    np.testing.assert_array_equal(rows_of(answer)[: len(chosen)], over_sparse_layers(chosen, layout))
    error = check_error(client.post(path, json={**body, **replay, "forced_indexer_topk": "%"}), 400)
    assert error["param"] == "forced_indexer_topk"


def encoded(rows: np.ndarray) -> str:
    return base64.b64encode(rows.astype("<i4").tobytes()).decode()


def test_the_client_of_rollouts_gets_packed_rows(sparse_url, wanted, layout):
    request = SampleRequest("p", PROMPT, {"max_new_tokens": NUM_NEW, **GREEDY}, seed=1, count=2, returns_index=True)
    with BlockingRolloutClient(sparse_url) as client:
        ((first, second),) = client.generate([request])
    for rollout in (first, second):
        np.testing.assert_array_equal(rollout.index_rows, wanted)
        assert rollout.index_layout.layer_ids == layout.layer_ids


def test_a_job_keeps_index_rows_in_its_shards(sparse_url, wanted, layout, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"input_ids": PROMPT, "sampling_params": GREEDY}) + "\n")
    arguments = ["--prompts", str(prompts), "--url", sparse_url, "--max-new-tokens", str(NUM_NEW), "--index-rows"]
    assert main([*arguments, "--out", str(tmp_path / "out"), "--n", "2"]) == 0
    loaded = load(tmp_path / "out")
    assert len(loaded) == 2 and index_layout_of(loaded, 0).layer_ids == layout.layer_ids
    for sample in range(2):
        np.testing.assert_array_equal(loaded.index_rows(sample), wanted)
        trajectory = trajectory_of([loaded_rollout(loaded, sample)])
        np.testing.assert_array_equal(index_rows(trajectory), wanted)


def loaded_rollout(loaded, sample):
    """A sample of a shard as a client would have got it."""
    rows = loaded.table.slice(sample, 1).to_pylist()[0]
    return Rollout(
        *(rows[name] for name in ("prompt_id", "sample_index", "weight_version", "seed")),
        prompt_ids=loaded.prompt_ids[sample],
        output_ids=loaded.output_ids[sample],
        logprobs=loaded.logprobs[sample],
        logprob_versions=tuple(tuple(entry.values()) for entry in rows["logprob_weight_version"]),
        text=rows["text"],
        finish_reason=rows["finish_reason"],
        routing=loaded.routed_experts(sample),
        index_layout=index_layout_of(loaded, sample),
    )


def test_a_request_goes_on_with_its_index_rows(sparse, wanted):
    """At another replica: tokens that the first had committed bring their rows along."""
    body = {**BODIES[GENERATE], "sampling_params": {"max_new_tokens": 40, **GREEDY}, "stream": True}
    whole = sparse.generate(input_ids=PROMPT, max_new_tokens=40, **GREEDY, **ROWS)
    with pair_over(OwnJournal(), {"a": sparse, "b": sparse}) as pair, unhurried(sparse.loop):
        for name, rows in (("both", ROWS), ("index", {"return_indexer_topk": True})):
            begun = begin(pair["a"], GENERATE, {**body, **rows, "rid": name}, num_events=5)
            told = told_of(begun[-1][0])
            wait_until(lambda: sparse.loop.statistics()["requests_live"] == 0)
            *_, (_, last) = all_events(pair["b"], RESUME, {"rid": name, "from_token": told})
            assert last["output_ids"] == whole["output_ids"] and 0 < told[0] < 40
            np.testing.assert_array_equal(rows_of(last), extract_indexer_topk_from_meta_info(whole))
        assert pair.journals["b"].statistics()["resumed"] == 2


def test_packed_rows_are_those_of_the_indexes(client, wanted, layout):
    meta = ask(client, GENERATE, **BODIES[GENERATE], **ROWS, indexer_topk_format="packed")["meta_info"]
    packed, described = decode_index(meta["indexer_topk"], meta["indexer_topk_info"])
    assert replace(described, max_bytes=layout.max_bytes) == layout
    rows = unpacked_rows(packed, num_layers=len(layout.layer_ids), top_k=layout.top_k)
    np.testing.assert_array_equal(rows, wanted[:, own_rows(layout)])


@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS])
def test_every_choice_has_its_own_rows(client, sparse, path):
    """Cached prompts return the same rows as newly computed ones."""
    body = json.loads(json.dumps(BODIES[path]))
    (body["sampling_params"] if path == GENERATE else body).update(n=3, temperature=1.0)
    body = {**body, "return_token_ids": True} if path == COMPLETIONS else body
    answer = ask(client, path, **body, **ROWS)
    choices = answer["choices"] if path == COMPLETIONS else answer
    found = [choice["token_ids" if path == COMPLETIONS else "output_ids"] for choice in choices]
    assert len({*map(tuple, found)}) == 3
    for choice, ids in zip(choices, found, strict=True):
        alone = sparse.generate(input_ids=[*PROMPT, *ids], max_new_tokens=0, cache_salt="alone", **ROWS)
        rows = extract_indexer_topk_from_meta_info(choice)
        np.testing.assert_array_equal(rows, extract_indexer_topk_from_meta_info(alone)[:-1])
