"""Calls and reasoning of earlier turns in the form that each template reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rayserve_moe.text.chat import ChatTemplateError, render_chat
from rayserve_moe.text.chat_history import with_arguments, with_reasoning
from rayserve_moe.text.tokenizer import Tokenizer

USER = {"role": "user", "content": "hi"}
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
    written = with_arguments(message, as_objects=True)
    assert written == message or written["tool_calls"] == [{"function": {"arguments": {}}}]


def test_no_json_stays_text_and_no_arguments_are_an_empty_object(made):
    template = made(EACH + "{{ c.function.arguments | tojson }}" + END)
    for given, rendered in (("{oops", '"{oops"'), ("[5]", '"[5]"'), ("", "{}"), (" ", "{}")):
        assert render_chat(template, calling(given)) == rendered


def test_a_template_that_takes_neither_form_refuses(made):
    with pytest.raises(ChatTemplateError, match="no calls"):
        render_chat(made(EACH + "{{ raise_exception('no calls') }}" + END), calling(TEXT))


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_is_there_under_every_name(name):
    named = {"reasoning": "why", "reasoning_content": "why", "thinking": "why"}
    assert with_reasoning({"role": "assistant", name: "why"}) == {"role": "assistant", **named}
    assert with_reasoning({name: ["why"]}) == {name: ["why"]}


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
    """Check templates that write calls only if content is none (DeepSeek-V3's first), or that add or strip content."""
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
    """Check a template that refuses conversations without a user message."""
    no_user = "{% if messages | selectattr('role', 'eq', 'user') | list | length == 0 %}"
    needs_user = no_user + "{{ raise_exception('nobody asks') }}{% endif %}"
    no_tools = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
    )
    messages = [{"role": role, "content": "x"} for role in ("system", "user", "tool")]
    with pytest.raises(ChatTemplateError, match=r"^messages\[2\]: .*no tools"):
        render_chat(made(needs_user + no_tools), messages)


VALUES = "{{ c.function.arguments.values() | join }}"
ARGUMENTS = "{{ c.function.name ~ '(' ~ c.id ~ ')' }}" + VALUES
SHOWN = "{% for c in m.tool_calls or [] %}" + ARGUMENTS + "{% endfor %}"
FOR_EACH = "{% for m in messages %}{{ '<' ~ m.role ~ '>' }}"
RAISES = "{{ raise_exception('refused') }}"
TURNS = {
    "calls are dropped beside content": (
        "{% if m.content %}{{ m.content }}{% else %}" + SHOWN + "{% endif %}",
        "<user>hi<assistant>so<assistant>f(call00001)1g(call00002)2<tool>one<tool>two",
    ),
    "only the first call is read": (
        "{{ m.content }}{% for c in (m.tool_calls or [])[:1] %}" + ARGUMENTS + "{% endfor %}",
        "<user>hi<assistant>sof(call00001)1<tool>one<assistant>g(call00002)2<tool>two",
    ),
    "two calls are refused": (
        "{% if m.tool_calls | length > 1 %}" + RAISES + "{% endif %}{{ m.content }}" + SHOWN,
        "<user>hi<assistant>sof(call00001)1<tool>one<assistant>g(call00002)2<tool>two",
    ),
    "content and reasoning are refused beside calls": (
        "{% if m.tool_calls and m.content and m.thinking %}"
        + RAISES
        + "{% endif %}{{ m.thinking }}{{ m.content }}"
        + SHOWN,
        "<user>hi<assistant>why\n\nsof(call00001)1g(call00002)2<tool>one<tool>two",
    ),
    "ids have no more than nine characters": (
        "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}" + RAISES + "{% endif %}{% endfor %}"
        "{{ m.content }}" + SHOWN + "{{ m.tool_call_id }}",
        "<user>hi<assistant>sof(call00001)1g(call00002)2<tool>onecall00001<tool>twocall00002",
    ),
    "the id is all that names a call": (
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.id }}" + VALUES + "{% endfor %}{{ m.tool_call_id }}",
        "<user>hi<assistant>sofunctions.f:01functions.g:12<tool>onefunctions.f:0<tool>twofunctions.g:1",
    ),
    "results need a name": (
        "{% if m.role == 'tool' and not m.name %}" + RAISES + "{% endif %}{{ m.content }}{{ m.name }}" + SHOWN,
        "<user>hi<assistant>sof(call00001)1g(call00002)2<tool>onef<tool>twog",
    ),
}


def both_called(reads: str) -> list[dict]:
    """Return a turn with two calls; their results come in the other order."""
    calls = [
        {"id": f"call0000{n}", "type": "function", "function": {"name": name, "arguments": {"n": n}}}
        for name, n in (("f", 1), ("g", 2))
    ]
    results = [
        {"role": "tool", "tool_call_id": f"call0000{n}", "content": text} for n, text in ((2, "two"), (1, "one"))
    ]
    thoughts = {"reasoning_content": "why"} if "thinking" in reads else {}
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "so", "tool_calls": calls} | thoughts,
        *results,
    ]


@pytest.mark.parametrize("name", TURNS)
def test_a_turn_has_the_form_in_which_its_template_drops_and_refuses_nothing(made, name):
    reads, rendered = TURNS[name]
    assert render_chat(made(FOR_EACH + reads + "{% endfor %}"), both_called(reads)) == rendered


@pytest.mark.parametrize("given", ["call_9f8e7d6c5b4a", "1", "", None])
def test_ids_become_nine_letters_and_digits_where_only_those_are_accepted(made, given):
    template = made(FOR_EACH + TURNS["ids have no more than nine characters"][0] + "{% endfor %}")
    call = {"id": given, "type": "function", "function": {"name": "f", "arguments": {"n": 1}}}
    result = {"role": "tool", "tool_call_id": given, "content": "one"}
    rendered = render_chat(template, [{"role": "assistant", "content": "so", "tool_calls": [call]}, result])
    wanted = {"call_9f8e7d6c5b4a": "8e7d6c5b4a"[-9:], "1": "000000001"}.get(given or "", "000000000")
    assert rendered == f"<assistant>sof({wanted})1<tool>one{wanted}"


def test_ids_that_name_their_call_stay(made):
    template = made(FOR_EACH + TURNS["the id is all that names a call"][0] + "{% endfor %}")
    call = {"id": "functions.f:7", "type": "function", "function": {"name": "f", "arguments": {"n": 1}}}
    assert render_chat(template, [{"role": "assistant", "tool_calls": [call]}]) == "<assistant>functions.f:71"


SYSTEMS = {
    "later ones are dropped": ("{% if m.role != 'system' or loop.first %}{{ m.content }}{% endif %}", "be\n\nstay"),
    "later ones are refused": (
        "{% if m.role == 'system' and not loop.first %}" + RAISES + "{% endif %}{{ m.content }}",
        "be\n\nstay",
    ),
}


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("name", SYSTEMS)
def test_all_that_the_system_says_is_in_front_where_only_the_first_message_is_taken(made, name, role):
    reads, rendered = SYSTEMS[name]
    template = made(FOR_EACH + reads + "{% endfor %}")
    first, later = {"role": "system", "content": "be"}, {"role": role, "content": "stay"}
    user = {"role": "user", "content": "hi"}
    assert render_chat(template, [first, user, later]) == f"<system>{rendered}<user>hi"
    assert render_chat(template, [user, later]) == "<system>stay<user>hi"
    assert render_chat(made(ROLES), [first, user, {**later, "role": "system"}]) == "[system]be[user]hi[system]stay"


def test_a_system_message_stays_in_the_last_question_when_others_follow_it(made):
    template = made(
        "{% set s = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
        "{% for m in messages if m.role != 'system' %}"
        "{{ (s if loop.last and m.role == 'user') ~ m.content }};{% endfor %}"
    )
    system, user, answer = ({"role": role, "content": role} for role in ("system", "user", "assistant"))
    assert render_chat(template, [system, user]) == "system\n\nuser;"
    assert render_chat(template, [system, user, answer]) == "system\n\nuser;assistant;"


def test_parts_are_joined_as_the_template_joins_them_and_those_of_results_by_newlines(made):
    template = made(
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %};{% endfor %}"
    )
    parts = [{"type": "text", "text": text} for text in "ab"]
    assert render_chat(template, [{"role": role, "content": parts} for role in ("user", "tool")]) == "ab;a\nb;"


@pytest.mark.parametrize("role", ["user", "tool", "assistant"])
def test_missing_content_is_empty_text_without_calls(made, role):
    template = made("{% for m in messages %}{{ m.content is string }}{% endfor %}")
    for message in ({"role": role, "content": None}, {"role": role}, {"role": role, "content": ""}):
        assert render_chat(template, [message]) == "True"


def test_a_call_that_needs_missing_content_keeps_it_beside_a_result_without_content(made):
    """Check a template as DeepSeek-V3's: it writes calls only if content is none, and adds the content of results."""
    template = made(
        "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}{{ m.tool_calls[0].function.name }}"
        "{% elif m.role == 'tool' %}{{ '=' + m.content }}{% endif %}{% endfor %}"
    )
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for content in (None, ""):
        spoken = {"role": "assistant", "content": content, "tool_calls": [call]}
        assert render_chat(template, [spoken, {"role": "tool", "content": None}]) == "f="


def test_an_empty_list_of_calls_is_left_out(made):
    template = made(
        "{% for m in messages %}{% if 'tool_calls' in m %}calls{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert render_chat(template, [{"role": "assistant", "content": "so", "tool_calls": []}]) == "so"


def test_former_names_of_calls_and_results_are_read(made):
    template = made(EACH + "{{ c.type ~ c.function.name }}" + END + ROLES)
    called = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    rendered = render_chat(template, [called, {"role": "function", "name": "f", "content": "5"}])
    assert rendered == "functionf[assistant][tool]5"


def test_tools_without_description_and_parameters_get_empty_ones_if_the_template_refuses_them(made):
    bare = {"type": "function", "function": {"name": "f"}}
    strict = made("{{ 'd:' + tools[0].function.description }}{{ tools[0].function.parameters | tojson }}")
    assert render_chat(strict, [USER], tools=[bare]) == 'd:{"type": "object", "properties": {}}'
    assert render_chat(made("{{ tools[0] | tojson }}"), [USER], tools=[bare]) == json.dumps(bare)
    with pytest.raises(ChatTemplateError, match=r"^tools: .*refused the messages: none of these"):
        render_chat(made("{% if tools %}{{ raise_exception('none of these') }}{% endif %}"), [USER], tools=[bare])


def test_the_reason_is_that_for_messages_that_lack_nothing(made):
    template = made("{% for m in messages %}{{ 'x' + m.content }}{% endfor %}{{ raise_exception('never') }}")
    with pytest.raises(ChatTemplateError, match=r"^messages\[0\]: .*never"):
        render_chat(template, calling(TEXT))
