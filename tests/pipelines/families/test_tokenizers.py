"""A model of every family starts with a tokenizer in the family's published form, and answers in its text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayserve_moe import Engine
from tests.pipelines.families.conftest import families
from tests.support.engine.shared_settings import CORE
from tests.support.models.families import FamilyCase, write_family
from tests.support.text.tokenizer_forms import FORM_OF_FAMILY, write_form

pytestmark = families("mixtral-0")
PROMPTS = ["the cat sat", " Der Tag\r\n", "日本語", "x = [1, 2]", "<think>été"]
LONG = {"max_new_tokens": 40, "temperature": 1.0, "ignore_eos": True}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Wien", "東京"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def published(case: FamilyCase, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    directory: Path = write_family(case, tmp_path_factory.mktemp(case.name) / "model", seed=5, dtype="bfloat16")
    write_form(FORM_OF_FAMILY[case.family], directory)
    with Engine(str(directory), **CORE | {"structured_output": True}) as engine:
        yield engine


def test_texts_of_prompts_and_answers_are_those_of_transformers(published: Engine) -> None:
    backing = published.tokenizer.backing
    (inside,) = [token_id for token_id in backing("a").input_ids if token_id not in backing.all_special_ids][-1:]
    answers: Any = published.generate(PROMPTS, LONG)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer["meta_info"]["prompt_tokens"] == len(backing(prompt).input_ids)
        before, whole = (
            backing.decode(ids, skip_special_tokens=True) for ids in ([inside], [inside, *answer["output_ids"]])
        )
        assert before + answer["text"] == whole
    streamed = [list(published.generate_stream(prompt, LONG | {"temperature": 0}))[-1]["text"] for prompt in PROMPTS]
    greedy: Any = published.generate(PROMPTS, LONG | {"temperature": 0})
    assert streamed == [answer["text"] for answer in greedy]


def test_an_answer_keeps_to_a_schema_and_ends(published: Engine) -> None:
    answers: Any = published.generate(PROMPTS, {"max_new_tokens": 300, "json_schema": json.dumps(SCHEMA)})
    for answer in answers:
        assert answer["meta_info"]["finish_reason"]["type"] == "stop", answer
        assert json.loads(answer["text"])["city"] in ("Wien", "東京")


def test_a_stop_string_ends_the_answer_before_it(published: Engine) -> None:
    answers: Any = published.generate(PROMPTS, LONG | {"max_new_tokens": 100, "stop": ["e", "t"]})
    ended = [answer["text"] for answer in answers if answer["meta_info"]["finish_reason"]["type"] == "stop"]
    assert ended
    assert not any("e" in text or "t" in text for text in ended)
