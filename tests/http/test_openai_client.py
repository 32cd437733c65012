"""The OpenAI routes as the unmodified `openai` package sees them."""

from __future__ import annotations

import math
import zlib

import numpy as np
import openai
import pytest

from rayserve_moe import extract_routed_experts_from_meta_info

MODEL = "tiny"
PROMPT = [5, 6, 7, 8]
GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}


def with_routing(**extra):
    return {"ignore_eos": True, "return_routed_experts": True, **extra}


def test_models_lists_the_served_one(client):
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert model.max_model_len == 512
    assert model.weight_version == "0"
    assert client.models.retrieve(MODEL).id == MODEL


def test_choices_are_numbered_prompt_by_prompt(client):
    answer = client.completions.create(model=MODEL, prompt=[PROMPT, [9, 10]], n=2, max_tokens=3, **GREEDY)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == answer.choices[1].text
    alone = client.completions.create(model=MODEL, prompt=[9, 10], max_tokens=3, **GREEDY)
    assert answer.choices[2].text == alone.choices[0].text
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 12)


def test_text_and_token_id_prompts_are_the_same_prompt(client, engine):
    text = "the same words"
    by_text = client.completions.create(model=MODEL, prompt=text, max_tokens=5, **GREEDY)
    by_ids = client.completions.create(model=MODEL, prompt=engine.tokenizer.encode(text), max_tokens=5, **GREEDY)
    assert by_text.choices[0].text == by_ids.choices[0].text
    assert by_text.usage == by_ids.usage


def test_a_completion_has_sixteen_tokens_unless_told_otherwise(client):
    answer = client.completions.create(model=MODEL, prompt=PROMPT, **GREEDY)
    assert answer.usage.completion_tokens == 16


def test_completion_log_probs_belong_to_the_text(client, engine):
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=20, logprobs=1, seed=3)
    (choice,) = answer.choices
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == answer.usage.completion_tokens
    assert all(math.isfinite(value) and value <= 0 for value in logprobs.token_logprobs)
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    assert logprobs.text_offset[0] == 0 and logprobs.text_offset[-1] <= len(choice.text)
    unseen = {engine.tokenizer.token_text(token_id) for token_id in engine.tokenizer.special_ids}
    for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
        if "\N{REPLACEMENT CHARACTER}" not in token and token not in unseen:
            assert choice.text.startswith(token, offset)


def spent(usage) -> tuple[int, int]:
    """Prompt and completion tokens, however many of them were cached."""
    return usage.prompt_tokens, usage.completion_tokens


def test_chat_takes_parts_and_equals_its_rendered_prompt(client):
    plain = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    parts = [plain[0], {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    answers = [
        client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=6, **GREEDY)
        for messages in (plain, parts)
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    assert spent(answers[0].usage) == spent(answers[1].usage)


def test_chat_runs_to_the_end_of_the_context_by_default(client):
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x" * 420}], **GREEDY)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 512


def check_routing(choice, card, num_tokens):
    description = choice.meta_info["routed_experts_info"]
    layout = card.routing
    flat = extract_routed_experts_from_meta_info({"meta_info": choice.meta_info})
    decoded = flat.reshape(num_tokens - 1, layout.num_hidden_layers, layout.top_k)
    moe_rows = decoded[:, list(layout.layer_ids)]
    assert not decoded[:, 1].any()
    assert description["shape"] == list(moe_rows.shape)
    assert description["layer_ids"] == [0, 2, 3]
    assert description["missing"] == []
    assert description["crc32"] == zlib.crc32(moe_rows.astype(description["dtype"]).tobytes())
    assert choice.sgl_ext["routed_experts"] == choice.meta_info["routed_experts"]
    assert (np.sort(moe_rows)[..., 1:] > np.sort(moe_rows)[..., :-1]).all()
    return decoded


def test_routing_comes_with_every_choice(client, engine):
    answer = client.completions.create(model=MODEL, prompt=PROMPT, n=2, max_tokens=6, seed=1, extra_body=with_routing())
    rows = [check_routing(choice, engine.loop.card, len(PROMPT) + 6) for choice in answer.choices]
    np.testing.assert_array_equal(rows[0][: len(PROMPT)], rows[1][: len(PROMPT)])


def test_routing_stays_away_unless_asked_for(client):
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=2)
    assert not hasattr(answer.choices[0], "meta_info") and not hasattr(answer.choices[0], "sgl_ext")


def test_errors_are_the_package_s_own_exceptions(client):
    with pytest.raises(openai.NotFoundError) as refused:
        client.completions.create(model="another", prompt="x")
    assert refused.value.code == "model_not_found" and refused.value.param == "model"
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="x", temperature=9)
    assert refused.value.param == "temperature"
