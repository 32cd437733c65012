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


def test_no_tokens_may_be_asked_for(client):
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=0, extra_body=with_routing())
    assert answer.choices[0].text == "" and answer.usage.completion_tokens == 0
    assert answer.choices[0].meta_info["routed_experts_info"]["shape"][0] == len(PROMPT)


@pytest.mark.parametrize("seed", [7, -7, 2**63 - 1])
def test_a_seed_gives_the_same_text_again(client, seed):
    texts = [
        client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, seed=seed, n=2).choices for _ in range(2)
    ]
    assert [choice.text for choice in texts[0]] == [choice.text for choice in texts[1]]


def test_a_completion_stream_adds_up_to_the_whole_answer(client):
    asked = {"model": MODEL, "prompt": [PROMPT, [9]], "n": 2, "max_tokens": 9, "logprobs": 0, **GREEDY}
    whole = client.completions.create(**asked)
    texts, tokens, finishes = [""] * 4, [[] for _ in range(4)], [[] for _ in range(4)]
    usage = None
    for chunk in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.text_offset
            finishes[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.text_offset for choice in whole.choices]
    assert finishes == [["length"]] * 4
    assert usage == whole.usage


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


def test_chat_answers_and_streams_the_same(client):
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "logprobs": True}
    whole = client.chat.completions.create(**asked, **GREEDY)
    stream = client.chat.completions.create(**asked, **GREEDY, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert "".join(chunk.choices[0].delta.content for chunk in chunks[:-1]) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == whole.choices[0].finish_reason == "length"
    assert chunks[-1].choices == [] and spent(chunks[-1].usage) == spent(whole.usage)
    entries = [entry for chunk in chunks[:-1] for entry in chunk.choices[0].logprobs.content]
    assert [entry.token for entry in entries] == [entry.token for entry in whole.choices[0].logprobs.content]
    assert len(entries) == 8 and all(math.isfinite(entry.logprob) for entry in entries)


def test_chat_takes_parts_and_equals_its_rendered_prompt(client):
    plain = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    parts = [plain[0], {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    answers = [
        client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=6, **GREEDY)
        for messages in (plain, parts)
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    assert spent(answers[0].usage) == spent(answers[1].usage)


def test_usage_says_what_was_found_cached_under_the_same_salt(client):
    """The last of the prompt's tokens is always computed, and pages of 16 tokens are cached whole."""
    asked = {"model": MODEL, "prompt": [*range(40, 90)], "max_tokens": 2, **GREEDY}
    answers = [
        client.completions.create(**{**asked, "n": n, "extra_body": {**GREEDY["extra_body"], "cache_salt": salt}})
        for n, salt in ((1, "a salt"), (3, "a salt"), (1, "another"), (1, "a salt"))
    ]
    assert [answer.usage.prompt_tokens_details.cached_tokens for answer in answers] == [0, 48, 0, 48]
    assert len({choice.text for answer in answers for choice in answer.choices}) == 1


def test_chat_runs_to_the_end_of_the_context_by_default(client):
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x" * 420}], **GREEDY)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 512


def test_a_stop_string_ends_the_text_before_it(client):
    whole = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=60, seed=11, extra_body={"ignore_eos": True}
    )
    text = whole.choices[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    asked = {
        "model": MODEL,
        "prompt": PROMPT,
        "max_tokens": 60,
        "seed": 11,
        "stop": [stop],
        "extra_body": {"ignore_eos": True},
    }
    cut = client.completions.create(**asked)
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert (
        "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True))
        == cut.choices[0].text
    )


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


def test_routing_comes_with_the_last_chunk_only(client, engine):
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0}
    whole = client.chat.completions.create(**asked, extra_body=with_routing())
    chunks = list(client.chat.completions.create(**asked, stream=True, extra_body=with_routing()))
    assert all(not hasattr(chunk.choices[0], "meta_info") for chunk in chunks[:-1])
    rows = check_routing(chunks[-1].choices[0], engine.loop.card, whole.usage.total_tokens)
    np.testing.assert_array_equal(rows, check_routing(whole.choices[0], engine.loop.card, whole.usage.total_tokens))


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
