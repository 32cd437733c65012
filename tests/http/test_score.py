"""`/v1/score`: probabilities of labels, as log-probs of the same prompts say them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.serving.http_client import GENERATE, ask, check_error

SCORE = "/v1/score"
QUERY, ITEMS, LABELS = [40, 41, 42], [[50], [60, 61], [50, 7]], [300, 7, 9]
ASKED = {"query": QUERY, "items": ITEMS, "label_token_ids": LABELS}


def label_logprobs(http, prompt_ids):
    asked = {"sampling_params": {"max_new_tokens": 1}, "return_logprob": True, "token_ids_logprob": LABELS}
    (place,) = ask(http, GENERATE, input_ids=prompt_ids, **asked)["meta_info"]["output_token_ids_logprobs"]
    return np.array([value for value, *_ in place])


@pytest.mark.parametrize("item_first", [False, True])
@pytest.mark.parametrize("softmax", [False, True])
def test_scores_are_the_probabilities_that_log_probs_say(http, item_first, softmax):
    answer = ask(http, SCORE, **ASKED, item_first=item_first, apply_softmax=softmax)
    prompts = [item + QUERY if item_first else QUERY + item for item in ITEMS]
    expected = [np.exp(label_logprobs(http, prompt)) for prompt in prompts]
    expected = [each / each.sum() for each in expected] if softmax else expected
    np.testing.assert_allclose(answer["scores"], expected, rtol=1e-4)
    assert answer["object"] == "scoring" and answer["usage"]["prompt_tokens"] == sum(map(len, prompts))


@pytest.mark.parametrize("temperature", [1e-300, 0.5, 4])
def test_labels_share_the_probability_at_a_temperature(http, temperature):
    answer = ask(http, SCORE, **ASKED, apply_softmax=True, temperature=temperature)
    for scores, item in zip(answer["scores"], ITEMS, strict=True):
        weights = label_logprobs(http, QUERY + item)
        weights = np.exp((weights - weights.max()) / temperature)
        np.testing.assert_allclose(scores, weights / weights.sum(), rtol=1e-3)


def test_texts_are_joined_before_they_are_tokenized(http):
    answer = ask(http, SCORE, query="Is this so? ", items=["yes", "no"], label_token_ids=LABELS)
    prompts = [ask(http, "/tokenize", prompt=f"Is this so? {item}")["tokens"] for item in ("yes", "no")]
    np.testing.assert_allclose(
        answer["scores"], [np.exp(label_logprobs(http, prompt)) for prompt in prompts], rtol=1e-4
    )


def test_one_item_needs_no_list(http):
    one = ask(http, SCORE, query="a", items="b", label_token_ids=LABELS)
    assert one["scores"] == ask(http, SCORE, query="a", items=["b"], label_token_ids=LABELS)["scores"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"label_token_ids": []}, None),
        ({"label_token_ids": None}, "label_token_ids"),
        ({"label_token_ids": [10**6]}, "label_token_ids"),
        ({"label_token_ids": [*range(129)]}, "label_token_ids"),
        ({"items": None}, "items"),
        ({"items": ["x"]}, None),
        ({"query": [QUERY, QUERY]}, None),
        ({"text_1": "x", "text_2": "y"}, "text_1"),
        ({"temperature": 0, "apply_softmax": True}, "temperature"),
        ({"temperature": 2}, None),
        ({"model": "other"}, "model"),
    ],
)
def test_what_cannot_be_scored_is_refused(http, fields, param):
    error = check_error(http.post(SCORE, json={**ASKED, **fields}), 404 if "model" in fields else 400)
    assert param is None or error["param"] == param
