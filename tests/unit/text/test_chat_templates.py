"""Chats over the templates of families that no package publishes, by the law of published templates."""

from __future__ import annotations

import pytest

from rayserve_moe.text.tokenizer import Tokenizer
from tests.support.text.chat_histories import HISTORIES
from tests.support.text.chat_prompts import MARKER, READINGS, check_history, kinds_of, lost_kinds, with_template
from tests.support.text.written_templates import OWN_TEMPLATES


@pytest.fixture(scope="module", params=OWN_TEMPLATES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def own(name: str, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return with_template(OWN_TEMPLATES[name], directory=tmp_path_factory.mktemp(name))


@pytest.mark.parametrize("history", HISTORIES)
def test_a_prompt_is_transformers_rendering_of_the_documented_messages(own, name, history):
    check_history(own, HISTORIES[history], reading=READINGS[name])


def test_a_prompt_loses_only_what_its_template_drops(own, name):
    assert lost_kinds(own) == READINGS[name].losses


@pytest.mark.parametrize("history", HISTORIES)
def test_every_marker_is_once_in_its_history_and_has_a_kind(history):
    """Check the markers by which lost text is found."""
    text = repr((*HISTORIES[history].messages, HISTORIES[history].tools, HISTORIES[history].options))
    markers = MARKER.findall(text)
    assert len(markers) == len(set(markers)) and set(markers) == kinds_of(HISTORIES[history]).keys()
