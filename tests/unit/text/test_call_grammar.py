"""Every answer that a grammar of calls allows is read back by the format's parser, as calls and nothing else."""

from __future__ import annotations

import json

import jsonschema
import numpy as np
import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rayserve_moe.config.settings import StructuredSettings
from rayserve_moe.constraints.grammar_text import grammar_of
from rayserve_moe.constraints.matchers import built_matcher
from rayserve_moe.requests import Constraint
from rayserve_moe.text.tool_calls.call_grammar import FORMS, call_grammar, form_of
from rayserve_moe.text.tool_calls.registry import CALL_FORMATS
from rayserve_moe.text.tool_calls.splitter import OutputSplitter, split_text
from rayserve_moe.text.tool_calls.tape import ToolCall

ARGUMENTS = {
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "s": {"type": "string", "maxLength": 4}},
    "required": ["n"],
    "additionalProperties": False,
}
FUNCTIONS = [{"name": "f", "parameters": ARGUMENTS}, {"name": "get_weather", "parameters": None}]
MARKERS = sorted({marker for name in FORMS for marker in CALL_FORMATS[name.split()[0]].markers})
EOS = "</s>"


def tokens(special: list[str]) -> tuple[LLTokenizer, dict[str, int]]:
    """A token for every byte, and special ones."""
    vocab = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS, *special])
    ids = {token: tokenizer.token_to_id(token) for token in special}
    count = tokenizer.get_vocab_size()
    return LLTokenizer(tokenizer.to_str(), n_vocab=count, eos_token=[tokenizer.token_to_id(EOS)]), ids


def draw(form: str, *, is_special: bool, allows_several: bool, seed: int) -> str:
    """A random answer; it ends where it may."""
    table, special_ids = tokens(MARKERS if is_special else [])
    lark, schemas = call_grammar(FORMS[form], FUNCTIONS, special_ids=special_ids, allows_several=allows_several)
    bounded = [schema | {"additionalProperties": False} for schema in schemas]
    text = json.dumps({"lark": lark, "schemas": bounded})
    matcher = built_matcher(table, grammar_of(Constraint("calls", text), limits=StructuredSettings()))
    assert not matcher.is_error(), matcher.get_error()
    generator, ids = np.random.default_rng(seed), []
    for _ in range(2000):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits)
        if table.eos_token in allowed and (len(allowed) == 1 or generator.random() < 0.3):
            return table.decode_bytes(ids).decode() if not special_ids else _decoded(table, ids, special_ids)
        ids.append(int(generator.choice(allowed[allowed != table.eos_token])))
        assert matcher.consume_token(ids[-1])
    raise AssertionError("the answer does not end")


def _decoded(table: LLTokenizer, ids: list[int], special_ids: dict[str, int]) -> str:
    text_of = {token_id: token.encode() for token, token_id in special_ids.items()}
    return b"".join(text_of.get(i) or table.decode_bytes([i]) for i in ids).decode("utf-8", "replace")


@pytest.mark.parametrize("is_special", [True, False], ids=["special markers", "plain markers"])
@pytest.mark.parametrize("form", FORMS)
def test_calls_of_a_grammar_are_read_back(form, is_special):
    for seed in range(3):
        answer = draw(form, is_special=is_special, allows_several=seed > 0, seed=seed)
        splitter = OutputSplitter(split_text(None, CALL_FORMATS[form.split()[0]]), tools={}, max_calls=None)
        parts = [*splitter.push(answer), *splitter.finish()]
        calls = [part for part in parts if isinstance(part, ToolCall)]
        others = "".join(part.text for part in parts if not isinstance(part, ToolCall))
        assert calls and not others.strip(), (answer, parts)
        assert len(calls) == 1 or seed > 0
        for call in calls:
            assert call.name in ("f", "get_weather")
            jsonschema.validate(json.loads(call.arguments), ARGUMENTS if call.name == "f" else {"type": "object"})


@pytest.mark.parametrize("calls", ["glm", "qwen_coder", "minimax", "harmony", "response_template", None])
def test_formats_whose_arguments_are_not_json_have_no_grammar(calls):
    assert form_of(calls, "") is None


def test_the_template_decides_between_two_forms():
    assert form_of("mistral", "[TOOL_CALLS]") == FORMS["mistral"]
    assert form_of("mistral", "[TOOL_CALLS]x[ARGS]") == FORMS["mistral named"]
