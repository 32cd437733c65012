"""Templates get calls and reasoning of earlier turns as they read them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rayserve_moe.text.chat import ChatTemplateError, render_chat
from rayserve_moe.text.chat_history import with_calls, with_reasoning
from rayserve_moe.text.tokenizer import Tokenizer

TEXT, OBJECT = '{"n":  5}', {"n": 5}
EACH = "{% for m in messages %}{% for c in m.tool_calls or [] %}"
END = "{% endfor %}{% endfor %}"
EITHER = "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}{{ 'object' }}{% endif %}"
TEMPLATES = {
    "text where it is asked for": (EITHER, TEXT),
    "an object by default": ("{{ c.function.arguments | tojson }}", '{"n": 5}'),
    "items of an object": ("{% for k, v in c['function']['arguments'] | items %}{{ k ~ v }}{% endfor %}", "n5"),
    "text where only that works": ("{{ 'a' + c['function']['arguments'] }}", "a" + TEXT),
}


def calling(arguments: object) -> list[dict]:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]


@pytest.fixture
def made(tmp_path, directory):
    def make(template: str) -> Tokenizer:
        path = Path(shutil.copytree(directory, tmp_path / f"model-{len(list(tmp_path.iterdir()))}"))
        (path / "chat_template.jinja").write_text(template)
        return Tokenizer(path)

    return make


@pytest.mark.parametrize("name", TEMPLATES)
def test_arguments_have_the_form_that_the_template_reads(made, name):
    template, rendered = TEMPLATES[name]
    assert render_chat(made(EACH + template + END), calling(TEXT)) == rendered


def test_arguments_given_as_an_object_are_text_where_only_that_works(made):
    assert render_chat(made(EACH + TEMPLATES["text where only that works"][0] + END), calling(OBJECT)) == 'a{"n": 5}'


@pytest.mark.parametrize("calls", ["x", 5, ["x"], [{"function": "x"}], [{"function": {}}], [{}]])
def test_calls_that_are_none_stay_as_they_are(calls):
    message = {"role": "assistant", "tool_calls": calls}
    written = with_calls(message, as_objects=True)
    assert written == message or written["tool_calls"] == [{"function": {"arguments": {}}}]


def test_no_json_stays_text_and_no_arguments_are_an_empty_object(made):
    template = made(EACH + "{{ c.function.arguments | tojson }}" + END)
    for given, rendered in (("{oops", '"{oops"'), ("[5]", '"[5]"'), ("", "{}"), (" ", "{}")):
        assert render_chat(template, calling(given)) == rendered


def test_a_template_that_takes_neither_form_refuses(made):
    with pytest.raises(ChatTemplateError, match="no calls"):
        render_chat(made(EACH + "{{ raise_exception('no calls') }}" + END), calling(TEXT))


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_there_under_every_name(name):
    written = with_reasoning({"role": "assistant", name: "why"}, template="{{ m.reasoning_content }}{{ m.thinking }}")
    assert written == {"role": "assistant", "reasoning": "why", "reasoning_content": "why"}
    assert with_reasoning({name: "why"}, template='"thinking" in m')["thinking"] == "why"
    beside = {name: "why", "content": "x", "tool_calls": [{}]}
    assert "thinking" not in with_reasoning(beside, template='"thinking" in m')


ROLES = "{% for m in messages %}{{ '[' ~ m.role ~ ']' ~ m.content }}{% endfor %}"


def test_a_developer_is_the_system_where_a_template_knows_none(made):
    messages = [{"role": "developer", "content": "Be exact."}, {"role": "user", "content": "u"}]
    assert render_chat(made(ROLES), messages) == "[system]Be exact.[user]u"
    known = "{% if messages[0].role == 'developer' %}d{% endif %}" + ROLES
    assert render_chat(made(known), messages) == "d[developer]Be exact.[user]u"


NULL_CONTENT = {
    "adds it": ("{{ '[' + m.content + ']' }}", "[]"),
    "strips it": ("{{ m['content'].strip() }}", ""),
    "measures it": ("{{ m.content | length }}", "0"),
    "asks whether it is none": ("{% if m['content'] is none %}none{% else %}text{% endif %}", "none"),
    "asks whether it is not": ("{% if m.content is not none %}text{% else %}none{% endif %}", "none"),
    "asks after a condition": ("{% if m.role == 'assistant' and m['content'] is none %}none{% endif %}", "none"),
    "asks whether it is there": ("{% if m.content %}text{% else %}none{% endif %}", "none"),
}


@pytest.mark.parametrize("message", [{"content": None}, {}], ids=["null", "left out"])
@pytest.mark.parametrize("reads", NULL_CONTENT)
def test_calls_without_content_are_rendered_however_content_is_read(made, reads, message):
    """DeepSeek-V3's first template writes calls only where content is none; others add or strip it."""
    written, rendered = NULL_CONTENT[reads]
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    conversation = [{"role": "assistant", "tool_calls": [call], **message}]
    template = (
        "{% for m in messages %}" + written + "{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}{% endfor %}"
    )
    assert render_chat(made(template), conversation) == rendered + "f"


@pytest.mark.parametrize("given", [{"arguments": ""}, {"arguments": None}, {}], ids=["empty", "null", "left out"])
@pytest.mark.parametrize("reads", ["text", "objects"])
def test_calls_without_arguments_have_an_empty_object(made, reads, given):
    written = {"text": EITHER, "objects": "{{ c.function.arguments | tojson }}"}[reads]
    call = {"id": "x", "type": "function", "function": {"name": "f", **given}}
    assert render_chat(made(EACH + written + END), [{"role": "assistant", "tool_calls": [call]}]) == "{}"


def test_the_message_that_a_template_refuses_is_named(made):
    template = made(
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
    )
    user, tool = {"role": "user", "content": "u"}, {"role": "tool", "content": "t"}
    with pytest.raises(ChatTemplateError, match=r"^messages\[1\]: .*refused the messages: no tools"):
        render_chat(template, [user, tool, user])
    whole = made("{% if messages | length == 2 and add_generation_prompt %}{{ raise_exception('two') }}{% endif %}")
    with pytest.raises(ChatTemplateError, match=r"^the chat template refused the messages: two"):
        render_chat(whole, [user, user])


def test_no_message_is_blamed_that_is_refused_only_without_the_others(made):
    """A template may want a user's message before anything else is said."""
    no_user = "{% if messages | selectattr('role', 'eq', 'user') | list | length == 0 %}"
    needs_user = no_user + "{{ raise_exception('nobody asks') }}{% endif %}"
    no_tools = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
    )
    messages = [{"role": role, "content": "x"} for role in ("system", "user", "tool")]
    with pytest.raises(ChatTemplateError, match=r"^messages\[2\]: .*no tools"):
        render_chat(made(needs_user + no_tools), messages)
