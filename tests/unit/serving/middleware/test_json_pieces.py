"""A text parsed in pieces is what it is parsed at once, and a wrong one is refused wherever it is cut."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.serving.middleware import json_body
from rayserve_moe.serving.middleware.json_body import MAX_DEPTH, JsonFault, parse_in_pieces

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=40)
CHANGES = ["", ",", ":", "[", "]", "{", "}", '"', "\\", "1", " ", "NaN", "-Infinity", "\\ud800", "é"]


@pytest.fixture(autouse=True, params=[1, 7], scope="module")
def piece_bytes(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "PIECE_BYTES", request.param)
        yield


@given(value=VALUES, escaped=st.booleans(), indent=st.sampled_from([None, 1]))
def test_a_value_is_the_same_in_pieces(value, escaped, indent):
    text = json.dumps(value, ensure_ascii=escaped, indent=indent)
    try:
        content = text.encode()
    except UnicodeEncodeError:
        return
    assert parse_in_pieces(content) == value


@given(value=VALUES, change=st.sampled_from(CHANGES), share=st.floats(0, 1), cut=st.integers(0, 2))
def test_what_is_refused_at_once_is_refused_in_pieces(value, change, share, cut):
    text = json.dumps(value)
    at = round(share * len(text))
    text = text[:at] + change + text[at + cut :]
    assert _outcome(parse_in_pieces, text.encode("utf-8", "replace")) == _outcome(_at_once, text)


@pytest.mark.parametrize(
    "text",
    ["[1,2,]", "[,1,2]", "[1,,2]", '{"a":1,}', '{"a":1,"a":1}', '{"a":[1,2],"b":2,"a":1}', "[1,2}", "[[1,2]", "1 2", "",
     '["a]', "[1,2]]", "[nan]", "[1,NaN]", '["\\ud800"]', "[1,2,[3,4,]]", "[" + "9" * 5000 + "]"],
)  # fmt: skip
def test_a_wrong_text_is_refused(text):
    with pytest.raises(JsonFault):
        parse_in_pieces(text.encode())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"[" + b",".join([b"[]"] * 1000) + b"]", "lists and objects"),
        (b"[" + b",".join([b'""'] * 1000) + b"]", "strings"),
    ],
)
def test_what_a_text_may_hold_is_bounded(text, reason, monkeypatch):
    monkeypatch.setattr(json_body, "MAX_CONTAINERS", 999)
    monkeypatch.setattr(json_body, "MAX_STRINGS", 999)
    with pytest.raises(JsonFault, match=reason):
        parse_in_pieces(text)


def test_the_deepest_text_is_parsed():
    assert parse_in_pieces(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)


def test_large_lists_of_all_kinds_are_joined():
    rows = [[random.Random(i).randrange(999) for _ in range(8)] for i in range(300)]
    whole = {
        "ids": list(range(3000)),
        "rows": [rows, rows],
        "text": 'x"\\' * 900,
        "n": {f"k{i}": i for i in range(900)},
    }
    assert parse_in_pieces(json.dumps(whole).encode()) == whole


def _outcome(parse, text):
    try:
        return "parsed", repr(parse(text))
    except (JsonFault, ValueError):
        return "refused", ""


def _at_once(text):
    """What the standard library makes of it, with the rules that it does not have."""
    content = text.encode("utf-8", "replace").decode()
    parsed = json.loads(content, parse_constant=_refuse, object_pairs_hook=_once)
    json.dumps(parsed, ensure_ascii=False).encode()
    return parsed


def _refuse(name):
    raise ValueError(name)


def _once(pairs):
    assert_once = dict(pairs)
    if len(assert_once) != len(pairs):
        raise ValueError("twice")
    return assert_once
