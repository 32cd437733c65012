"""What wins where a grammar, allowed ids and the ends of an answer disagree."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rayserve_moe.checkpoints.synthetic_tokenizer import EOS_ID
from rayserve_moe.constraints.token_guide import AfterText
from rayserve_moe.requests.finish_reason import FinishReason
from rayserve_moe.requests.records import Constraint, SamplingParams
from rayserve_moe.scheduling.sequence import Guide
from tests.support.text.constraints import compiler, synthetic_tokenizer, vocabulary


def guide_for(regex: str, **sampling: object) -> Guide:
    compiled = compiler().submit(Constraint("regex", regex)).result()
    return compiled.guide(SamplingParams(**sampling))  # type: ignore[arg-type]


def ids_of(text: str) -> np.ndarray:
    return np.asarray(synthetic_tokenizer().encode(text, add_special_tokens=False), np.int32)


def allowed(mask: np.ndarray | FinishReason) -> set[int]:
    assert isinstance(mask, np.ndarray), mask
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


A, B = (int(ids_of(letter)[0]) for letter in "ab")


def test_a_mask_allows_what_the_grammar_does_token_by_token():
    guide = guide_for("ab?")
    assert allowed(guide.next_mask(ids_of(""))) == {A}
    assert allowed(guide.next_mask(ids_of("a"))) == {B, EOS_ID}
    assert allowed(guide.next_mask(ids_of("ab"))) == {EOS_ID}


def test_outputs_may_be_given_several_at_a_time_and_twice():
    guide = guide_for("a{3}b")
    assert allowed(guide.next_mask(ids_of("aaa"))) == allowed(guide.next_mask(ids_of("aaa"))) == {B}


def test_choices_follow_their_own_outputs():
    compiled = compiler().submit(Constraint("regex", "a|b")).result()
    one, other = compiled.guide(SamplingParams()), compiled.guide(SamplingParams())
    assert allowed(one.next_mask(ids_of("a"))) == {EOS_ID}
    assert allowed(other.next_mask(ids_of(""))) == {A, B}


def test_stop_ids_end_what_is_complete_and_nothing_else():
    guide = guide_for("ab*", stop_token_ids=(300,))
    assert allowed(guide.next_mask(ids_of(""))) == {A}
    assert allowed(guide.next_mask(ids_of("a"))) == {B, EOS_ID, 300}


def test_min_tokens_yields_to_a_finished_grammar_only():
    guide = guide_for("ab?", min_new_tokens=5)
    assert allowed(guide.next_mask(ids_of("a"))) == {B}
    assert allowed(guide.next_mask(ids_of("ab"))) == {EOS_ID}


def test_ignore_eos_yields_to_a_finished_grammar_only():
    guide = guide_for("ab?", ignore_eos=True)
    assert allowed(guide.next_mask(ids_of("a"))) == {B}
    assert allowed(guide.next_mask(ids_of("ab"))) == {EOS_ID}


def test_allowed_ids_limit_the_grammar():
    assert allowed(guide_for("[ab]", allowed_token_ids=(B, 77)).next_mask(ids_of(""))) == {B}


def test_an_empty_row_is_an_error_that_says_so():
    end = guide_for("a", allowed_token_ids=(B,)).next_mask(ids_of(""))
    assert isinstance(end, FinishReason)
    assert (end.kind, end.source) == ("error", "constraint") and end.message


def test_an_answer_that_is_complete_where_nothing_may_follow_has_stopped():
    end = guide_for("a", allowed_token_ids=(A,)).next_mask(ids_of("a"))
    assert isinstance(end, FinishReason) and end.kind == "stop"


@pytest.mark.parametrize("text", ["b", "ba"])
def test_an_answer_that_left_the_grammar_ends_with_an_error(text):
    end = guide_for("a").next_mask(ids_of(text))
    assert isinstance(end, FinishReason) and end.kind == "error"


def test_masks_have_a_bit_for_every_id():
    mask = guide_for("a").next_mask(ids_of(""))
    assert isinstance(mask, np.ndarray) and mask.shape == (vocabulary().mask_words,)


def test_a_guide_that_spends_its_allowance_ends_its_answer():
    compiled = compiler().submit(Constraint("regex", "a{3}")).result()
    slow = replace(compiled, max_mask_ms=1e-6).guide(SamplingParams())
    end = slow.next_mask(ids_of(""))
    assert isinstance(end, FinishReason) and end.kind == "error" and "too long" in (end.message or "")


def test_a_constraint_may_begin_after_a_text():
    compiled = compiler().submit(Constraint("regex", "a", after="</t>")).result()
    guide = compiled.guide(SamplingParams(stop_token_ids=(300,)))
    assert allowed(guide.next_mask(ids_of(""))) >= set(range(2, 300)) | set(range(301, 512))
    assert not {EOS_ID, 300} & allowed(guide.next_mask(ids_of("b</")))
    assert allowed(guide.next_mask(ids_of("b</t>"))) == {A}
    assert allowed(guide.next_mask(ids_of("b</t>a"))) == {EOS_ID, 300}


@pytest.mark.parametrize(
    ("pieces", "end"),
    [
        (["a", "</think>", "{"], 2),
        (["</", "think", ">", "{"], 3),
        (["x</think>\n\n", "{"], 1),
        (["</think>{"], None),
        (["</think", "x>"], None),
    ],
)
def test_a_text_is_found_in_whatever_tokens_write_it(pieces: list[str], end: int | None) -> None:
    """The result does not depend on how many outputs each call brings."""
    token_bytes, ids = [piece.encode() for piece in pieces], np.arange(len(pieces), dtype=np.int32)
    assert AfterText(b"</think>", token_bytes).find_end(ids) == end
    one_by_one = AfterText(b"</think>", token_bytes)
    found = [one_by_one.find_end(ids[:count]) for count in range(1, (end or len(ids)) + 1)]
    assert found[-1] == end and not any(found[:-1])
