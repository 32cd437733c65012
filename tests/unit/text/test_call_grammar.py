"""Every answer that a grammar of calls allows is read back by the format's parser, as calls and nothing else."""

from __future__ import annotations

import json
from itertools import count, islice

import jsonschema
import numpy as np
import pytest

from rayserve_moe.config.settings import StructuredSettings
from rayserve_moe.constraints.compiler import grammar_of
from rayserve_moe.constraints.matchers import Vocabulary, built_matcher
from rayserve_moe.requests.records import Constraint
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
TAGGED = [name for name, form in FORMS.items() if form.parameter is not None or form.quote]
MARKERS = sorted({marker for name in FORMS for marker in CALL_FORMATS[name.split()[0]].markers})
EOS = "</s>"


MARKED_AS = ["special", "added", "spelled"]
"""Kinds of markers in tokenizers: special tokens, added tokens that are not special, or no tokens."""


def tokens(form: str, marked_as: str) -> tuple[Vocabulary, dict[str, int]]:
    """Return a token for every byte and marker, and the ids of special markers."""
    plain = [bytes([byte]) for byte in range(256)]
    own = sorted(CALL_FORMATS[form.split()[0]].markers)
    markers = {"special": [EOS, *MARKERS], "added": [EOS, *own], "spelled": [EOS]}[marked_as]
    ids = {token: len(plain) + i for i, token in enumerate(markers)}
    special = ids if marked_as == "special" else {}
    written = (*plain, *(token.encode() for token in ids))
    return Vocabulary(written, tuple(special.values()), (ids[EOS],)), {m: i for m, i in special.items() if m != EOS}


def draw(form: str, *, marked_as: str, allows_several: bool, seed: int) -> str | None:
    """A random answer, which ends where it may; None for one that goes on for too long."""
    vocabulary, special_ids = tokens(form, marked_as)
    table, markers = vocabulary.tokens(), range(257, vocabulary.num_ids)
    lark, schemas = call_grammar(FORMS[form], FUNCTIONS, special_ids=special_ids, allows_several=allows_several)
    if form not in TAGGED:
        schemas = [schema | {"additionalProperties": False} for schema in schemas]
    text = json.dumps({"lark": lark, "schemas": schemas})
    matcher = built_matcher(table, grammar_of(Constraint("calls", text), limits=StructuredSettings()))
    assert not matcher.is_error(), matcher.get_error()
    generator, ids, written = np.random.default_rng(seed), [], b""
    end = _ENDS.get(form.split()[0], b"")
    for _ in range(2000):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        assert not matcher.is_error(), (matcher.get_error(), written)
        allowed = np.flatnonzero(bits)
        if table.eos_token in allowed and (len(allowed) == 1 or generator.random() < 0.3):
            return written.decode("utf-8", "replace")
        allowed = allowed[allowed != table.eos_token]
        if len(allowed) > _FREE and marked_as == "added":
            allowed = np.setdiff1d(allowed, markers)
        ends = np.intersect1d(allowed, [*markers, *_LOOKS, *end[:1]])
        following = np.intersect1d(allowed, _after(written[-30:], end))
        if len(following) and generator.random() < 0.95:
            allowed = following
        elif len(ends) and generator.random() < 0.3:
            allowed = ends
        ids.append(int(generator.choice(allowed)))
        written += vocabulary.token_bytes[ids[-1]]
        assert matcher.consume_token(ids[-1]), (written, ids[-1])
    return None


_FREE = 100
"""Number of allowed tokens above which text is free; JSON strings cannot contain the format's markers."""
_LOOKS = b"<{[0\n"
"""Bytes that values may end before, or that look like values of other types."""
_ENDS = {
    "qwen_coder": b"\n</parameter>",
    "mimo": b"</parameter>",
    "minimax": b"</parameter>",
    "glm": b"</arg_value>",
    "hunyuan": b"</arg_value:opensource>",
    "harmony": b"<|end|>",
    "gemma": b'<|"|>',
    "minimax_m3": b"]<]minimax[>[",
}
"""Text that ends a value or reasoning, by format."""


def _after(written: bytes, end: bytes) -> list[int]:
    """Return the bytes that continue a begun marker."""
    return [end[length] for length in range(1, len(end)) if written.endswith(end[:length])]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("marked_as", MARKED_AS)
@pytest.mark.parametrize("form", FORMS)
def test_calls_of_a_grammar_are_read_back(form, marked_as):
    for allows_several, num_answers in ((False, 1), (True, 2)):
        for answer in answers(form, marked_as=marked_as, allows_several=allows_several, num_answers=num_answers):
            check(form, answer, allows_several=allows_several)


def answers(form: str, *, marked_as: str, allows_several: bool, num_answers: int) -> list[str]:
    """So many random answers that end."""
    drawn = (draw(form, marked_as=marked_as, allows_several=allows_several, seed=seed) for seed in count())
    return list(islice((answer for answer in drawn if answer is not None), num_answers))


@pytest.mark.slow
@pytest.mark.parametrize("marked_as", MARKED_AS)
@pytest.mark.parametrize("form", [*TAGGED, HARMONY])
def test_two_hundred_calls_of_a_grammar_are_read_back(form, marked_as):
    for answer in answers(form, marked_as=marked_as, allows_several=True, num_answers=200):
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


def nested(depth: int) -> dict:
    """Return the schema of an array in an array, and so on."""
    schema: dict = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


NODE = {"properties": {name: {"$ref": "#/$defs/node"} for name in "abcde"}, "type": "object"}
ENDLESS = {"properties": {"a": {"$ref": "#/$defs/node"}}, "$defs": {"node": NODE}}


@pytest.mark.parametrize("parameters", [{"properties": {"a": nested(300)}}, ENDLESS], ids=["deep", "endless"])
@pytest.mark.parametrize("form", ["gemma", "minimax_m3"])
def test_schemas_without_a_bound_are_refused_or_refer_to_themselves(form, parameters):
    """MiniMax-M3 writes a schema anew at each place, Gemma has a rule for it."""
    function = {"name": "f", "parameters": parameters}
    if form == "gemma" and parameters is ENDLESS:
        grammar = call_grammar(FORMS[form], [function], special_ids={}, allows_several=False)
        assert len(grammar.lark.splitlines()) < 10
        return
    with pytest.raises(UnwritableSchemaError):
        call_grammar(FORMS[form], [function], special_ids={}, allows_several=False)


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
