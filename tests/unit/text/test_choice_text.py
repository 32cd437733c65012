"""A choice's text is the decoded whole up to the first stop string, however the tokens arrive."""

from __future__ import annotations

import time
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.requests.finish_reason import LENGTH, FinishReason
from rayserve_moe.requests.records import RoutedExperts, SamplingParams
from rayserve_moe.requests.results import ChoiceResult
from rayserve_moe.text.choice_text import ChoiceText, StopStringScanner
from rayserve_moe.text.token_forms import ByteLevelForm

# A narrow alphabet, so that stop strings are met, begun and missed often; é and € span several tokens.
LETTERS = st.sampled_from("abé€")
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3).map(tuple)


def _first_stop(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Where the first stop string starts, and which: the one that ends first, then the one that starts first."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return end - len(longest), longest
    return None


def _updates(ids: list[int], cuts: list[int], *, finish: FinishReason = LENGTH, **last) -> list[ChoiceResult]:
    """Cut ids into updates at `cuts`; log-probs are the negative position; the last update carries `finish`."""
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    pieces = [range(a, b) for a, b in pairwise(bounds)]
    return [
        ChoiceResult(
            "r",
            2,
            token_ids=[ids[i] for i in piece],
            logprobs=[-float(i) for i in piece],
            **({"finish": finish, **last} if number == len(pieces) else {}),
        )
        for number, piece in enumerate(pieces, start=1)
    ]


def _feed(tokenizer, sampling: SamplingParams, updates, num_prompt_tokens: int = 3) -> list[ChoiceResult]:
    choice = ChoiceText(tokenizer, sampling, num_prompt_tokens=num_prompt_tokens)
    return [choice.feed(update) for update in updates]


def _text(deltas: list[ChoiceResult]) -> str:
    return "".join(delta.text for delta in deltas)


def _ids(deltas: list[ChoiceResult]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


@given(ids=st.lists(st.integers(0, 275), max_size=30), stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=6))
def test_text_of_any_ids_is_cut_at_the_first_stop_string(extended, ids, stops, cuts):
    _check_cut(extended, ids, stops, cuts)


@given(pieces=st.lists(st.text(LETTERS, max_size=8), max_size=5), stops=STOPS)
def test_pieces_of_any_length_are_cut_as_their_whole(pieces, stops):
    scanner = StopStringScanner(stops)
    passed = "".join([*map(scanner.push, pieces), scanner.flush()])
    start, matched = _first_stop("".join(pieces), stops) or (None, None)
    assert (passed, scanner.matched) == ("".join(pieces)[:start], matched)


@given(text=st.text(LETTERS, max_size=20), stops=STOPS, cuts=st.lists(st.integers(0, 40), max_size=6))
def test_text_full_of_stop_strings_is_cut_at_the_first(tokenizer, text, stops, cuts):
    _check_cut(tokenizer, tokenizer.encode(text), stops, cuts)


def _check_cut(tokenizer, ids, stops, cuts):
    whole = tokenizer.decode(ids)
    deltas = _feed(tokenizer, SamplingParams(stop=stops), _updates(ids, cuts))
    stop = _first_stop(whole, stops)
    if stop is None:
        assert (_text(deltas), _ids(deltas), deltas[-1].finish) == (whole, ids, LENGTH)
        return
    start, matched = stop
    kept = _ids(deltas)
    assert _text(deltas) == whole[:start]
    assert deltas[-1].finish == FinishReason("stop", matched)
    assert kept == ids[: len(kept)]
    assert [value for delta in deltas for value in delta.logprobs] == [-float(i) for i in range(len(kept))]
    # The last token kept completes the match: without it there is none (an unfinished character may end it, too).
    assert _first_stop(tokenizer.decode(kept), stops) == stop
    assert len(kept) == len(ids) or _first_stop(tokenizer.decode(kept[:-1]).rstrip("\ufffd"), stops) is None


KEEPS = {
    "nothing": {},
    "the stop string": {"include_stop_str_in_output": True},
    "all of its token": {"no_stop_trim": True},
}


@pytest.mark.parametrize("keeps", KEEPS)
@given(
    pieces=st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3).map(tuple),
    after=st.integers(0, 12),
)
def test_stop_strings_end_only_in_tokens_after_those_they_wait_for(keeps, pieces, stops, after):
    """Each token is a piece of text. What completes a stop string before ends nothing, but may begin one."""
    sampling = SamplingParams(stop=stops, stop_strings_after=after, **KEEPS[keeps])
    choice = ChoiceText(Spelled(pieces), sampling, num_prompt_tokens=1)
    deltas = [choice.feed(update) for update in _updates(list(range(len(pieces))), [len(pieces) // 2])]
    whole, free = "".join(pieces), len("".join(pieces[:after]))
    ends = [end for end in range(free + 1, len(whole) + 1) if any(whole[:end].endswith(stop) for stop in stops)]
    if not ends:
        assert (_text(deltas), deltas[-1].finish) == (whole, LENGTH)
        return
    matched = max((stop for stop in stops if whole[: ends[0]].endswith(stop)), key=len)
    count = next(n for n in range(1, len(pieces) + 1) if len("".join(pieces[:n])) >= ends[0])
    kept = {"nothing": ends[0] - len(matched), "the stop string": ends[0]}.get(keeps, len("".join(pieces[:count])))
    assert _text(deltas) == whole[:kept] and deltas[-1].finish == FinishReason("stop", matched)
    assert len(_ids(deltas)) == count


class Spelled:
    """A tokenizer whose ids are places in a list of texts."""

    special_ids = frozenset()

    def __init__(self, pieces: list[str]) -> None:
        self.token_bytes = [piece.encode() for piece in pieces].__getitem__
        self.decoder = partial(ByteLevelForm().decoder, byte_ids=frozenset())


@pytest.mark.parametrize(
    ("keeps", "text"), [("nothing", "ab"), ("the stop string", "abc"), ("all of its token", "abc")]
)
def test_a_stop_id_is_text_where_stops_are_kept(tokenizer, keeps, text):
    ids = tokenizer.encode("abc")
    finish = FinishReason("stop", ids[-1])
    deltas = _feed(tokenizer, SamplingParams(**KEEPS[keeps]), _updates(ids, [1], finish=finish))
    assert (_text(deltas), _ids(deltas), deltas[-1].finish) == (text, ids, finish)


@given(text=st.text(LETTERS, max_size=20), stops=STOPS, cuts=st.lists(st.integers(0, 40), max_size=6))
def test_what_was_shown_is_never_taken_back_nor_held_without_reason(tokenizer, text, stops, cuts):
    shown = ""
    choice = ChoiceText(tokenizer, SamplingParams(stop=stops), num_prompt_tokens=1)
    ids = tokenizer.encode(text)
    seen: list[int] = []
    for update in _updates(ids, cuts)[:-1]:
        delta = choice.feed(update)
        shown += delta.text
        seen += update.token_ids
        sofar = tokenizer.decode(seen).rstrip("\ufffd")
        stop = _first_stop(sofar, stops)
        if stop is not None:
            assert shown == sofar[: stop[0]]
            return
        held = sofar[len(shown) :]
        assert sofar.startswith(shown)
        assert not held or any(stop.startswith(held) for stop in stops)


def test_a_match_is_known_from_its_last_token_on_and_later_tokens_are_ignored(tokenizer):
    ids = tokenizer.encode("one STOP two three")
    updates = [ChoiceResult("r", 0, [token_id], [-1.0]) for token_id in ids]
    choice = ChoiceText(tokenizer, SamplingParams(stop=("STOP",)), num_prompt_tokens=3)
    matched, deltas = [], []
    for update in [*updates, ChoiceResult("r", 0, finish=LENGTH)]:
        deltas.append(choice.feed(update))
        matched.append(choice.ending is not None)
    num_before = len("one STOP") - 1
    assert matched == [False] * num_before + [True] * (len(deltas) - num_before)
    assert _ids(deltas) == ids[: len("one STOP")] and _text(deltas) == "one "
    assert [delta.finish for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1] == ChoiceResult("r", finish=FinishReason("stop", "STOP"))


@pytest.mark.parametrize("finish", [LENGTH, FinishReason("abort"), FinishReason("stop", 1)])
def test_a_stop_string_outranks_how_the_engine_ended(tokenizer, finish):
    ids = [*tokenizer.encode("a STOP b"), 1]
    (delta,) = _feed(tokenizer, SamplingParams(stop=("STOP",)), _updates(ids, [], finish=finish))
    assert delta.text == "a " and delta.finish == FinishReason("stop", "STOP")
    assert delta.token_ids == ids[:6]


def test_an_error_stays_an_error(tokenizer):
    error = FinishReason("error", message="logits are not finite")
    ids = tokenizer.encode("a STOP")
    deltas = _feed(tokenizer, SamplingParams(stop=("STOP",)), _updates(ids, [6], finish=error))
    assert _text(deltas) == "a " and deltas[0].finish is None and deltas[-1].finish == error


@pytest.mark.parametrize("finish", [LENGTH, FinishReason("abort"), FinishReason("error", message="x")])
def test_held_text_is_released_when_the_choice_ends_otherwise(tokenizer, finish):
    deltas = _feed(tokenizer, SamplingParams(stop=("STOP",)), _updates(tokenizer.encode("a STO"), [5], finish=finish))
    assert [delta.text for delta in deltas] == ["a ", "STO"]
    assert deltas[-1].finish == finish


@pytest.mark.parametrize(("stop_id", "skip"), [(1, True), (1, False), (70, True), (262, True)])
def test_the_id_the_engine_stopped_at_is_kept_without_text(tokenizer, stop_id, skip):
    ids = [*tokenizer.encode("say"), stop_id]
    finish = FinishReason("stop", stop_id)
    sampling = SamplingParams(stop_token_ids=(stop_id,), skip_special_tokens=skip)
    deltas = _feed(tokenizer, sampling, _updates(ids, [2], finish=finish))
    assert (_text(deltas), _ids(deltas), deltas[-1].finish) == ("say", ids, finish)


def test_an_id_that_did_not_stop_the_engine_keeps_its_text(tokenizer):
    deltas = _feed(tokenizer, SamplingParams(ignore_eos=True, skip_special_tokens=False), _updates([1, 70], []))
    assert _text(deltas) == "</s>" + tokenizer.decode([70])


def test_an_unfinished_character_before_the_stop_id_is_shown_as_such(tokenizer):
    ids = [*tokenizer.encode("€")[:2], 1]
    deltas = _feed(tokenizer, SamplingParams(), _updates(ids, [], finish=FinishReason("stop", 1)))
    assert _text(deltas) == "\ufffd"


def test_empty_stop_strings_stop_nothing(tokenizer):
    assert _text(_feed(tokenizer, SamplingParams(stop=("",)), _updates(tokenizer.encode("text"), [2]))) == "text"


def test_a_prompt_without_generation_passes_its_routing_through(tokenizer):
    routing = _routing(0, 5)
    last = ChoiceResult("r", 0, finish=LENGTH, routing=routing, num_cached_tokens=4)
    assert _feed(tokenizer, SamplingParams(max_new_tokens=0, stop=("a",)), [last], num_prompt_tokens=5) == [
        ChoiceResult("r", finish=LENGTH, routing=routing, num_cached_tokens=4)
    ]


def _routing(start: int, end: int) -> RoutedExperts:
    rows = np.arange(start, end, dtype=np.uint8)[:, None, None]
    middle = (start + end + 1) // 2
    return RoutedExperts(
        rows,
        start=start,
        missing=((end - 1, end),),
        source=tuple((a, b, name) for a, b, name in ((start, middle, "cached"), (middle, end, "computed")) if a < b),
        weight_version=((start, end, "7"),),
        parts={"index": np.arange(start, end).astype(object)},
    )


@given(start=st.integers(0, 20), num_prompt=st.integers(1, 12), extra=st.integers(0, 4))
def test_routing_ends_one_row_before_the_token_that_completed_the_stop_string(tokenizer, start, num_prompt, extra):
    ids = tokenizer.encode("ab" + "STOP" + "c" * extra)
    end = max(start + 1, num_prompt + len(ids) - 1)
    before = _routing(start, end)
    update = _updates(ids, [], routing=before)[0]
    (delta,) = _feed(tokenizer, SamplingParams(stop=("STOP",)), [update], num_prompt)
    after, limit = delta.routing, num_prompt + len(delta.token_ids) - 1
    assert after.start == start
    expected = [row for row in range(start, end) if row < limit]
    assert after.rows[:, 0, 0].tolist() == after.parts["index"].tolist() == expected
    for name in ("missing", "source", "weight_version"):
        covered = {position: rest for a, b, *rest in getattr(before, name) for position in range(a, b)}
        kept = {position: rest for a, b, *rest in getattr(after, name) for position in range(a, b)}
        assert kept == {position: rest for position, rest in covered.items() if position < limit}
        assert all(a < b for a, b, *_ in getattr(after, name))


def test_routing_is_whole_where_no_stop_string_was_found(tokenizer):
    routing = _routing(0, 7)
    ids = tokenizer.encode("abcde")
    (delta,) = _feed(tokenizer, SamplingParams(stop=("x",)), _updates(ids, [], routing=routing))
    assert delta.routing is routing


def test_long_stop_strings_cost_no_more_than_short_ones():
    """Those that begin like the text all the time are the worst: each of its ends could be the start of one."""

    def seconds(length):
        scanner = StopStringScanner(["a" * length + chr(ord("b") + i) for i in range(16)])
        scanner.push("a" * length)
        started = time.process_time()
        for _ in range(50):
            scanner.push("aaaa")
        return time.process_time() - started

    assert seconds(1000) < 10 * max(seconds(5) for _ in range(3))


SPECIAL_STOPS = {
    "a token": ("<|turn|>", "ab", "ab<|turn|>"),
    "a token and text": ("b<|turn|>", "a", "ab<|turn|>"),
    "two tokens": ("<|turn|></s>", "ab", "ab<|turn|></s>"),
}


@pytest.mark.parametrize("cuts", [[], [1, 2, 3]], ids=["whole", "streamed"])
@pytest.mark.parametrize("keeps", ["nothing", "the stop string"])
@pytest.mark.parametrize("name", SPECIAL_STOPS)
def test_a_stop_string_with_special_tokens_ends_a_text_that_leaves_them_out(extended, name, keeps, cuts):
    """Special tokens that belong to no stop string stay out of the text."""
    stop, text, with_stop = SPECIAL_STOPS[name]
    ids = extended.encode("a", add_special_tokens=False) + extended.encode("<|spécial▁|>b<|turn|></s>cd")
    sampling = SamplingParams(stop=(stop, "never<|spécial▁|>"), **KEEPS[keeps])
    deltas = _feed(extended, sampling, _updates(ids, cuts))
    assert _text(deltas) == (with_stop if keeps == "the stop string" else text)
    assert deltas[-1].finish == FinishReason("stop", stop)


def test_a_stop_string_with_a_special_token_changes_no_other_text(extended):
    ids = extended.encode("a<|turn|>b<|turn|>")
    deltas = _feed(extended, SamplingParams(stop=("<|turn|>c",)), _updates(ids, [1]))
    assert _text(deltas) == "ab" and deltas[-1].finish == LENGTH
