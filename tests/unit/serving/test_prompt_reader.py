"""A router reads the same prompt out of a body as the replica will."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rayserve_moe.checkpoints.synthetic_tokenizer import write_tokenizer
from rayserve_moe.fleet.choosing import UNPARSED, Prompt
from rayserve_moe.scheduling.page_digests import prompt_digests, salt_of
from rayserve_moe.serving.api.schemas.field_types import MAX_CHOICES
from rayserve_moe.serving.prompt_reader import PromptReader
from rayserve_moe.text.chat import encode_chat
from rayserve_moe.text.tokenizer import Tokenizer

KEY, PAGE = b"key", 4
IDS = list(range(3, 60))
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is six times seven?"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path, 270)
    return Tokenizer(path)


@pytest.fixture(scope="module")
def reader(tokenizer):
    return PromptReader(tokenizer, key=KEY, served_name="m")


def read(reader: PromptReader, body: object) -> Prompt:
    return reader.read(json.dumps(body).encode(), page_size=PAGE)


def prompt_of(ids, salt: str = "") -> Prompt:
    return Prompt(len(ids), prompt_digests(KEY, salt, token_ids=np.asarray(ids), page_size=PAGE), PAGE)


@pytest.mark.parametrize("name", ["input_ids", "token_ids", "prompt"])
@pytest.mark.parametrize("salt", ["", "tenant"])
def test_ids_are_taken_as_they_are(reader, name, salt):
    assert read(reader, {name: IDS, "cache_salt": salt, "max_tokens": 3}) == prompt_of(IDS, salt)


def test_prompts_of_an_adapter_have_other_pages_whatever_its_bytes(reader):
    found = read(reader, {"input_ids": IDS, "lora_path": "a"})
    assert found == prompt_of(IDS, salt_of("", "a@0123")) != prompt_of(IDS)
    assert read(reader, {"input_ids": [IDS, IDS], "lora_path": [None, "a"]}).digests == prompt_of(IDS).digests


@pytest.mark.parametrize(
    ("fields", "adapter"),
    [
        ({"model": "a"}, "a"),
        ({"model": "m:a"}, "a"),
        ({"model": "org/m:a"}, "org/m:a"),
        ({"model": "m", "lora_path": "a"}, "a"),
        ({"model": "a", "lora_path": "a"}, "a"),
        ({"model": "a", "lora_path": None}, "a"),
        ({"model": "m"}, ""),
        ({"model": None}, ""),
    ],
)
@pytest.mark.parametrize("name", ["prompt", "token_ids"])
def test_the_model_may_be_an_adapter_as_the_replica_reads_it(reader, tokenizer, name, fields, adapter):
    assert read(reader, {name: IDS, **fields}) == prompt_of(IDS, salt_of("", adapter))
    chat = read(reader, {"messages": CHAT, **fields})
    assert chat == prompt_of(encode_chat(tokenizer, CHAT), salt_of("", adapter))


def test_models_of_other_bodies_and_servers_without_adapters_change_no_page(reader, tokenizer):
    assert read(reader, {"input_ids": IDS, "model": "a"}) == prompt_of(IDS), "/generate reads no model"
    merging = PromptReader(tokenizer, key=KEY)
    for fields in ({"model": "a"}, {"lora_path": "a"}):
        assert read(merging, {"prompt": IDS, **fields}) == prompt_of(IDS), "a merged adapter is part of the weights"


def test_of_several_prompts_the_first_one_counts(reader):
    both = read(reader, {"input_ids": [IDS, [1, 2]], "cache_salt": ["a", "b"]})
    assert both == prompt_of(IDS, "a")._replace(num_choices=2, num_requests=2)
    texts = read(reader, {"prompt": ["six times seven", "x"]})
    assert texts == read(reader, {"prompt": "six times seven"})._replace(num_choices=2, num_requests=2)


@pytest.mark.parametrize(
    ("fields", "counts"),
    [
        ({"n": 3}, (3, 1)),
        ({"n": None}, (1, 1)),
        ({"sampling_params": {"n": 4}}, (4, 1)),
        ({"sampling_params": [{"n": 4}, {"n": 4}], "input_ids": [IDS, IDS]}, (8, 2)),
        ({"n": 10**9}, (MAX_CHOICES, 1)),
        ({"n": -1}, (1, 1)),
    ],
)
def test_choices_and_requests_are_counted(reader, fields, counts):
    prompt = read(reader, {"input_ids": IDS, **fields})
    assert (prompt.num_choices, prompt.num_requests) == counts


@pytest.mark.parametrize("name", ["text", "prompt"])
def test_texts_are_tokenized_as_the_replica_does(reader, tokenizer, name):
    text = "a longer text of some words, and more"
    assert read(reader, {name: text, "extra_key": "s"}) == prompt_of(tokenizer.encode(text), "s")


def test_chats_are_rendered_in_every_dialect(reader, tokenizer):
    wanted = prompt_of(encode_chat(tokenizer, CHAT))
    system, user = (message["content"] for message in CHAT)
    assert len(wanted.digests) > 5
    assert read(reader, {"messages": CHAT, "model": "m"}) == wanted
    assert read(reader, {"messages": CHAT[1:], "system": system, "max_tokens": 9, "model": "m"}) == wanted
    assert read(reader, {"input": user, "instructions": system}) == wanted


def test_a_private_prompt_has_tokens_and_no_pages(reader):
    assert read(reader, {"input_ids": IDS, "forced_routed_experts": "rows"}) == Prompt(len(IDS))
    assert read(reader, {"prompt": IDS, "truncate_prompt_tokens": 8}) == Prompt(len(IDS))


@pytest.mark.parametrize(
    "body", [{}, [], 3, {"rid": "x"}, {"mode": "abort"}, {"input": "hi", "previous_response_id": "r"}]
)
def test_what_is_no_prompt_is_unknown(reader, body):
    assert read(reader, body) is UNPARSED


def test_without_a_known_size_of_pages_nothing_is_read(reader):
    assert reader.read(json.dumps({"input_ids": IDS}).encode(), page_size=0) is UNPARSED
