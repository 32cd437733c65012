"""Which parsers a checkpoint gets, and what its special tokens, its prompts and its own template have to do with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import AutoTokenizer

from rayserve_moe.config.parser_names import REASONING_PARSERS, TOOL_CALL_PARSERS
from rayserve_moe.text.chat_output import ChatOutput
from rayserve_moe.text.tokenizer import Tokenizer
from rayserve_moe.text.tool_calls.registry import CALL_FORMATS, THINKING
from tests.support.session.hypothesis_examples import examples
from tests.support.text.output_splitting import answer_of, parts_of
from tests.support.text.tool_call_templates import FAMILIES

OWN = {
    "start_anchor": "assistant: ",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.arguments}"},
            },
        },
        "content": {},
    },
}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}},
}
CALL = '<tool_call>{"name": "f", "arguments": {"n": 5}}</tool_call>'


@pytest.fixture
def made(tmp_path, directory):
    """Makes a tokenizer with this chat template, response template and special tokens."""

    def make(template: str = "", response_template: dict | None = None, special: tuple[str, ...] = ()) -> Tokenizer:
        path = Path(shutil.copytree(directory, tmp_path / "model", dirs_exist_ok=True))
        backing = AutoTokenizer.from_pretrained(path)
        backing.add_tokens([AddedToken(token, special=True) for token in special])
        backing.chat_template = template or None
        if response_template is not None:
            backing.response_template = response_template
        shutil.rmtree(path)
        backing.save_pretrained(path)
        return Tokenizer(path)

    return make


def split(output: ChatOutput, prompt: str, pieces: list[str] | str, *, tools=(TOOL,), **asked):
    ids = np.asarray(output._tokenizer.encode(prompt), np.int32)
    splitter = output.splitter(ids, tools=tools, **{"has_calls": True, "has_reasoning": True, **asked})
    assert splitter is not None
    return answer_of(parts_of(splitter, pieces))


def test_every_name_of_a_setting_names_a_format():
    assert set(TOOL_CALL_PARSERS.values()) == set(CALL_FORMATS)
    assert set(REASONING_PARSERS.values()) == set(THINKING)


def test_names_of_settings_win_over_templates(made):
    tokenizer = made(FAMILIES["glm45"].chat_template)
    assert ChatOutput(tokenizer).format == ("glm", "think")
    assert ChatOutput(tokenizer, tool_call_parser="kimi_k2", reasoning_parser="deepseek-r1").format == ("kimi", "begun")
    assert ChatOutput(tokenizer, tool_call_parser="none", reasoning_parser="none").format == (None, None)
    plain = ChatOutput(made("{{ messages }}"))
    assert plain.format == (None, None)
    assert plain.splitter(np.zeros(1, np.int32), has_calls=True, has_reasoning=True) is None


@pytest.mark.parametrize("end", ["<think>", "<think>\n", "</think>\n\n", ""])
@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
def test_the_end_of_the_prompt_says_whether_reasoning_has_begun(made, end, parser):
    output = ChatOutput(made(FAMILIES["qwen3"].chat_template), reasoning_parser=parser)
    answer = split(output, f"<think></think> assistant: {end}", "so</think>Yes")
    is_begun = end.startswith("<think>") or (parser == "deepseek_r1" and not end)
    assert answer[:2] == (("so", "Yes") if is_begun else ("", "so</think>Yes"))


def test_markers_that_are_special_tokens_stay_in_the_text_where_they_are_needed(made):
    special = ("<|tool_call_begin|>", "<|tool_call_end|>", "<think>", "<|other|>")
    tokenizer = made(FAMILIES["kimi_k2"].chat_template, special=special)
    output = ChatOutput(tokenizer)

    def texts(**asked: bool) -> set[str]:
        return {tokenizer.token_text(each) for each in output.kept_ids(**asked)}

    assert texts(has_calls=True, has_reasoning=True) == set(special) - {"<|other|>"}
    assert texts(has_calls=False, has_reasoning=True) == {"<think>"}
    assert texts(has_calls=False, has_reasoning=False) == set()


def test_special_tokens_within_a_marker_stay_in_the_text(made):
    """Gemma's reasoning begins with a special token and a word; whole calls are found between special tokens."""
    special = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>", "<turn|>")
    tokenizer = made(FAMILIES["gemma4"].chat_template, special=special)
    output = ChatOutput(tokenizer)
    kept = output.kept_ids(has_calls=True, has_reasoning=True)
    assert {tokenizer.token_text(each) for each in kept} == set(special) - {"<turn|>"}
    text = "<|channel>thought\nwhy<channel|>Yes<|tool_call>call:f{n:5}<tool_call|>"
    dropped = tokenizer.special_ids - kept
    ids = [each for each in tokenizer.encode(text + "<turn|>") if each not in dropped]
    answer = split(output, "hi", list(tokenizer.decode(ids, skip_special_tokens=False)))
    assert answer[:2] == ("why", "Yes") and [call.arguments for call in answer.calls] == ['{"n": 5}']
    off = split(output, "hi <|channel>thought\n<channel|>", "Yes<channel|>")
    assert off == ("", "Yes", [])
    assert split(output, "hi <|channel>thought\n", "why<channel|>Yes")[:2] == ("why", "Yes")


@examples(30, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=60), begun=st.booleans())
def test_the_tokenizer_s_own_template_comes_first(directory, tmp_path_factory, sizes, begun):
    path = Path(shutil.copytree(directory, tmp_path_factory.mktemp("own") / "model"))
    backing = AutoTokenizer.from_pretrained(path)
    backing.response_template = OWN
    backing.save_pretrained(path)
    output = ChatOutput(Tokenizer(path))
    assert set(output.format) == {"response_template"}
    text = ("" if begun else "<think>") + "\nso\n</think>\n\nHere <b>you</b> are. " + CALL + "\n" + CALL
    pieces, at = [], 0
    for size in [*sizes, len(text)]:
        pieces.append(text[at : at + size])
        at += size
    answer = split(output, "user: hi</s>assistant: " + ("<think>\n" if begun else ""), pieces)
    assert answer[:2] == ("so", "Here <b>you</b> are.")
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == [("f", {"n": 5})] * 2


@pytest.mark.parametrize(
    "broken", ["{", '{"name": "f"}', '{"name": 5, "arguments": {}}', '{"name": "f", "arguments": 5}']
)
@pytest.mark.parametrize("is_closed", [True, False])
def test_what_the_own_template_cannot_read_is_content(made, broken, is_closed):
    output = ChatOutput(made("{{ messages }}", OWN))
    text = f"one <tool_call>{broken}" + ("</tool_call> two " + CALL if is_closed else "")
    whole, *others = (split(output, "assistant: ", pieces) for pieces in (text, [text], [text[:9], text[9:]]))
    assert whole == others[0] == others[1]
    assert whole.content == f"one{broken}" + ("two" if is_closed else "")
    assert len(whole.calls) == is_closed


def test_a_template_that_is_missing_or_wrong_stops_the_server(made):
    with pytest.raises(ValueError, match="no response_template"):
        ChatOutput(made("{{ messages }}"), tool_call_parser="hf")
    with pytest.raises(ValueError, match="response_template"):
        ChatOutput(made("{{ messages }}", {"fields": {}}))
