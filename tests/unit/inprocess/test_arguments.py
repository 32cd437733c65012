"""From `Engine.generate` arguments to requests: what is understood, and what is refused with its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayserve_moe.inprocess.arguments import prompts_from, requests_from, sampling_from, single_prompt_from
from rayserve_moe.requests import RequestError
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
    params = sampling_from({"max_tokens": 3, "top_k": -1, "sampling_seed": 5, "stop": "x", "stop_token_ids": [1, 2]})
    assert (params.max_new_tokens, params.top_k, params.seed) == (3, 0, 5)
    assert (params.stop, params.stop_token_ids) == (("x",), (1, 2))


def test_an_unknown_parameter_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="unknown sampling parameter 'temprature'"):
        sampling_from({"temprature": 1})


def test_keywords_go_on_top_of_each_mapping() -> None:
    prompts = [np.array([1]), np.array([2])]
    requests = requests_from(prompts, [{"n": 2}, {"n": 3, "seed": 1}], keywords={"seed": 9}, return_routed_experts=True)
    assert [(r.sampling.n, r.sampling.seed, r.return_routed_experts) for r in requests] == [(2, 9, True), (3, 9, True)]
    with pytest.raises(RequestError, match="2 prompts"):
        requests_from(prompts, [{}], keywords={}, return_routed_experts=False)


def test_a_batch_is_refused_where_one_prompt_is_taken(tokenizer: Tokenizer) -> None:
    assert single_prompt_from(tokenizer, None, input_ids=[3, 4]).tolist() == [3, 4]
    with pytest.raises(RequestError, match="one prompt at a time"):
        single_prompt_from(tokenizer, None, input_ids=[[3], [4]])
