"""Formats with nested values of their own, Gemma 4's and MiniMax-M3's, and reasoning that begins anew."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rayserve_moe.text.tool_calls.registry import THINKING, output_format
from rayserve_moe.text.tool_calls.tape import ToolCall
from tests.support.text.output_splitting import answer_of, parts_of, pieces_of, split, splitter_of

GEMMA = THINKING["gemma"]
M3 = THINKING["minimax_m3"]
NAMESPACE = "]<]minimax[>["
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "item": {"type": "object", "properties": {"item": {"type": "boolean"}}},
    },
}
TOOLS = {"f": {"who": PERSON, "list": {"type": "array", "items": PERSON}, "text": {"type": "string"}, "n": {}}}


def gemma(arguments: str) -> str:
    """Return a call with `"` in the place of the quote token."""
    return "<|tool_call>call:f{" + arguments.replace('"', '<|"|>') + "}<tool_call|>"


def m3(arguments: str) -> str:
    """Return a call with the namespace before every tag."""
    tags = arguments.replace("<", f"{NAMESPACE}<")
    return f'{NAMESPACE}<tool_call>\n{NAMESPACE}<invoke name="f">{tags}{NAMESPACE}</invoke>\n{NAMESPACE}</tool_call>'


def arguments_of(calls: str, text: str) -> object:
    """Return the arguments of the only call, which is all of the text."""
    answer = split(calls, text, tools=TOOLS)
    assert answer.content == "" and len(answer.calls) == 1
    return json.loads(answer.calls[0].arguments)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("", {}),
        ('who:{age:5,name:"A, {b}: [c] \\"},n:1.5', {"who": {"age": 5, "name": "A, {b}: [c] \\"}, "n": 1.5}),
        ('list:[{tags:["a","]"],age:-1},{}]', {"list": [{"tags": ["a", "]"], "age": -1}, {}]}),
        ('"n":{"k":[[],[1,[true]]]}', {"n": {"k": [[], [1, [True]]]}}),
        (' n : 5 , text : "x" \n', {"n": 5, "text": "x"}),
        ("text:5,who:{name:7,age:8}", {"text": "5", "who": {"name": "7", "age": 8}}),
        ("n:None,text:None", {"n": None, "text": "None"}),
        ('n:"5",text:""', {"n": "5", "text": ""}),
        ("n:Bern,who:{age:old}", {"n": "Bern", "who": {"age": "old"}}),
        ("n:1e-05,n:2", {"n": 2}),
        ('n:"<tool_call|>\n"', {"n": "<tool_call|>\n"}),
    ],
)
def test_gemma_arguments(written: str, expected: object) -> None:
    assert arguments_of("gemma", gemma(written)) == expected


@pytest.mark.parametrize(
    "written",
    ["n", "n:", "n:,", ":5", "n:5,", ",n:5", "n:5}", 'n:a"b"', "n:5{}", "n:[5", "n:[1,]", "n:{k}", "n:5<tool_call|>"],
)
def test_broken_gemma_arguments_are_content(written: str) -> None:
    text = gemma(written)
    answer = split("gemma", text, tools=TOOLS)
    assert answer.calls == [] and answer.content == text


@pytest.mark.parametrize("name", ["", "f g", "f<tool_call|>"])
def test_gemma_calls_without_a_name_are_content(name: str) -> None:
    text = f"<|tool_call>call:{name}{{}}<tool_call|>"
    assert split("gemma", text) == ("", text, [])


@pytest.mark.parametrize(("calls", "opening"), [("gemma", "n:" + "[" * 500), ("minimax_m3", "<a>" * 500)])
def test_deep_nesting_is_content(calls: str, opening: str) -> None:
    text = gemma(opening) if calls == "gemma" else m3(opening)
    answer = answer_of(parts_of(splitter_of(calls), pieces_of(text, 16)))
    assert answer.calls == [] and answer.content == text


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("", {}),
        ("<who><name>5</name><age>5</age></who>", {"who": {"name": "5", "age": 5}}),
        ("<list><item><tags><item>a</item></tags></item></list>", {"list": [{"tags": ["a"]}]}),
        ("<list></list><who></who><text></text>", {"list": [], "who": {}, "text": ""}),
        ("<who><item><item>true</item></item></who>", {"who": {"item": {"item": True}}}),
        ("<n><item>1</item><item>b</item></n>", {"n": [1, "b"]}),
        ("<n>\n<a>1</a>\n<a>2</a>\n</n>", {"n": {"a": [1, 2]}}),
        ("<text>\n a \n</text>", {"text": "\n a \n"}),
    ],
)
def test_minimax_m3_arguments(written: str, expected: object) -> None:
    assert arguments_of("minimax_m3", m3(written)) == expected


@pytest.mark.parametrize("written", ["x", "<n>1</m>", "<n>1<a>2</a></n>", "<n><a>2</a>1</n>", "<n>1", "<>1</>", "</n>"])
def test_broken_minimax_m3_arguments_are_content(written: str) -> None:
    text = m3(written)
    answer = split("minimax_m3", text, tools=TOOLS)
    assert answer.calls == [] and answer.content == text


def test_gemma_reasons_before_each_part_of_an_answer() -> None:
    """Empty reasoning and a stray end stay out of the content, also after it."""
    thought = "<|channel>thought\n"
    call = ToolCall("f", '{"n": 5}')
    text = f"{thought}one\n<channel|>A {thought}two<channel|> B{gemma('n:5')}{thought}<channel|><channel|>"
    assert split("gemma", text, thinking=GEMMA) == ("onetwo", "A B", [call])
    assert split("gemma", f"{thought}so{gemma('n:5')}", thinking=GEMMA) == ("so", "", [call])
    assert split(None, f"Yes{thought}why", thinking=GEMMA) == ("why", "Yes", [])
    assert split(None, "<|channel>final\nYes", thinking=GEMMA) == ("", "<|channel>final\nYes", [])


def test_minimax_m3_may_end_reasoning_that_it_did_not_begin() -> None:
    assert split("minimax_m3", "</mm:think>Yes", thinking=M3) == ("", "Yes", [])
    assert split("minimax_m3", "<mm:think>why</mm:think>Yes", thinking=M3) == ("why", "Yes", [])


MARKED = {
    '<|tool_call>call: <|"|> <|channel> <channel|>': ("gemma", "gemma"),
    "':opensource' <tool_calls{}> <arg_key{}> <think{}>": ("hunyuan", "hunyuan"),
    f"{NAMESPACE} <tool_call> <mm:think> </mm:think>": ("minimax_m3", "minimax_m3"),
    "<tool_call> <function= <parameter= </think>": ("qwen_coder", "think"),
}


@pytest.mark.parametrize("template", MARKED)
def test_markers_of_templates_select_the_format(template: str) -> None:
    assert output_format(template) == MARKED[template]


def test_names_of_vllm_select_the_format() -> None:
    names = {"gemma4": "gemma", "hy_v3": "hunyuan", "minimax_m3": "minimax_m3", "mimo": "mimo", "step3p5": "qwen_coder"}
    found = {name: output_format("", tool_call_parser=name, reasoning_parser=name) for name in names}
    assert {name: each.calls for name, each in found.items()} == names
    assert {each.reasoning for each in found.values()} == {"gemma", "hunyuan", "minimax_m3", "think"}


def test_random_gemma_objects_are_read_back() -> None:
    """Objects written as the template writes them, several levels deep, in pieces of one size each."""
    generator = np.random.default_rng(0)
    for size in (1, 3, 7):
        value = {"n": _drawn(generator, depth=4), "list": [_drawn(generator, depth=2)]}
        text = "<|tool_call>call:f" + _written(value) + "<tool_call|>"
        (call,) = answer_of(parts_of(splitter_of("gemma"), pieces_of(text, size))).calls
        assert json.loads(call.arguments) == value


def _drawn(generator: np.random.Generator, *, depth: int) -> object:
    leaves = ["a:b", "", "{,}", 5, -2.5, True, False, None]
    kind = generator.integers(3) if depth else 2
    if kind == 0:
        return {f"k{i}": _drawn(generator, depth=depth - 1) for i in range(3)}
    if kind == 1:
        return [_drawn(generator, depth=depth - 1) for _ in range(3)]
    return leaves[generator.integers(len(leaves))]


def _written(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_written(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    return (
        f'<|"|>{value}<|"|>' if isinstance(value, str) else str(value).replace("True", "true").replace("False", "false")
    )
