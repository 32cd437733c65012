"""Every answer that a grammar of calls allows is read back by the format's parser, as calls and nothing else."""

from __future__ import annotations

import json
from itertools import count, islice

import jsonschema
import numpy as np
import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rayserve_moe.config.settings import StructuredSettings
from rayserve_moe.constraints.grammar_text import grammar_of
from rayserve_moe.constraints.matchers import built_matcher
from rayserve_moe.requests import Constraint
from rayserve_moe.text.chat_output import parameters_of
from rayserve_moe.text.tool_calls.call_grammar import FORMS, call_grammar, form_of
from rayserve_moe.text.tool_calls.harmony import split_harmony
from rayserve_moe.text.tool_calls.parameter_schemas import UnwritableSchemaError
from rayserve_moe.text.tool_calls.registry import CALL_FORMATS, HARMONY
from rayserve_moe.text.tool_calls.splitter import OutputSplitter, split_text
from rayserve_moe.text.tool_calls.tape import ToolCall

ARGUMENTS = {
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "s": {"type": "string", "maxLength": 4}},
    "required": ["n"],
    "additionalProperties": False,
}
VARIED = {
    "properties": {
        "text": {"type": "string"},
        "unit": {"$ref": "#/$defs/unit"},
        "either": {"type": ["integer", "string"], "maxLength": 5, "maximum": 3, "minimum": 0},
        "perhaps": {"anyOf": [{"type": "string", "pattern": "^a[bc]+", "maxLength": 6}, {"type": "null"}]},
        "listed": {"enum": ["5", 7, None, "a b"]},
        "any": {},
        "bounded": {"minimum": 3, "maximum": 9, "maxLength": 3},
        "day": {"type": "string", "format": "date"},
        "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        "inner": {"type": "object", "properties": {"k": {"$ref": "#/$defs/unit"}}, "additionalProperties": False},
        "flag": {"type": "boolean"},
    },
    "required": ["unit", "either", "listed", "bounded"],
    "additionalProperties": False,
    "$defs": {"unit": {"type": "string", "enum": ["°C", "</x>"]}},
}
FUNCTIONS = [
    {"name": "f", "parameters": ARGUMENTS},
    {"name": "get_weather", "parameters": None},
    {"name": "varied", "parameters": VARIED},
]
SCHEMAS = {"f": ARGUMENTS, "get_weather": {"type": "object"}, "varied": VARIED}
TOOLS = parameters_of([{"type": "function", "function": function} for function in FUNCTIONS])
TAGGED = [name for name, form in FORMS.items() if form.parameter is not None]
MARKERS = sorted({marker for name in FORMS for marker in CALL_FORMATS[name.split()[0]].markers})
EOS = "</s>"


def tokens(special: list[str]) -> tuple[LLTokenizer, dict[str, int]]:
    """A token for every byte, and special ones."""
    tokenizer = Tokenizer(models.BPE(vocab=ID_OF, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS, *special])
    ids = {token: tokenizer.token_to_id(token) for token in special}
    count = tokenizer.get_vocab_size()
    return LLTokenizer(tokenizer.to_str(), n_vocab=count, eos_token=[tokenizer.token_to_id(EOS)]), ids


def draw(form: str, *, is_special: bool, allows_several: bool, seed: int) -> str | None:
    """A random answer, which ends where it may; None for one that goes on for too long."""
    table, special_ids = tokens(MARKERS if is_special else [])
    lark, schemas = call_grammar(FORMS[form], FUNCTIONS, special_ids=special_ids, allows_several=allows_several)
    if FORMS[form].parameter is None:
        schemas = [schema | {"additionalProperties": False} for schema in schemas]
    text = json.dumps({"lark": lark, "schemas": schemas})
    matcher = built_matcher(table, grammar_of(Constraint("calls", text), limits=StructuredSettings()))
    assert not matcher.is_error(), matcher.get_error()
    generator, ids = np.random.default_rng(seed), []
    for _ in range(2000):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        assert not matcher.is_error(), (matcher.get_error(), table.decode_bytes(ids))
        allowed = np.flatnonzero(bits)
        if table.eos_token in allowed and (len(allowed) == 1 or generator.random() < 0.3):
            return table.decode_bytes(ids).decode() if not special_ids else _decoded(table, ids, special_ids)
        allowed = allowed[allowed != table.eos_token]
        ends = np.intersect1d(allowed, [*special_ids.values(), *_ENDING])
        following = np.intersect1d(allowed, [ID_OF[byte] for byte in _after(table.decode_bytes(ids[-30:]))])
        if len(following) and generator.random() < 0.95:
            allowed = following
        elif len(ends) and generator.random() < 0.3:
            allowed = ends
        ids.append(int(generator.choice(allowed)))
        assert matcher.consume_token(ids[-1])
    return None


ID_OF = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
_ENDING = [ID_OF[character] for character in "<{[0Ċ"]
"""Bytes that values may end before, or that look like values of other types."""
_ENDS = [b"\n</parameter>", b"</parameter>", b"</arg_value>", b"<|end|>"]


def _after(written: bytes) -> list[str]:
    """The characters that go on with a marker, where one has begun."""
    return [chr(end[length]) for end in _ENDS for length in range(1, len(end)) if written.endswith(end[:length])]


def _decoded(table: LLTokenizer, ids: list[int], special_ids: dict[str, int]) -> str:
    text_of = {token_id: token.encode() for token, token_id in special_ids.items()}
    return b"".join(text_of.get(i) or table.decode_bytes([i]) for i in ids).decode("utf-8", "replace")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_special", [True, False], ids=["special markers", "plain markers"])
@pytest.mark.parametrize("form", FORMS)
def test_calls_of_a_grammar_are_read_back(form, is_special):
    for allows_several, num_answers in ((False, 1), (True, 2)):
        for answer in answers(form, is_special=is_special, allows_several=allows_several, num_answers=num_answers):
            check(form, answer, allows_several=allows_several)


def answers(form: str, *, is_special: bool, allows_several: bool, num_answers: int) -> list[str]:
    """So many random answers that end."""
    drawn = (draw(form, is_special=is_special, allows_several=allows_several, seed=seed) for seed in count())
    return list(islice((answer for answer in drawn if answer is not None), num_answers))


@pytest.mark.slow
@pytest.mark.parametrize("is_special", [True, False], ids=["special markers", "plain markers"])
@pytest.mark.parametrize("form", [*TAGGED, HARMONY])
def test_two_hundred_calls_of_a_grammar_are_read_back(form, is_special):
    for answer in answers(form, is_special=is_special, allows_several=True, num_answers=200):
        check(form, answer, allows_several=True)


def check(form: str, answer: str, *, allows_several: bool) -> None:
    """An answer is calls that are valid, and nothing else but reasoning."""
    name = form.split()[0]
    if name == HARMONY:
        split = split_harmony(has_calls=True, has_reasoning=True)
    else:
        split = split_text(None, CALL_FORMATS[name])
    splitter = OutputSplitter(split, tools=TOOLS, max_calls=None)
    parts = [*splitter.push(answer), *splitter.finish()]
    calls = [part for part in parts if isinstance(part, ToolCall)]
    others = "".join(part.text for part in parts if not isinstance(part, ToolCall) and part.kind == "content")
    assert calls and not others.strip(), (answer, parts)
    assert len(calls) == 1 or allows_several
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


UNWRITABLE = [
    {"properties": {"a": {"type": "string", "not": {}}}},
    {"properties": {"a": {"type": "string", "format": "hostname"}}},
    {"properties": {"a<b": {}}},
    {"properties": {"a": {"type": "string", "minLength": "1}/ /x"}}},
    {"properties": {"a": {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}}},
    {"properties": {"a": {"$ref": "#/properties/a"}}},
    {"properties": {"a": {"$ref": "other.json"}}},
    {"properties": {"a": {"enum": {}}}},
    {"properties": {"a": False}},
    {"properties": {"a": {"type": 5}}},
    {"properties": {"a": {}}, "required": [{}]},
    {"anyOf": [{"required": ["a"]}], "properties": {"a": {}}},
    {"type": "array"},
]


@pytest.mark.parametrize("parameters", UNWRITABLE, ids=str)
@pytest.mark.parametrize("form", TAGGED)
def test_what_a_format_cannot_write_is_refused(form, parameters):
    with pytest.raises(UnwritableSchemaError):
        call_grammar(FORMS[form], [{"name": "f", "parameters": parameters}], special_ids={}, allows_several=False)


@pytest.mark.parametrize("calls", ["response_template", None])
def test_formats_that_are_not_known_have_no_grammar(calls):
    assert form_of(calls, "") is None


def test_the_template_decides_between_two_forms():
    assert form_of("mistral", "[TOOL_CALLS]") == FORMS["mistral"]
    assert form_of("mistral", "[TOOL_CALLS]x[ARGS]") == FORMS["mistral named"]
    assert form_of("glm", "</arg_key>\n<arg_value>") == FORMS["glm"]
    assert form_of("glm", "</arg_key><arg_value>") == FORMS["glm tight"]


def test_a_marker_that_ends_the_answer_is_not_written_twice():
    assert form_of(HARMONY, "", ends=["<|call|>"]) == FORMS[HARMONY]._replace(after="")
    assert form_of(HARMONY, "") == FORMS[HARMONY]
