"""Laws of the trainer's side: any answer gives the same rows, turns join, columns hold the rows of their tokens."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayserve_moe.replay.encoding import (
    DIALECTS,
    encode_nested,
    encode_rollout,
    rollout_rows,
    routed_experts_info,
    routing_from,
    routing_until,
)
from rayserve_moe.requests.records import RoutedExperts, RoutingLayout
from rayserve_moe.rollouts.alignment import (
    CONVENTIONS,
    Sample,
    check_routing,
    check_shared_prefixes,
    decode_answer,
    join_turns,
    to_trainer_layout,
)
from tests.support.routing.routing_arrays import layouts, random_rows, refusal, routed, routed_with_gaps, same
from tests.support.session.hypothesis_examples import examples

FORMS = ("native", "chat", "sgl_ext", "nested", "npy", "packed", "binary", "binary+zstd")


def answer_of(form: str, routing: RoutedExperts, layout: RoutingLayout) -> dict | bytes:
    """What a server answers with, one choice, as JSON or as bytes."""
    description = routed_experts_info(routing, layout)
    beside = {"routed_experts_info": description}
    if form.startswith("binary"):
        header = {"choices": [beside]}
        return encode_rollout(header, [rollout_rows(routing, layout)], compress=form.endswith("zstd"))
    if form == "nested":
        prompt, generated = encode_nested(routing, layout, prompt_len=7)
        answer = {"prompt_routed_experts": prompt, "choices": [{"routed_experts": generated, **beside}]}
    elif form in ("npy", "packed"):
        answer = {"choices": [{"routed_experts": DIALECTS[form].encode(routing, layout), **beside}]}
    else:
        fields = {"routed_experts": DIALECTS["sglang"].encode(routing, layout), **beside}
        native = {"meta_info": {**fields, "routed_experts_start_len": routing.start}}
        answer = {"native": native, "chat": {"choices": [native]}, "sgl_ext": {"choices": [{"sgl_ext": fields}]}}[form]
    return json.loads(json.dumps(answer))


@pytest.mark.parametrize("form", FORMS)
@examples(50, deadline=None)
@given(case=routed(), knows_layout=st.booleans())
def test_every_answer_gives_back_the_routing_and_all_that_is_known_of_it(form, case, knows_layout):
    routing, layout = case
    answer = answer_of(form, routing, layout)
    assert same(decode_answer(answer, layout if knows_layout else None), routing)


@pytest.mark.parametrize("form", FORMS)
@examples(30, deadline=None)
@given(case=routed_with_gaps())
def test_missing_rows_come_back_as_missing_or_as_an_error(form, case):
    routing, layout = case
    answer = answer_of(form, routing, layout)
    if form.startswith("binary"):
        assert same(routing, decode_answer(answer))
    else:
        with pytest.raises(ValueError, match=r"rows are missing at positions \[\[\d+, \d+\]\]"):
            decode_answer(answer, layout)


@pytest.mark.parametrize("form", FORMS)
@examples(40, deadline=None)
@given(case=routed().filter(lambda case: case[1].num_experts > 1 and len(case[0].rows) > 0), place=st.integers(0))
def test_one_altered_id_is_noticed(form, case, place):
    routing, layout = case
    altered = routing.rows.copy()
    place %= altered.size
    altered.flat[place] = (int(altered.flat[place]) + 1) % layout.num_experts
    answer = answer_of(form, RoutedExperts(altered, routing.start), layout)
    description = routed_experts_info(routing, layout)
    if isinstance(answer, bytes):
        answer = encode_rollout({"choices": [{"routed_experts_info": description}]}, [altered])
    else:
        part = answer["choices"][0] if "choices" in answer else answer
        part.get("meta_info", part.get("sgl_ext", part))["routed_experts_info"] = description
    with pytest.raises(ValueError, match="crc32"):
        decode_answer(answer, layout)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[RoutedExperts, list[RoutedExperts]]:
    """A whole routing, and turns cut out of it that overlap or touch, each with what was known at its time."""
    routing, _ = draw(routed(max_rows=30))
    end = routing.start + len(routing.rows)
    cuts = sorted(draw(st.lists(st.integers(routing.start, end), max_size=4)))
    turns, reached = [], routing.start
    for cut in [*cuts, end]:
        first = draw(st.integers(routing.start, reached)) if turns else routing.start
        turns.append(routing_from(routing_until(routing, cut), first))
        reached = cut
    return routing, turns


@examples(150, deadline=None)
@given(conversations())
def test_turns_join_to_the_whole(case):
    whole, turns = case
    assert same(join_turns(turns), whole)


@examples(100, deadline=None)
@given(conversations(), st.integers(0), st.integers(0, 2))
def test_a_gap_or_a_contradiction_between_turns_is_an_error(case, number, seed):
    whole, turns = case
    late = RoutedExperts(whole.rows[:1], whole.start + len(whole.rows) + 1 + seed)
    with pytest.raises(ValueError, match="no turn has rows for positions"):
        join_turns([*turns, late])
    if len(whole.rows) and whole.rows.max() > 0:
        wrong = whole.rows.copy()
        place = number % len(wrong)
        wrong[place] = np.where(wrong[place] == 0, wrong.max(), 0)
        with pytest.raises(ValueError, match=f"disagree on the row of position {whole.start + place}$"):
            join_turns([*turns, RoutedExperts(wrong, whole.start)])


@examples(60, deadline=None)
@given(routed_with_gaps())
def test_what_one_turn_lacks_another_fills(case):
    gapped, _ = case
    whole = RoutedExperts(gapped.rows, gapped.start, (), gapped.source, gapped.weight_version)
    assert same(join_turns([gapped, whole]), whole)
    assert same(join_turns([whole, gapped]), whole)
    assert same(gapped, join_turns([gapped, gapped]))


def test_the_next_turn_corrects_a_placeholder():
    rows = np.arange(12, dtype=np.uint8).reshape(6, 1, 2)
    first = RoutedExperts(np.concatenate([rows[:2], rows[1:2]]))
    second = RoutedExperts(np.concatenate([rows[2:], rows[5:]]), 2)
    with pytest.raises(ValueError, match="disagree"):
        join_turns([first, second])
    np.testing.assert_array_equal(join_turns([first, second], with_placeholder=True).rows, rows)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Sample], RoutingLayout]:
    layout = draw(layouts())
    samples = []
    for _ in range(draw(st.integers(1, 4))):
        num_tokens = draw(st.integers(1, 12))
        rows = random_rows(layout, num_tokens - 1, seed=draw(st.integers(0, 999)))
        tokens = draw(st.lists(st.integers(0, 99), min_size=num_tokens, max_size=num_tokens))
        samples.append(Sample(tokens, draw(st.integers(1, num_tokens)), RoutedExperts(rows)))
    return samples, layout


@pytest.mark.parametrize("convention", sorted(CONVENTIONS))
@examples(60, deadline=None)
@given(case=batches(), padding=st.sampled_from(["right", "left", "between"]), extra=st.none() | st.integers(24, 30))
def test_every_column_holds_the_row_of_its_token(convention, case, padding, extra):
    samples, layout = case
    batch = to_trainer_layout(samples, layout, convention=convention, padding=padding, seq_len=extra)
    dense = [layer for layer in range(layout.num_hidden_layers) if layer not in layout.layer_ids]
    assert not batch.routed_experts[:, :, dense].any()
    for sample, ids, replay, tokens, prompt, response in zip(
        samples, batch.routed_experts, batch.replay_mask, batch.attention_mask, batch.prompt_mask, batch.response_mask,
        strict=True,
    ):  # fmt: skip
        columns = np.flatnonzero(tokens)
        assert len(columns) == len(sample.token_ids) == np.count_nonzero(prompt) + np.count_nonzero(response)
        assert (np.diff(columns) == 1).all()
        np.testing.assert_array_equal(np.flatnonzero(prompt), columns[: sample.prompt_len])
        np.testing.assert_array_equal(np.flatnonzero(response), columns[sample.prompt_len :])
        np.testing.assert_array_equal(np.flatnonzero(replay), columns[:-1])
        np.testing.assert_array_equal(ids[columns[:-1]][:, list(layout.layer_ids)], sample.routing.rows)
        if padding == "right":
            assert columns[0] == 0
        elif padding == "left":
            assert columns[-1] == len(tokens) - 1
        else:
            assert columns[0] + sample.prompt_len == max(each.prompt_len for each in samples)


@examples(60, deadline=None)
@given(batches())
def test_each_trainer_gets_its_own_filler_after_the_last_row(case):
    samples, layout = case
    moe = {"hidden_layers": False, "seq_len": 16}
    batch = {name: to_trainer_layout(samples, layout, convention=name, **moe) for name in CONVENTIONS}
    experts = layout.num_experts
    expected = {"slime": np.int32, "verl": np.int16, "prime_rl": layout.dtype}
    expected["nemo_rl"] = np.int8 if experts <= 128 else np.int16
    assert {name: each.routed_experts.dtype for name, each in batch.items()} == expected
    for i, sample in enumerate(samples):
        last = len(sample.token_ids) - 1
        rotating = batch["slime"].routed_experts[i, last:]
        assert (np.diff(np.sort(rotating, axis=-1), axis=-1) > 0).all()
        assert rotating.min() >= 0 and rotating.max() < experts
        assert not batch["verl"].routed_experts[i, last:].any()
        assert (batch["nemo_rl"].routed_experts[i, last:] == -1).all()
        previous = batch["prime_rl"].routed_experts[i]
        assert last == 0 or np.array_equal(previous[last], previous[last - 1])
        assert not previous[last + 1 :].any()


def test_rotating_ids_use_experts_evenly():
    layout = RoutingLayout(1, (0,), 8, 2)
    sample = Sample([1], 1, RoutedExperts(np.zeros((0, 1, 2), np.uint8)))
    ids = to_trainer_layout([sample], layout, convention="slime", seq_len=8).routed_experts
    assert np.bincount(ids.ravel(), minlength=8).tolist() == [2] * 8


GAPPED = RoutedExperts(np.full((4, 1, 2), 7, np.uint8), missing=((1, 3),))


@pytest.mark.parametrize(("convention", "filler"), [("verl", 0), ("nemo_rl", -1)])
def test_missing_rows_are_masked_where_the_trainer_can_skip_them(convention, filler):
    layout = RoutingLayout(1, (0,), 8, 2)
    batch = to_trainer_layout([Sample([1] * 5, 2, GAPPED)], layout, convention=convention)
    assert batch.replay_mask.tolist() == [[True, False, False, True, False]]
    assert batch.routed_experts[0, :, 0, 0].tolist() == [7, filler, filler, 7, filler]


@pytest.mark.parametrize(
    ("sample", "options", "sentence"),
    [
        (Sample([1] * 5, 2, GAPPED), {"convention": "slime"}, "cannot skip"),
        (Sample([1] * 5, 2, GAPPED), {"convention": "prime_rl"}, "cannot skip"),
        (Sample([1] * 6, 2, GAPPED), {"convention": "verl"}, "6 tokens has 4 rows"),
        (Sample([1] * 3, 2, GAPPED), {"convention": "verl"}, "3 tokens has 4 rows"),
        (Sample([1] * 5, 6, GAPPED), {"convention": "verl"}, "prompt of 6"),
        (Sample([1] * 5, 2, RoutedExperts(GAPPED.rows, 1)), {"convention": "verl"}, "join its turns"),
        (Sample([1] * 5, 2, RoutedExperts(GAPPED.rows[..., :1])), {"convention": "verl"}, "another model"),
        (Sample([1] * 5, 2, GAPPED), {"convention": "verl", "seq_len": 4}, "needs 5 columns"),
        (Sample([1] * 5, 2, GAPPED), {"convention": "verl", "padding": "middle"}, "must be right"),
    ],
)
def test_a_sample_that_does_not_fit_is_refused(sample, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        to_trainer_layout([sample], RoutingLayout(1, (0,), 8, 2), **options)


@examples(100, deadline=None)
@given(batches(), st.booleans())
def test_nothing_speaks_against_routing_that_is_right(case, prefill_only):
    samples, layout = case
    for sample in samples:
        tokens = list(sample.token_ids)[: len(sample.routing.rows)] if prefill_only else sample.token_ids
        findings = check_routing(
            tokens,
            sample.routing,
            layout=layout,
            prompt_len=len(tokens) if prefill_only else 0,
            description=routed_experts_info(sample.routing, layout),
        )
        assert findings == []


@examples(60, deadline=None)
@given(routed(max_start=0), st.integers(0, 20), st.integers(0, 5))
def test_samples_that_begin_alike_have_the_same_rows_as_far_as_they_do(case, num_shared, start):
    routing, _ = case
    num_shared = min(num_shared, len(routing.rows))
    tokens = list(range(len(routing.rows) + 1))
    other_tokens = [*tokens[:num_shared], *(token + 100 for token in tokens[num_shared:])]
    other = np.concatenate([routing.rows[:num_shared], np.roll(routing.rows[num_shared:], 1, axis=-1)])
    other = routing_from(RoutedExperts(other, weight_version=routing.weight_version), start)
    assert check_shared_prefixes([(tokens, routing), (other_tokens, other)]) == []
    assert refusal(lambda: join_turns([])) is not None
