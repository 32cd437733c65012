"""Listed ids and entropy on the native route; `test_dialects` has what every route says of listed ids."""

from __future__ import annotations

import pytest

from tests.support.serving.http_client import GENERATE, ask, check_error

PROMPT = [*range(40, 60)]
LISTED = [300, 7, 9]
GREEDY = {"temperature": 0, "ignore_eos": True}
NATIVE = {"sampling_params": {**GREEDY, "max_new_tokens": 4}, "return_logprob": True}


def test_each_prompt_of_a_batch_has_its_own_list(http):
    told = ask(http, GENERATE, input_ids=[PROMPT] * 3, **NATIVE, token_ids_logprob=[[5], None, [6, 7]])
    ids = [[i for _, i, _ in answer["meta_info"].get("output_token_ids_logprobs", [[]])[0]] for answer in told]
    assert ids == [[5], [], [6, 7]]


def test_lists_pass_without_effect_where_sglang_passes_over_them(http):
    body = {"input_ids": PROMPT, "sampling_params": NATIVE["sampling_params"], "token_ids_logprob": LISTED}
    assert "output_token_ids_logprobs" not in ask(http, GENERATE, **body)["meta_info"]


def test_entropy_needs_no_log_probs(http):
    body = {"input_ids": PROMPT, "sampling_params": NATIVE["sampling_params"], "return_entropy": True}
    entropy = ask(http, GENERATE, **body)["meta_info"]["output_token_entropy"]
    assert len(entropy) == 4 and all(0 < value < 6.3 for value in entropy)


@pytest.mark.parametrize("listed", [None, LISTED])
def test_a_start_beyond_the_prompt_is_refused(http, listed):
    for start in (len(PROMPT) + 1, 2**31 - 1):
        body = {"input_ids": PROMPT, **NATIVE, "token_ids_logprob": listed, "logprob_start_len": start}
        assert check_error(http.post(GENERATE, json=body), 400)["param"] == "logprob_start_len"
