"""A text ends at the first match of a pattern or stop string, however the tokens arrive; repetitions end it too."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.requests.fields import Repetition
from rayserve_moe.requests.finish_reason import LENGTH, FinishReason
from rayserve_moe.requests.records import RequestError, SamplingParams
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.text.choice_text import ChoiceText, RepetitionDetector
from rayserve_moe.text.stop_patterns import PatternScanner, check_pattern, escaped, max_match_length

PATTERNS = ("ab+a", "(a|b)(é)", "[(]a|[^](b]a", "[bé]{3}", "(?i)AA€", "b|é€", "^aé", r"€\b", "ab?", "(aé){1,3}b")


def first_end(texts: list[str], patterns: tuple[str, ...], stops: tuple[str, ...]) -> tuple[int, int] | None:
    """Pieces up to the first match, and where it starts."""
    every = [*patterns, *map(re.escape, stops)]
    for count in range(1, len(texts) + 1):
        so_far = "".join(texts[:count])
        found = [match.span()[::-1] for each in every if (match := re.search(each, so_far))]
        if found:
            return count, min(found)[1]
    return None


@given(
    pieces=st.lists(st.text("aAbé€ ", max_size=3), max_size=12),
    patterns=st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=2, unique=True).map(tuple),
    stops=st.lists(st.text("ab€", min_size=1, max_size=3), max_size=2).map(tuple),
    keeps=st.sampled_from([None, "rest"]),
)
def test_text_ends_where_a_pattern_first_matches(pieces, patterns, stops, keeps):
    if r"€\b" in patterns:  # a word is ASCII for RE2, and everything for re
        patterns = tuple(pattern for pattern in patterns if pattern[-1] != "b") or ("b",)
    scanner = PatternScanner(patterns, stops, keeps=keeps)
    passed = "".join(map(scanner.push, pieces))
    found = first_end(pieces, patterns, stops)
    whole = "".join(pieces)
    if found is None:
        assert scanner.matched is None and passed + scanner.flush() == whole
        return
    count, start = found
    assert scanner.matched in (*patterns, *stops) and scanner.flush() == ""
    assert passed == (whole[:start] if keeps is None else "".join(pieces[:count]))


@pytest.mark.parametrize(
    ("pattern", "longest"),
    [
        ("ab{2,4}c|x", 6),
        (r"\d{3}(?P<n>é|foo)?$", 6),
        ("(?i)stop[.!]", 5),
        ("a+", None),
        ("x{,5}", None),
        ("(ab){2}+", None),
        ("x?+", None),
        ("[[:alpha:]]b", None),
        (r"\Qa.b\E", None),
        (r"\pL", None),
        (r"\z", None),
        ("a{1000}b{1000}", None),
    ],
)
def test_what_is_held_back_is_bounded_where_python_and_re2_read_alike(pattern, longest):
    assert max_match_length(pattern) == longest


def test_text_that_no_match_can_reach_is_passed_on():
    scanner = PatternScanner(["[0-9]{2}!", "END"], ["stop"])
    assert [scanner.push(piece) for piece in ("hello ", "wörld", " 4", "2", "!")] == ["he", "llo w", "ör", "l", "d "]
    assert scanner.matched == "[0-9]{2}!"
    looking_on = PatternScanner([r"fo\B"])
    assert [looking_on.push(piece) for piece in ("fo", "x")] == ["", ""] and looking_on.matched
    unbounded = PatternScanner(["a+b", "x"])
    assert unbounded.push("hello ") == "" and unbounded.flush() == "hello "


def test_a_match_that_comes_too_early_is_not_one():
    scanner = PatternScanner(["ab"])
    assert scanner.push("ab", may_end=False) == "" and scanner.matched is None
    assert scanner.push("-ab-") == "ab-" and scanner.matched == "ab"


@pytest.mark.parametrize("pattern", ["(a", "(?=a)b", r"(a)\1", "a*", "", "x{1001}", "((a{99}){99}){99}", "\ud800"])
def test_a_pattern_that_cannot_be_matched_in_linear_time_is_refused(pattern):
    with pytest.raises(RequestError, match=r"pattern|empty"):
        check_pattern(pattern)


@given(text=st.text(max_size=20))
def test_a_stop_string_matches_itself_alone(text):
    scanner = PatternScanner(["\\x{10FFFF}{9}"], [text])
    scanner.push("x" + text + "y")
    assert scanner.matched == (text or None)
    assert escaped("a.b") == "a\\x{2e}b"


@pytest.mark.parametrize(
    ("pattern", "text"), [(r"\((x)", "(x"), (r"\Q(x\E(y)", "(xy"), ("[[:alpha:](]{2}(!)", "a(!"), ("[]()]{3}", "]()")]
)
def test_groups_without_a_name_and_literal_brackets(pattern, text):
    scanner = PatternScanner([pattern])
    assert scanner.push("- " + text) == "- " and scanner.matched == pattern


def test_a_hostile_pattern_takes_linear_time(tokenizer):
    sampling = SamplingParams(stop_regex=("(a+)+$b", "(a|a)*c"))
    choice = ChoiceText(tokenizer, sampling, num_prompt_tokens=1)
    update = ChoiceResult("r", 0, tokenizer.encode("a" * 400), [-1.0] * 400, finish=LENGTH, ranks=[1] * 400)
    assert choice.feed(update).text == "a" * 400


@given(
    ids=st.lists(st.integers(0, 2), max_size=40),
    most=st.integers(1, 5),
    least=st.integers(1, 5),
    count=st.integers(2, 4),
)
def test_a_repetition_is_found_as_soon_as_it_is_there(ids, most, least, count):
    least = min(least, most)
    detector = RepetitionDetector(Repetition(most, least, count))
    for length, token_id in enumerate(ids, start=1):
        tails = [(size, ids[max(0, length - size * count) : length]) for size in range(least, most + 1)]
        repeated = any(len(tail) == size * count and tail == tail[:size] * count for size, tail in tails)
        assert detector.push(token_id) == repeated
        if repeated:
            break


def test_an_answer_ends_with_its_repetition(tokenizer):
    ids = tokenizer.encode("xyababab!")
    sampling = SamplingParams(repetition_detection=Repetition(2, 2, 3))
    choice = ChoiceText(tokenizer, sampling, num_prompt_tokens=1)
    told = choice.feed(ChoiceResult("r", 0, list(ids), [-1.0] * len(ids), finish=LENGTH, ranks=[1] * len(ids)))
    assert told.text == "xyababab" and told.finish == FinishReason("repetition")
    assert told.token_ids == list(ids[:-1]) and len(told.logprobs) == len(ids) - 1
