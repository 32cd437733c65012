"""Our parsers of answers against those of the `renderers` package, on what the families' templates render."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from rayserve_moe.checkpoints.synthetic_tokenizer import write_tokenizer
from rayserve_moe.text.chat import render_chat
from rayserve_moe.text.chat_output import ChatOutput
from rayserve_moe.text.tokenizer import Tokenizer
from rayserve_moe.text.tool_calls.registry import CALL_FORMATS
from tests.clients.conftest import client_package
from tests.support.text.output_splitting import answer_of, parts_of
from tests.support.text.tool_call_templates import FAMILIES

parsing = client_package("renderers.parsing")

NUM_CALLS = 1000
KIMI = "tool_calls_section_begin tool_calls_section_end tool_call_begin tool_call_argument_begin tool_call_end"
HARMONY = "return call start end channel message constrain"
XML = {
    "think_id": "<think>",
    "think_end_id": "</think>",
    "tool_call_id": "<tool_call>",
    "tool_call_end_id": "</tool_call>",
}
ARGUMENTS = {
    "arg_key_id": "<arg_key>",
    "arg_key_end_id": "</arg_key>",
    "arg_value_id": "<arg_value>",
    "arg_value_end_id": "</arg_value>",
}
DEEPSEEK = ("tool_calls_begin_id", "tool_call_begin_id", "tool_calls_end_id", "tool_sep_id", "tool_call_end_id")
THEIRS = {
    "qwen3": ("parse_qwen3", {key: XML[key] for key in ("tool_call_id", "tool_call_end_id")}),
    "qwen3_coder": ("parse_qwen35", XML),
    "glm45": ("parse_glm", XML | ARGUMENTS),
    "glm47": ("parse_glm", XML | ARGUMENTS),
    "minimax_m2": (
        "parse_minimax",
        {**XML, "tool_call_id": "<minimax:tool_call>", "tool_call_end_id": "</minimax:tool_call>"},
    ),
    "kimi_k2": ("parse_kimi_k2", {f"{name}_id": f"<|{name}|>" for name in KIMI.split()}),
    "gpt_oss": ("parse_gpt_oss", {f"{name}_id": f"<|{name}|>" for name in HARMONY.split()}),
    "llama3": ("parse_llama_3", {}),
    "deepseek_v3": ("parse_deepseek_v3", dict(zip(DEEPSEEK, CALL_FORMATS["deepseek"].markers, strict=True))),
}
WORDS = ("Bern", "é", "日本", "a b", 'say "x"', "{", "}", "[1]", "\\n", "<b>", "5", "true", "null", "two\nlines", "")
TYPES = {
    "string": lambda draw: draw.choice(WORDS),
    "integer": lambda draw: draw.randint(-999, 999),
    "number": lambda draw: draw.choice([0.5, -2.25, 7.125]),
    "boolean": lambda draw: draw.random() < 0.5,
    "array": lambda draw: [draw.choice(WORDS), draw.randint(0, 9), None],
    "object": lambda draw: {"k": {"deep": [draw.choice(WORDS)]}, draw.choice("xyz"): True},
}
KINDS = list(TYPES), [kind for kind in TYPES if kind != "boolean"]
"""Qwen3-Coder's template writes True, which `renderers` takes for a string."""


def tokenizer_of(name, path, markers=()):
    """The tokenizer of a family, with markers as tokens."""
    write_tokenizer(path, 270)
    backing = AutoTokenizer.from_pretrained(path)
    tokens = dict.fromkeys(["<think>", "</think>", *markers])
    backing.add_tokens([AddedToken(token, special=False, normalized=False) for token in tokens])
    backing.chat_template = FAMILIES[name].chat_template
    shutil.rmtree(path)
    backing.save_pretrained(path)
    return Tokenizer(Path(path))


@pytest.fixture(params=THEIRS)
def family(request, tmp_path):
    """A family, its tokenizer with its markers as tokens, and how to call the other parser."""
    name, (function, markers) = request.param, THEIRS[request.param]
    tokenizer = tokenizer_of(name, tmp_path, markers.values())
    ids = {key: tokenizer.backing.convert_tokens_to_ids(token) for key, token in markers.items()}
    stops, begin = ({}, "<|start|>assistant") if name == "gpt_oss" else ({"stop_ids": {1}}, "")
    takes_tools = name in ("qwen3_coder", "glm45", "glm47", "minimax_m2")

    def parse(text, tools):
        extra = {"tools": tools} if takes_tools else {}
        return getattr(parsing, function)(tokenizer.backing, tokenizer.encode(begin + text), **ids, **stops, **extra)

    return name, tokenizer, parse


def drawn(name, draw):
    """Tools, and an answer that calls them."""
    tools, calls = [], []
    for position in range(draw.randint(0, 1 if name == "llama3" else 3)):
        types = {f"p{i}": draw.choice(KINDS[name == "qwen3_coder"]) for i in range(draw.randint(0, 4))}
        parameters = {"type": "object", "properties": {key: {"type": kind} for key, kind in types.items()}}
        function = {"name": f"f{position}", "parameters": parameters}
        tools.append({"type": "function", "function": function})
        given = {key: TYPES[kind](draw) for key, kind in types.items()}
        call = {"name": function["name"], "arguments": given}
        calls.append({"type": "function", "id": f"functions.f{position}:{position}", "function": call})
    has_calls_alone = calls and (draw.random() < 0.5 or not FAMILIES[name].takes_content_with_calls)
    content = None if has_calls_alone else "Some words."
    message = {"role": "assistant", "content": content, "tool_calls": calls}
    if FAMILIES[name].reasons and draw.random() < 0.5:
        message["reasoning_content"] = "I think\nso."
    return tools, message


def answers(name, tokenizer):
    """Tools, a message, its text by the family's template, and what we read of that, with NUM_CALLS in all of them."""
    output, draw = ChatOutput(tokenizer), random.Random(5)
    user = {"role": "user", "content": "hi"}
    prompt = render_chat(tokenizer, [user])
    prompt_ids = np.asarray(tokenizer.encode(prompt), np.int32)
    num_calls = 0
    while num_calls < NUM_CALLS:
        tools, message = drawn(name, draw)
        num_calls += len(message["tool_calls"])
        text = render_chat(tokenizer, [user, message], add_generation_prompt=False)[len(prompt) : -len("</s>")]
        splitter = output.splitter(prompt_ids, tools=tools, has_calls=True, has_reasoning=FAMILIES[name].reasons)
        yield tools, message, text, answer_of(parts_of(splitter, list(text)))


def test_both_read_the_same(family):
    name, tokenizer, parse = family
    for tools, _, text, ours in answers(name, tokenizer):
        theirs = parse(text, tools)
        assert [(call.name, json.loads(call.arguments)) for call in ours.calls] == [
            (call.name, call.arguments) for call in theirs.tool_calls
        ], text
        assert ours.content.strip() == (theirs.content or "").strip(), text
        assert ours.reasoning.strip() == (theirs.reasoning_content or "").strip(), text


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in THEIRS])
def test_what_renderers_cannot_read_is_what_the_template_has_rendered(name, tmp_path):
    for _, message, text, ours in answers(name, tokenizer_of(name, tmp_path)):
        asked = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
        assert [(call.name, json.loads(call.arguments)) for call in ours.calls] == asked, text
        assert ours.content.strip() == (message["content"] or ""), text
        assert ours.reasoning.strip() == message.get("reasoning_content", ""), text
