"""Served checkpoints with a rank file alone: texts, ids, streams, stops and grammars equal those of tiktoken."""

from __future__ import annotations

import json

import httpx
import jsonschema
import pytest

from rayserve_moe.inprocess.engine import Engine
from tests.http.conftest import served
from tests.support.engine.shared_settings import SERVED, write_served
from tests.support.serving.http_client import CHAT, COMPLETIONS, ask, stream
from tests.support.text.constraints import PERSON
from tests.support.text.rank_files import KIMI, tiktoken_encoding, write_tiktoken

NUM_MERGES = 200
TEMPLATE = "{% for m in messages %}<|im_end|>{{ m.role }}: {{ m.content }}{% endfor %}<|im_end|>assistant: "
TEXT = "the HTTPServer isn't here, 你好世界 12345\n\n  été 👩\u200d👧<|im_end|>"


@pytest.fixture(scope="module")
def ranked(tmp_path_factory):
    path = write_served(tmp_path_factory.mktemp("ranked") / "tiny")
    for file in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        (path / file).unlink()
    write_tiktoken(path, KIMI, num_merges=NUM_MERGES, chat_template=TEMPLATE)
    with (
        Engine(model_path=str(path), **SERVED) as engine,
        served(engine) as url,
        httpx.Client(base_url=url, timeout=600) as client,
    ):
        yield client


def test_texts_and_ids_are_those_of_tiktoken(ranked):
    wanted = tiktoken_encoding(KIMI, num_merges=NUM_MERGES)
    ids = ask(ranked, "/tokenize", prompt=TEXT)["tokens"]
    assert ids == wanted.encode(TEXT, allowed_special="all")
    assert ask(ranked, "/detokenize", tokens=ids)["prompt"] == TEXT
    of_chat = ask(ranked, "/tokenize", messages=[{"role": "user", "content": "你好"}])["tokens"]
    assert wanted.decode(of_chat) == "<|im_end|>user: 你好<|im_end|>assistant: "


def test_a_stream_is_the_whole_answer_until_a_stop(ranked):
    body = {"prompt": TEXT, "max_tokens": 60, "seed": 5, "ignore_eos": True}
    (whole,) = ask(ranked, COMPLETIONS, **body)["choices"]
    pieces = [event["choices"][0]["text"] for event in stream(ranked, COMPLETIONS, **body) if event["choices"]]
    assert "".join(pieces) == whole["text"] and len(pieces) > 2
    stop = whole["text"][len(whole["text"]) // 2 :][:3]
    (stopped,) = ask(ranked, COMPLETIONS, **body, stop=stop)["choices"]
    assert stopped["text"] == whole["text"].partition(stop)[0] and stopped["finish_reason"] == "stop"


def test_a_schema_is_kept_to(ranked):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    messages = [{"role": "user", "content": "hi"}]
    (choice,) = ask(ranked, CHAT, messages=messages, response_format=form, seed=4, max_tokens=200)["choices"]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)
