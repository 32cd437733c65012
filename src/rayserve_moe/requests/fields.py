"""Declarations of request fields: their permitted values, and their names in every dialect.

Modules of `requests` declare fields. The HTTP schemas, `LLM`, `Engine`, rollout jobs and admission derive names, types,
bounds and error sentences from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache, partial
from numbers import Integral, Real
from typing import Any, NamedTuple

SGLANG, OPENAI, VLLM = "sglang", "openai", "vllm"
"""Dialects: SGLang's `/generate`, OpenAI's routes as vLLM and SGLang extend them, and vLLM's `SamplingParams`."""

INT32_MAX = 2**31 - 1
MAX_TOP_LOGPROBS = 20
"""Maximum number of likeliest tokens that the devices return per position."""
MAX_CONSTRAINT_BYTES = 131_072
"""Default maximum bytes of a schema, an expression or a grammar."""
MAX_LISTED_IDS = 128
"""Maximum number of tokens whose log-probs a request can list."""
MAX_LOGIT_BIASES = 256
"""Maximum number of tokens that a request can bias or be limited to."""


class Values(NamedTuple):
    """Permitted values of a field."""

    schema: Mapping[str, Any]
    """JSON schema of the values."""
    read: Callable[[Any], Any]
    """Return a value in the engine's form.

    Raises: ValueError with a sentence that follows the field's name and never quotes the value.
    """


class RequestField(NamedTuple):
    """Declared field of a record."""

    name: str
    """Name in the record."""
    names: Mapping[str, str]
    """Name by dialect."""
    param: str
    """Name in errors."""
    values: Values
    default: Any
    """Default value; None if each dialect has its own default."""


def stated(
    default: Any,
    values: Values,
    *,
    sglang: str | None = "",
    openai: str | None = "",
    vllm: str | None = "",
    has_default: bool = True,
) -> Any:
    """Declare a field of a record. Its name in a dialect is its own, a given name, or None if the dialect lacks it."""
    names = {SGLANG: sglang, OPENAI: openai, VLLM: vllm}
    return dataclasses.field(default=default, metadata={"values": values, "names": names, "has_default": has_default})


@cache
def declared(record: Any) -> tuple[RequestField, ...]:
    """Return the fields that a record declares with `stated`, in order."""
    found = []
    for field in dataclasses.fields(record):
        if values := field.metadata.get("values"):
            given = field.metadata["names"].items()
            names = {dialect: name or field.name for dialect, name in given if name is not None}
            param = names.get(OPENAI) or names.get(SGLANG, field.name)
            default = field.default if field.metadata["has_default"] else None
            found.append(RequestField(field.name, names, param, values, default))
    return tuple(found)


def number(least: float, most: float, *, above: bool = False) -> Values:
    """Return the values of finite numbers from `least` (exclusive if `above`) to `most`."""
    schema = {"type": "number", "exclusiveMinimum" if above else "minimum": least, "maximum": most}
    wanted = f"should be a finite number in {'(' if above else '['}{least:g}, {most:g}]"

    def is_right(value: Any) -> bool:
        return _is(Real, value) and (least < value if above else least <= value) and bool(value <= most)

    return Values(schema, partial(_read, is_right, float, wanted))


def whole(least: int, most: int, *, convert: Callable[[Any], int] = int) -> Values:
    """Return the values of integers in [`least`, `most`], read by `convert`."""
    schema = {"type": "integer", "minimum": least, "maximum": most}

    def is_right(value: Any) -> bool:
        return _is(Integral, value) and least <= value <= most

    return Values(schema, partial(_read, is_right, convert, f"should be a whole number in [{least}, {most}]"))


def text(longest: int, *, shortest: int = 0) -> Values:
    """Return the values of strings with `shortest` to `longest` characters."""
    schema = {"type": "string", **({"minLength": shortest} if shortest else {}), "maxLength": longest}

    def is_right(value: Any) -> bool:
        return isinstance(value, str) and shortest <= len(value) <= longest

    return Values(schema, partial(_read, is_right, str, f"should be a string of {shortest} to {longest} characters"))


def one_or_several(values: Values, most: int, *, least: int = 0) -> Values:
    """Return the values of a single value or a list of `least` to `most`, read as a tuple."""
    several = {"type": "array", "items": values.schema, **({"minItems": least} if least else {}), "maxItems": most}
    schema = {"anyOf": [values.schema, several]}

    def read(value: Any) -> tuple[Any, ...]:
        each = value if isinstance(value, list | tuple | set | frozenset) else [value]
        if not least <= len(each) <= most:
            raise ValueError(f"should hold {least} to {most} entries")
        return tuple(map(values.read, each))

    return Values(schema, read)


def biases(most: int, *, bias: Values) -> Values:
    """Return the values of an object with up to `most` decimal token ids and their biases, read as sorted pairs.

    Such pairs are also accepted, because a validated request contains them.
    """
    keys = {"pattern": "^(0|[1-9][0-9]{0,8})$"}
    schema = {"type": "object", "propertyNames": keys, "additionalProperties": bias.schema, "maxProperties": most}

    def read(value: Any) -> tuple[tuple[int, float], ...]:
        if isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
            value = dict(value)
        if not isinstance(value, Mapping) or len(value) > most or not all(map(_is_bias_key, value)):
            raise ValueError(f"should be an object whose keys are at most {most} token ids in decimal digits")
        return tuple(sorted((int(key), bias.read(each)) for key, each in value.items()))

    return Values(schema, read)


def _read(is_right: Callable[[Any], bool], convert: Callable[[Any], Any], wanted: str, value: Any) -> Any:
    if not is_right(value):
        raise ValueError(wanted)
    return convert(value)


def _is(kind: type, value: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def is_token_id(value: Any) -> bool:
    """Return True if a value can be a token id."""
    return (type(value) is int or _is(Integral, value)) and 0 <= value <= INT32_MAX


def _is_bias_key(key: Any) -> bool:
    if not isinstance(key, str):
        return is_token_id(key)
    is_number = key.isascii() and key.isdigit() and len(key) <= len(str(INT32_MAX))
    return is_number and str(int(key)) == key and is_token_id(int(key))


def _hidden_states(value: object) -> str:
    return ("all" if value else "") if isinstance(value, bool) else str(value)


HIDDEN_STATES = Values(
    {"enum": [False, True, "last"]},
    partial(
        _read,
        lambda it: isinstance(it, bool) or it in ("", "all", "last"),
        _hidden_states,
        "should be true, false or last",
    ),
)


def one_of(*names: str) -> Values:
    """Return the values of a field with a name among `names`."""
    return Values(
        {"enum": list(names)},
        partial(_read, lambda it: isinstance(it, str) and it in names, str, f"should be {' or '.join(names)}"),
    )


COUNT = whole(0, INT32_MAX)
FLAG = Values({"type": "boolean"}, partial(_read, lambda it: isinstance(it, bool), bool, "should be true or false"))
BUDGET = whole(-1, INT32_MAX)
"""-1 for no budget."""
LISTED_IDS = one_or_several(COUNT, MAX_LISTED_IDS)
ANY_OBJECT = Values({"type": "object"}, partial(_read, lambda it: isinstance(it, Mapping), dict, "should be an object"))


def _read_arguments(value: object) -> tuple[tuple[str, Any], ...]:
    """Return sorted pairs of name and value, with lists as tuples. Such pairs are also accepted.

    `session_id` is left out: it names the session (`serving.session_identity`).
    """
    if isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
        value = dict(value)
    if not isinstance(value, Mapping) or len(value) > _MAX_ARGUMENTS or not all(isinstance(k, str) for k in value):
        raise ValueError(f"should be an object of at most {_MAX_ARGUMENTS} arguments by name")
    given = {
        name: tuple(each) if isinstance(each, list) else each
        for name, each in value.items()
        if each is not None and name != "session_id"
    }
    numbers = [one for each in given.values() for one in (each if isinstance(each, tuple) else [each])]
    if not all(isinstance(one, Real) for one in numbers):
        raise ValueError("should hold numbers, true, false, and lists of such")
    return tuple(sorted(given.items()))


_MAX_ARGUMENTS = 64
_NUMBER = {"type": ["number", "boolean"]}
_ARGUMENT = {"anyOf": [{"type": ["number", "boolean", "null"]}, {"type": "array", "items": _NUMBER}]}
ARGUMENTS = Values(
    {"type": "object", "additionalProperties": _ARGUMENT, "maxProperties": _MAX_ARGUMENTS}, _read_arguments
)
PROCESSED, RAW = "processed_logprobs", "raw_logprobs"
LOGPROBS_MODE = Values(
    {"enum": [PROCESSED, RAW]},
    partial(_read, lambda it: it in (PROCESSED, RAW), str, f"should be {PROCESSED} or {RAW}"),
)
LONG_TEXT = text(1 << 24)
PATTERN = text(256)
OBJECT_OR_TEXT = Values(
    {"type": ["object", "string", "boolean"]},
    partial(_read, lambda it: isinstance(it, Mapping | str | bool), lambda it: it, "should be an object or a string"),
)


def _are_texts(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(each, str) for each in value)


TEXTS = Values(
    {"type": "array", "items": {"type": "string"}, "minItems": 1},
    partial(_read, _are_texts, list, "should be a list of strings"),
)
SEED = whole(-(2**63), 2**63 - 1, convert=lambda seed: (int(seed) ^ (int(seed) >> 32)) & 0xFFFFFFFF)
"""64-bit seeds are folded to the sampler's 32 bits; seeds from 0 to 2**32 - 1 stay unchanged."""


class Repetition(NamedTuple):
    """Token pattern repeated at the end of the output."""

    max_size: int
    """Maximum tokens of the pattern."""
    min_size: int
    """Minimum tokens of the pattern."""
    count: int
    """Number of consecutive occurrences."""


def _read_repetition(value: object) -> Repetition | None:
    """Return the pattern of vLLM's object, or None if `max_pattern_size` is 0."""
    if isinstance(value, Repetition):
        return value
    names = ("max_pattern_size", "min_pattern_size", "min_count")
    if not isinstance(value, Mapping) or not set(value) <= set(names):
        raise ValueError(f"should be an object of {', '.join(names)}")
    most, least, count = (COUNT.read(value.get(name) or 0) for name in names)
    if not (most or least or count):
        return None
    if not (1 <= most <= _MAX_PATTERN_TOKENS and least <= most and count >= MIN_REPEATS):
        raise ValueError(
            f"should have a `max_pattern_size` in [1, {_MAX_PATTERN_TOKENS}], no larger `min_pattern_size`, "
            f"and a `min_count` of at least {MIN_REPEATS}"
        )
    return Repetition(most, max(1, least), count)


MIN_REPEATS = 2
_MAX_PATTERN_TOKENS = 1024
_SIZE = {"type": "integer", "minimum": 0, "maximum": INT32_MAX}
REPETITION = Values(
    {
        "type": "object",
        "properties": dict.fromkeys(("max_pattern_size", "min_pattern_size", "min_count"), _SIZE),
        "additionalProperties": False,
    },
    _read_repetition,
)
