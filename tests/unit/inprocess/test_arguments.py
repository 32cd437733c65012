"""From `Engine.generate` arguments to requests: what is understood, and what is refused with its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayserve_moe.inprocess.arguments import Prompts, prompts_from, requests_from, single_prompt_from
from rayserve_moe.replay.encoding import encode_packed, encode_routed_experts
from rayserve_moe.requests.records import GenerationRequest, ModelCard, RequestError, RoutedExperts, RoutingLayout
from rayserve_moe.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(core_checkpoint: Path) -> Tokenizer:
    return Tokenizer(core_checkpoint)


def test_one_prompt_and_a_batch_are_told_apart(tokenizer: Tokenizer) -> None:
    single, is_batch = prompts_from(tokenizer, None, input_ids=[3, 4])
    assert [p.tolist() for p in single] == [[3, 4]] and not is_batch
    batch, is_batch = prompts_from(tokenizer, None, input_ids=[[3], np.array([4, 5])])
    assert [p.tolist() for p in batch] == [[3], [4, 5]] and is_batch
    texts, is_batch = prompts_from(tokenizer, ["a", "bc"], input_ids=None)
    assert [p.tolist() for p in texts] == [tokenizer.encode("a"), tokenizer.encode("bc")] and is_batch


@pytest.mark.parametrize("ids", [[1.5], [-1], [2**31], [2**70], ["3"], [[1, 2], [[3]]], [True]], ids=str)
def test_what_is_no_list_of_ids_is_refused(tokenizer: Tokenizer, ids: Any) -> None:
    with pytest.raises(RequestError) as refusal:
        prompts_from(tokenizer, None, input_ids=ids)
    assert refusal.value.param == "input_ids"


@pytest.mark.parametrize("both", [(None, None), ("text", [1])])
def test_exactly_one_form_of_prompt(tokenizer: Tokenizer, both: tuple[Any, Any]) -> None:
    with pytest.raises(RequestError, match="either prompt"):
        prompts_from(tokenizer, both[0], input_ids=both[1])


def test_sampling_is_named_as_in_sglang() -> None:
    named = {"max_tokens": 3, "top_k": -1, "sampling_seed": 5, "stop": "x", "stop_token_ids": [1, 2]}
    params = requests_with(**named)[0].sampling
    assert (params.max_new_tokens, params.top_k, params.seed) == (3, 0, 5)
    assert (params.stop, params.stop_token_ids) == (("x",), (1, 2))


def test_an_unknown_parameter_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match=r"unknown argument 'temprature'; known: .*indexer_topk_format.*temperature"):
        requests_with(temprature=1)
    with pytest.raises(RequestError, match=r"unknown sampling parameter 'indexer_topk_format'; known: .*temperature"):
        requests_with(PROMPTS, {"indexer_topk_format": "packed"})


def test_a_form_of_index_rows_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="indexer_topk_format should be sglang or packed"):
        requests_with(indexer_topk_format="npy")


@pytest.mark.parametrize(
    ("name", "value"),
    [("logprob_start_len", value) for value in (1.5, "1", True, [0], -2, np.float32(1))] + [("return_logprob", "yes")],
)
def test_a_wrong_value_for_log_probs_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"{name} should be") as refusal:
        requests_with(PROMPTS, None, **{"return_logprob": True, name: value})
    assert refusal.value.param == name


@pytest.mark.parametrize(("value", "first"), [(1, 1), (np.int64(1), 1), (-1, None), (None, None)])
def test_the_first_position_of_log_probs_is_a_whole_number(value: Any, first: int | None) -> None:
    assert requests_with(return_logprob=True, logprob_start_len=value)[0].score_prompt_from == first


LAYOUT = RoutingLayout(num_hidden_layers=3, layer_ids=(1, 2), num_experts=8, top_k=2)
CARD = ModelCard("m", 128, 512, (2,), LAYOUT, returns_routing=True)
PROMPTS = Prompts([np.array([1, 5, 6]), np.array([2, 7])], is_batch=True)
ROWS = np.arange(12, dtype=np.uint8).reshape(3, 2, 2) % 8


def requests_with(prompts: Prompts = PROMPTS, sampling_params: Any = None, **keywords: Any) -> list[GenerationRequest]:
    return requests_from(prompts, sampling_params, keywords=keywords, card=CARD)


def test_keywords_go_on_top_of_each_mapping() -> None:
    requests = requests_with(PROMPTS, [{"n": 2}, {"n": 3, "seed": 1}], seed=9, return_routed_experts=True)
    assert [(r.sampling.n, r.sampling.seed, r.return_routed_experts) for r in requests] == [(2, 9, True), (3, 9, True)]
    with pytest.raises(RequestError, match="2 prompts"):
        requests_with(PROMPTS, [{}])


@pytest.mark.parametrize("option", ["cache_salt", "return_logprob", "stream_routed_experts"])
def test_options_are_keywords_and_no_sampling_parameters(option: str) -> None:
    with pytest.raises(RequestError) as refusal:
        requests_with(sampling_params={option: "s"})
    assert refusal.value.param == option


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", "hot"), ("ignore_eos", 1), ("n", 0), ("stop", [""]), ("cache_salt", 7)]
)
def test_a_wrong_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"{name} should be") as refusal:
        requests_with(**{name: value})
    assert refusal.value.param == name


def test_options_reach_the_engine() -> None:
    (request,) = requests_with(
        Prompts(PROMPTS.ids[:1], is_batch=False),
        return_logprob=True,
        top_logprobs_num=3,
        logprob_start_len=1,
        cache_salt="s",
        frequency_penalty=0.5,
        logit_bias={"7": 2, "3": -1},
    )
    assert (request.num_top_logprobs, request.score_prompt_from, request.cache_salt) == (3, 1, "s")
    assert request.sampling.frequency_penalty == 0.5
    assert request.sampling.logit_bias == ((3, -1.0), (7, 2.0))
    assert requests_with()[0].score_prompt_from is None


@pytest.mark.parametrize("start", [-1, 3])
def test_a_start_beyond_the_shortest_prompt_is_refused(start: int) -> None:
    with pytest.raises(RequestError) as refusal:
        requests_with(routed_experts_start_len=start)
    assert refusal.value.param == "routed_experts_start_len"


@pytest.mark.parametrize(
    "encode",
    [
        lambda routing: routing,
        lambda routing: routing.rows,
        lambda routing: routing.rows.astype(np.int64),
        lambda routing: encode_routed_experts(routing, LAYOUT),
        lambda routing: encode_packed(routing, LAYOUT),
    ],
)
def test_forced_routing_comes_as_an_array_or_as_an_answer_has_it(encode: Any) -> None:
    forced = encode(RoutedExperts(ROWS))
    (request,) = requests_with(Prompts(PROMPTS.ids[:1], is_batch=False), forced_routed_experts=forced)
    assert request.forced_routing is not None
    np.testing.assert_array_equal(request.forced_routing.rows, ROWS)
    assert request.forced_routing.rows.dtype == LAYOUT.dtype
    first, second = requests_with(forced_routed_experts=[forced, None])
    assert first.forced_routing is not None and second.forced_routing is None


@pytest.mark.parametrize(
    "forced", [ROWS, [ROWS], [ROWS + 5, None], [ROWS.astype(float), None], ["?", None], [{"data": 1}, None], "text"]
)
def test_forced_routing_that_is_none_of_these_is_refused_by_name(forced: Any) -> None:
    with pytest.raises(RequestError) as refusal:
        requests_with(forced_routed_experts=forced)
    assert refusal.value.param == "forced_routed_experts"


def test_a_batch_is_refused_where_one_prompt_is_taken(tokenizer: Tokenizer) -> None:
    (only,), is_batch = single_prompt_from(tokenizer, None, input_ids=[3, 4])
    assert only.tolist() == [3, 4] and not is_batch
    with pytest.raises(RequestError, match="one prompt at a time"):
        single_prompt_from(tokenizer, None, input_ids=[[3], [4]])
