"""Chats over published templates: transformers' prompt after the documented choices, or the template's refusal."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from rayserve_moe.text.tokenizer import Tokenizer
from tests.support.text.chat_histories import HISTORIES
from tests.support.text.chat_prompts import READINGS, check_history, lost_kinds, with_template
from tests.support.text.published_templates import TEMPLATES, template_of

pytestmark = pytest.mark.published


@cache
def _opened(name: str, directory: Path) -> Tokenizer | None:
    template = template_of(name)
    return None if template is None else with_template(template, directory=directory / name)


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("templates")


@pytest.fixture(params=TEMPLATES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tokenizer(name: str, directory: Path) -> Tokenizer:
    tokenizer = _opened(name, directory)
    if tokenizer is None:
        pytest.skip("`make published` fetches it")
    return tokenizer


@pytest.mark.parametrize("history", HISTORIES)
def test_a_prompt_is_transformers_rendering_of_the_documented_messages(tokenizer, name, history):
    check_history(tokenizer, HISTORIES[history], reading=READINGS[name])


def test_a_prompt_loses_only_what_its_template_drops(tokenizer, name):
    assert lost_kinds(tokenizer) == READINGS[name].losses
