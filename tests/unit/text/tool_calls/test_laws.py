"""Laws of all formats: what a family's template renders is read back, and pieces of text do not matter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.text.chat import render_chat
from rayserve_moe.text.chat_output import ChatOutput
from rayserve_moe.text.tokenizer import Tokenizer
from rayserve_moe.text.tool_calls.registry import CALL_FORMATS, HARMONY
from tests.support.session.hypothesis_examples import examples
from tests.support.text.output_splitting import answer_of, parts_of, pieces_of, splitter_of
from tests.support.text.tool_call_templates import FAMILIES, Family

MARKERS = sorted({marker for each in CALL_FORMATS.values() for marker in each.markers})
PIECES = [
    *MARKERS, "<function=f>", "<parameter=k>", "</parameter>", "</function>", '<invoke name="f">', "</invoke>",
    '<parameter name="k">', "<think>", "</think>", "functions.f:0", "```json", "```", "f",
    "\n", " ", ";", ",", "{", "}", "[", "]", '"', "\\", '{"name": "f", "arguments": {}}',
    '{"a": "b"}', "call:f", "{k:", ":", "<k>", "</k>", "analysis", "commentary to=functions.f", "final",
    "é", "日本",
]  # fmt: skip
NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,6}", fullmatch=True)
TEXTS = st.lists(
    st.text(st.characters(exclude_categories=("Cs",)), max_size=6) | st.sampled_from(PIECES), max_size=5
).map("".join)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS
NESTED = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3))

VALUES = {
    "string": TEXTS,
    "integer": st.integers(),
    "number": st.floats(allow_nan=False, allow_infinity=False) | st.integers(),
    "boolean": st.booleans(),
    "null": st.none(),
    "object": st.dictionaries(TEXTS, NESTED, max_size=3),
    "array": st.lists(NESTED, max_size=3),
}
PLAIN = st.from_regex(r"[A-Za-z,.é日][A-Za-z ,.\n<é日]{0,20}[A-Za-z.é日]", fullmatch=True)


@st.composite
def calls(draw: st.DrawFn) -> tuple[list[dict], list[dict]]:
    """Tools, and calls of them with values of their types."""
    tools, made = [], []
    for name in draw(st.lists(NAMES, min_size=1, max_size=3, unique=True)):
        types = draw(st.dictionaries(NAMES, st.sampled_from(sorted(VALUES)), max_size=4))
        properties = {key: {"type": kind} for key, kind in types.items()}
        parameters = {"type": "object", "properties": properties}
        tools.append({"type": "function", "function": {"name": name, "parameters": parameters}})
        given_values = {key: draw(VALUES[kind]) for key, kind in types.items()}
        made.append({"name": name, "arguments": given_values})
    return tools, made


def _held(made: tuple[list[dict], list[dict]], family: Family) -> tuple[list[dict], list[dict]]:
    """Return the calls without the values that a family's format cannot hold."""
    tools, asked = made
    left_out = set() if family.has_typed_values else {"null", "object", "array"}
    kept = []
    for tool, call in zip(tools, asked, strict=True):
        types = {key: each["type"] for key, each in tool["function"]["parameters"]["properties"].items()}
        values = call["arguments"].items()
        held = {key: value for key, value in values if types[key] not in left_out and family.holds(value)}
        kept.append({**call, "arguments": held})
    return tools, kept


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory, directory):
    """A tokenizer for every family, with its turn as chat template."""
    found = {}
    for name, family in FAMILIES.items():
        path = Path(shutil.copytree(directory, tmp_path_factory.mktemp("families") / name))
        (path / "chat_template.jinja").write_text(family.chat_template)
        found[name] = Tokenizer(path)
    return found


def output_for(tokenizer: Tokenizer, message: dict, tools: list[dict]) -> str:
    """What the model has to write so that its turn is as the template has it."""
    user = {"role": "user", "content": "hi"}
    prompt = render_chat(tokenizer, [user], tools=tools)
    whole = render_chat(tokenizer, [user, message], tools=tools, add_generation_prompt=False)
    assert whole.startswith(prompt) and whole.endswith("</s>")
    return whole[len(prompt) : -len("</s>")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FAMILIES)
@examples(20, deadline=None)
@given(made=calls(), reasoning=st.none() | PLAIN, content=st.none() | PLAIN, size=st.integers(1, 9))
def test_what_the_template_renders_is_read_back_in_pieces_of_any_size(tokenizers, name, made, reasoning, content, size):
    family, tokenizer, (tools, asked) = FAMILIES[name], tokenizers[name], _held(made, FAMILIES[name])
    content = content if family.takes_content_with_calls else None
    reasoning = reasoning if family.reasons else None
    ids = [f"functions.{call['name']}:{position}" for position, call in enumerate(asked)]
    written = [{"type": "function", "id": i, "function": call} for i, call in zip(ids, asked, strict=True)]
    message = {"role": "assistant", "content": content, "tool_calls": written}
    text = output_for(tokenizer, {**message, **({"reasoning_content": reasoning} if reasoning else {})}, tools)
    splits = ChatOutput(tokenizer, tool_call_parser=family.parser)
    assert splits.format.calls == family.format
    for pieces in ([text], list(text), pieces_of(text, size)):
        prompt = tokenizer.encode("assistant: ")
        splitter = splits.splitter(
            np.asarray(prompt, np.int32), tools=tools, has_calls=True, has_reasoning=family.reasons
        )
        assert splitter is not None
        answer = answer_of(parts_of(splitter, pieces))
        assert answer.reasoning == (reasoning or "") and answer.content == (content or "")
        assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == [
            (call["name"], call["arguments"]) for call in asked
        ]
        if name == "kimi_k2":
            assert [call.call_id for call in answer.calls] == ids
        for_none = {"tools": [], "has_calls": False, "has_reasoning": family.reasons}
        silent = splits.splitter(np.asarray(prompt, np.int32), **for_none)
        assert silent is None or not answer_of(parts_of(silent, pieces)).calls


@pytest.mark.parametrize("calls", [*(name for name in CALL_FORMATS if name != "response_template"), None])
@examples(50, deadline=None)
@given(
    text=st.lists(st.sampled_from(PIECES), max_size=24).map("".join),
    size=st.integers(1, 30),
    begun=st.booleans(),
    recurs=st.booleans(),
)
def test_no_text_breaks_a_parser_or_depends_on_its_pieces(calls, text, size, begun, recurs):
    thinking = splitter_of.__kwdefaults__["thinking"]._replace(is_begun=begun, may_recur=recurs)
    whole, *others = (
        parts_of(splitter_of(calls, thinking=thinking), pieces)
        for pieces in ([text], list(text), pieces_of(text, size))
    )
    assert all(other == whole for other in others)


@pytest.mark.parametrize("calls", [name for name in CALL_FORMATS if name not in (HARMONY, "response_template")])
@examples(25, deadline=None)
@given(text=st.lists(st.sampled_from([*PIECES, " words "]), max_size=12).map("".join))
def test_text_without_calls_stays_as_it_is(calls, text):
    answer = answer_of(parts_of(splitter_of(calls, thinking=None), [text]))
    if not answer.calls:
        assert answer.content == text


@pytest.mark.parametrize("limit", [1, 2])
def test_no_more_calls_than_asked_for(limit):
    text = 'a <tool_call>{"name": "f"}</tool_call>\n' * 3 + "end"
    answer = answer_of(parts_of(splitter_of("hermes", max_calls=limit), list(text)))
    assert len(answer.calls) == limit
    assert answer.content.split() == ["a", "a", "a", "end"]
