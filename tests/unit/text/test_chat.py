"""Chat prompts follow the checkpoint's template; what cannot be rendered is one clear error."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.text.chat import ChatTemplateError, encode_chat, render_chat
from rayserve_moe.text.tokenizer import Tokenizer

USER = {"role": "user", "content": "hi"}
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)


@pytest.fixture
def templated(tmp_path, directory):
    """Makes a tokenizer with a template of its own, or with none."""

    def make(template: str | None) -> Tokenizer:
        path = Path(shutil.copytree(directory, tmp_path / "model"))
        (path / "chat_template.jinja").unlink()
        if template is not None:
            (path / "chat_template.jinja").write_text(template)
        return Tokenizer(path)

    return make


@given(turns=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=4))
def test_each_prompt_with_its_answer_is_a_prefix_of_the_next(tokenizer, turns):
    messages: list[dict[str, str]] = [{"role": "system", "content": "be brief"}]
    sofar: list[int] = []
    for question, answer in turns:
        messages.append({"role": "user", "content": question})
        prompt = encode_chat(tokenizer, messages)
        assert prompt[: len(sofar)] == sofar
        messages.append({"role": "assistant", "content": answer})
        # The answer as the model gave it: its text, then the end of the sequence.
        sofar = [*prompt, *tokenizer.encode(answer), 1]


def test_without_generation_prompt_the_conversation_ends_with_its_last_message(tokenizer):
    assert render_chat(tokenizer, [USER], add_generation_prompt=False) == "user: hi</s>\n"
    assert render_chat(tokenizer, [USER]) == "user: hi</s>\nassistant: "


def test_ids_are_those_of_the_rendered_text(tokenizer):
    assert tokenizer.decode(encode_chat(tokenizer, [USER]), skip_special_tokens=False) == render_chat(tokenizer, [USER])


def test_text_parts_are_joined_by_newlines(tokenizer):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    joined = render_chat(tokenizer, [{"role": "user", "content": parts}])
    assert joined == render_chat(tokenizer, [{"role": "user", "content": "one\ntwo"}])


def test_tools_and_template_kwargs_reach_the_template(templated):
    tokenizer = templated("{{ tools[0].function.name }} {{ enable_thinking }} {{ messages[0].content }}")
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
    rendered = render_chat(tokenizer, [USER], tools=tools, template_kwargs={"enable_thinking": False})
    assert rendered == "look_up False hi"


def test_other_fields_of_a_message_reach_the_template(templated):
    tokenizer = templated("{{ messages[0].tool_calls[0].id }}")
    assert render_chat(tokenizer, [{"role": "assistant", "content": None, "tool_calls": [{"id": "c1"}]}]) == "c1"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('system first') }}", "system first"),
        ("{{ messages[0].nothing.more }}", "refused the messages"),
        ("{{ 1 / 0 }}", "refused the messages"),
        ("{{ 'a' + 1 }}", "refused the messages"),
        ("{% for %}", "refused the messages"),
        ("{{ messages.append(1) }}", "refused the messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refused the messages"),
    ],
)
def test_a_template_that_refuses_or_breaks_out_is_an_error(templated, template, words):
    with pytest.raises(ChatTemplateError, match=words):
        render_chat(templated(template), [USER])


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one message"),
        ([{"content": "hi"}], r"messages\[0\]: role is missing"),
        ([USER, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], r"messages\[1\].*type text"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\].*type text"),
        ([{"role": "user", "content": ["hi"]}], r"messages\[0\].*type text"),
        ([{"role": "wizard", "content": "hi"}], "unknown role wizard"),
    ],
)
def test_messages_that_do_not_fit_are_refused(tokenizer, messages, words):
    with pytest.raises(ChatTemplateError, match=words):
        render_chat(tokenizer, messages)


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "return_tensors", "conversation", "tools"])
def test_a_request_cannot_set_what_is_the_servers(tokenizer, name):
    with pytest.raises(ChatTemplateError, match=f"{name} cannot be set"):
        render_chat(tokenizer, [USER], template_kwargs={name: "{{ 1 }}"})
