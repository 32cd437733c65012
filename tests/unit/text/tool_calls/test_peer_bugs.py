"""What parsers of vLLM and SGLang got wrong, by the number of the report; `split` tries pieces of many sizes."""

from __future__ import annotations

import json

import pytest

from rayserve_moe.text.tool_calls.splitter import Thinking
from rayserve_moe.text.tool_calls.tape import ToolCall
from tests.support.text.output_splitting import parts_of, split, splitter_of

BEGUN = Thinking(is_begun=True)
BAR, SPACE = "\N{FULLWIDTH VERTICAL LINE}", "\N{LOWER ONE EIGHTH BLOCK}"
TOOLS = {"f": {"k": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}}}


def deepseek(text: str) -> str:
    """Put DeepSeek's tokens in the place of `[calls begin]` and the like."""
    for words in ("calls begin", "calls end", "call begin", "call end", "sep"):
        text = text.replace(f"[{words}]", f"<{BAR}tool{SPACE}{words.replace(' ', SPACE)}{BAR}>")
    return text


def kimi(call_id: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def minimax_m3(text: str) -> str:
    """Put the namespace token in the place of a full stop."""
    return text.replace(".", "]<]minimax[>[")


def hy3(text: str) -> str:
    """Give every tag its suffix."""
    return text.replace(">", ":opensource>")


ONE_CALL = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"n": 5}}\n</tool_call>',
    "qwen_coder": "<tool_call>\n<function=f>\n<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>",
    "mistral": '[TOOL_CALLS]f[ARGS]{"n": 5}',
    "deepseek": deepseek('[call begin]f[sep]{"n": 5}[call end]'),
    "glm": "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>5</arg_value>\n</tool_call>",
    "kimi": kimi("functions.f:0", '{"n": 5}'),
    "llama": '{"name": "f", "parameters": {"n": 5}}',
    "harmony": '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 5}<|call|>',
    "minimax": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="n">5</parameter></invoke></minimax:tool_call>',
    "minimax_m3": minimax_m3('.<tool_call>\n.<invoke name="f">.<n>5.</n>.</invoke>\n.</tool_call>'),
    "mimo": "<tool_call><function=f><parameter=n>5</parameter></function></tool_call>",
    "gemma": "<|tool_call>call:f{n:5}<tool_call|>",
    "hunyuan": hy3("<tool_calls><tool_call>f<tool_sep>\n<arg_key>n</arg_key>\n<arg_value>5</arg_value>\n</tool_call>"),
}
NO_ARGUMENTS = {
    "hermes": '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
    "qwen_coder": "<tool_call><function=f></function></tool_call>",
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {}}]',
    "deepseek": deepseek("[call begin]function[sep]f\n```json\n{}\n```[call end]"),
    "glm": "<tool_call>f</tool_call>",
    "kimi": kimi("f:7", "{}"),
    "llama": '{"name": "f", "parameters": {}}',
    "harmony": "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
    "minimax": '<minimax:tool_call><invoke name="f"></invoke></minimax:tool_call>',
    "minimax_m3": minimax_m3('.<tool_call>.<invoke name="f">.</invoke>.</tool_call>'),
    "mimo": "<function=f></function>",
    "gemma": "<|tool_call>:f{ }<tool_call|>",
    "hunyuan": hy3("<tool_call>f<tool_sep></tool_call></tool_calls>"),
}


@pytest.mark.parametrize("calls", ONE_CALL)
def test_several_calls_in_one_piece_or_in_characters_keep_their_arguments(calls):
    """sglang 35564, 37634; vllm 48020, 48294, 48636, 32152: a whole call, or its last brace and more, in one delta."""
    text = ONE_CALL[calls] + NO_ARGUMENTS[calls] + ONE_CALL[calls]
    answer = split(calls, text, tools=TOOLS)
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == [
        ("f", {"n": 5}),
        ("f", {}),
        ("f", {"n": 5}),
    ]
    assert (answer.reasoning, answer.content) == ("", "")


@pytest.mark.parametrize("calls", ONE_CALL)
def test_a_call_that_ends_too_early_is_content(calls):
    """vllm 46464, 51977; harmony 38, 60; sglang 35565: broken output must be content, not an error and not lost."""
    text = ONE_CALL[calls] if calls in ("llama", "harmony") else "Here. " + ONE_CALL[calls]
    values_end, num_calls = text.index("5") + 1, 0
    for end in range(1, len(text)):
        answer = split(calls, text[:end], tools=TOOLS)
        assert answer.content == text[:end] or (answer.calls and end > values_end)
        assert len(answer.calls) >= num_calls, "more of a call is no less of one"
        num_calls = len(answer.calls)


@pytest.mark.parametrize(
    "arguments", ["{'n': 5}", '{"n": 5', '{"n": NaN}', '{"n": 5}}', "[5]", "5", '{"n" 5}', '{"n": 5 6}', "{" * 5000]
)
@pytest.mark.parametrize("calls", ["hermes", "mistral", "deepseek", "kimi", "harmony"])
def test_arguments_that_are_no_json_object_make_content(calls, arguments):
    text = ONE_CALL[calls].replace('{"n": 5}', arguments)
    answer = split(calls, text, tools=TOOLS)
    if calls == "mistral" and arguments == '{"n": 5}}':  # what follows a call is content
        assert answer.content == "}" and len(answer.calls) == 1
    else:
        assert answer.calls == [] and answer.content == text


def test_parameters_of_one_call_are_one_object_and_one_call():
    """sglang 11888, 23071: MiniMax's and GLM's arguments, in pieces, were a second call or two objects in a row."""
    given = {"k": "head -100", "n": 5, "o": {"a": 1}}
    minimax = "".join(
        f'<parameter name="{k}">{v if k == "k" else json.dumps(v)}</parameter>\n' for k, v in given.items()
    )
    glm = "".join(
        f"<arg_key>{k}</arg_key>\n<arg_value>{v if k == 'k' else json.dumps(v)}</arg_value>\n" for k, v in given.items()
    )
    for calls, text in (
        ("minimax", f'<minimax:tool_call>\n<invoke name="f">\n{minimax}</invoke>\n</minimax:tool_call>'),
        ("glm", f"<tool_call>f\n{glm}</tool_call>"),
    ):
        (call,) = split(calls, text, tools=TOOLS).calls
        assert json.loads(call.arguments) == given


def test_a_call_inside_reasoning_ends_it():
    """vllm 39056, 42400, 46040: models call without closing their reasoning, or close it afterwards."""
    for end in ("", "\n</think>\n"):
        answer = split("qwen_coder", "so I call\n" + ONE_CALL["qwen_coder"] + end, thinking=BEGUN, tools=TOOLS)
        assert answer == ("so I call", "", [ToolCall("f", '{"n": 5}')])


def test_markers_in_reasoning_and_prose_are_words():
    """A literal marker, in reasoning or content, holds nothing up and calls nothing."""
    answer = split("hermes", "<think>\nwrite <tool_call> first\n</think>\n\nThe <tool_call> tag. </tool_call>")
    assert answer == ("write <tool_call> first", "The <tool_call> tag. </tool_call>", [])
    splitter = splitter_of("hermes", thinking=None)
    assert [part.text for part in splitter.push("The <tool_call> tag")] == ["The", " <tool_call>", " tag"]


@pytest.mark.parametrize("begun", [True, False])
def test_reasoning_without_end_is_reasoning_and_without_beginning_content(begun):
    assert split("hermes", "I think", thinking=Thinking(is_begun=begun)) == (
        ("I think", "", []) if begun else ("", "I think", [])
    )
    assert split("hermes", "<think>I think", thinking=Thinking(is_begun=begun)) == ("I think", "", [])
    assert split("hermes", "<think>\n\n</think>\n\nYes", thinking=Thinking(is_begun=begun)) == ("", "Yes", [])


@pytest.mark.parametrize("calls", ["hermes", "mistral", "deepseek", "kimi", "llama", "harmony"])
def test_arguments_stay_as_they_were_written(calls):
    """vllm 9693, 10395, 10398, 21360: spaces, escapes, nesting and markers within strings of partial JSON."""
    arguments = '{"k":"a \\"b\\" </tool_call> <|call|> {[", "o" : {"é":[1.50, 1e3,{"x":"\\u00e9"}]}}'
    (call,) = split(calls, ONE_CALL[calls].replace('{"n": 5}', arguments), tools=TOOLS).calls
    assert call.arguments == arguments


def test_control_characters_in_strings_are_escaped():
    (call,) = split("hermes", '<tool_call>{"name": "f", "arguments": {"k": "a\nb\tc"}}</tool_call>').calls
    assert json.loads(call.arguments) == {"k": "a\nb\tc"}


def test_arguments_in_a_json_string_are_taken_out_of_it():
    (call,) = split("hermes", '<tool_call>{"name": "f", "arguments": "{\\"n\\": 5}"}</tool_call>').calls
    assert call.arguments == '{"n": 5}'


@pytest.mark.parametrize(
    "value", ["a </parameter> b", "</parameter>", "<parameter=k>", "</function>", "\n\nx\n", " x "]
)
def test_a_value_may_hold_tags(value):
    """vllm 30554, 39649, 44060: `</parameter>` inside a value, and newlines beyond the one on each side."""
    text = f"<tool_call>\n<function=f>\n<parameter=k>\n{value}\n</parameter>\n</function>\n</tool_call>"
    (call,) = split("qwen_coder", text, tools=TOOLS).calls
    assert json.loads(call.arguments) == {"k": value}


@pytest.mark.parametrize(
    "text", ["<tool_call>f</tool_call>", "<tool_call>f\n</tool_call>", "<tool_call>\nf\n</tool_call>"]
)
def test_glm_calls_without_arguments(text):
    """vllm 44326."""
    assert split("glm", text).calls == [ToolCall("f", "{}")]


def test_glm_values_have_the_types_of_the_schema():
    """sglang 35564: 123 and "123" differ, streamed or not."""
    (call,) = split("glm", ONE_CALL["glm"], tools={"f": {"n": {"type": "string"}}}).calls
    assert call.arguments == '{"n": "5"}'
    (call,) = split("glm", ONE_CALL["glm"], tools={}).calls
    assert call.arguments == '{"n": 5}'


def test_kimi_sections_and_counters_of_every_kind():
    """vllm 24478, 37184, 38441: markers never leak, ids may lack the prefix or stand on a line of their own."""
    text = (
        "<think>why</think>Wait<|tool_call_section_begin|> spurious "
        + kimi("functions.f:0", "{}") + kimi("f:1", "{}") + kimi("f", "{}") + kimi("\nfunctions.f:3\n", "{}")
        + "<|tool_calls_section_end|>"
    )  # fmt: skip
    answer = split("kimi", text)
    assert answer.reasoning == "why" and answer.content == "Waitspurious"
    assert [call.call_id for call in answer.calls] == ["functions.f:0", "f:1", "f", "functions.f:3"]
    assert {call.name for call in answer.calls} == {"f"}
    assert split("kimi", kimi("0", "{}")) == ("", kimi("0", "{}"), [])


def test_kimi_calls_may_be_long():
    """vllm 34442: a limit of 8 KB cut calls that write files."""
    arguments = json.dumps({"k": "line\n" * 20_000})
    splitter = splitter_of("kimi")
    (call,) = parts_of(splitter, [kimi("functions.f:0", arguments)[at : at + 4] for at in range(0, 130_000, 4)])
    assert call == ToolCall("f", arguments, "functions.f:0")


@pytest.mark.parametrize(
    "text",
    [
        '[TOOL_CALLS] [{"name": "f", "arguments": {"k": "]}[TOOL_CALLS]"}, "id": "abcdefghi"}]',
        '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"k": "]}[TOOL_CALLS]"}',
        '[TOOL_CALLS]f{"k": "]}[TOOL_CALLS]"}',
    ],
)
def test_mistral_forms(text):
    """vllm 13622, 20028, 30651: every tokenizer version's form, brackets in strings, and braces before the call."""
    answer = split("mistral", "{so} " + text)
    assert answer.content == "{so}"
    (call,) = answer.calls
    assert call[:2] == ("f", '{"k": "]}[TOOL_CALLS]"}') and call.call_id in (None, "abcdefghi")


def test_llama_answers_in_json_are_no_calls():
    for text in ('{"answer": 5}', '{"name": "f"}', '[{"name": "f", "parameters": {}}]', "{", "{} {"):
        assert split("llama", text) == ("", text, [])
    text = '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "arguments": {"n": 1}}'
    assert [call.name for call in split("llama", text).calls] == ["f", "g"]


def test_harmony_channels():
    start = "<|start|>assistant"
    text = (
        "<|channel|>analysis<|message|>first<|end|>" + start + "<|channel|>commentary<|message|>I will look.<|end|>"
        + start + "<|channel|>analysis<|message|>second<|end|>" + ONE_CALL["harmony"]
    )  # fmt: skip
    assert split("harmony", text) == ("first\nsecond", "I will look.", [ToolCall("f", '{"n": 5}')])
    assert split("harmony", text, thinking=None).content == "first\nI will look.\nsecond"
    assert split("harmony", "<|channel|>final<|message|>Hello<|return|>") == ("", "Hello", [])


@pytest.mark.parametrize(
    "text",
    [
        "Hello",
        "   ",
        " \n Hello ",
        "<|channel|>",
        "<|channel|>odd<|message|>x<|end|>",
        "<|channel|>final<|end|>",
        "<|start|><|start|>",
        "<|message|>x",
    ],
)
def test_harmony_without_sense_is_content(text):
    """vllm 46464, 51977; harmony 38, 60."""
    assert split("harmony", text) == ("", text, [])


def test_space_between_harmony_messages_is_no_content():
    text = "\n<|channel|>final<|message|>Hello<|end|>\n <|start|>odd"
    assert split("harmony", text) == ("", "Hello<|start|>odd", [])


def test_content_goes_around_calls():
    """vllm 38353; sglang 40739: text before and after a call stays, the whitespace between is left out."""
    for calls in ("hermes", "qwen_coder", "glm", "minimax"):
        answer = split(calls, f"before \n{ONE_CALL[calls]}\n{NO_ARGUMENTS[calls]}\nafter ", tools=TOOLS)
        assert answer.content == "before\nafter" and len(answer.calls) == 2


def test_halves_of_surrogate_pairs_reach_no_answer():
    text = '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'
    assert split("hermes", text) == ("", text, [])
    (call,) = split("hermes", '<tool_call>{"name": "f", "arguments": {"k": "\\ud800"}}</tool_call>').calls
    assert call.arguments.isascii()
