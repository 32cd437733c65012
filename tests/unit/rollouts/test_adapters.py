"""Each adapter meets its trainer's own alignment: the slices below are transcribed from the sources that it names."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rayserve_moe.replay.index_rows import packed_index
from rayserve_moe.requests.records import IndexLayout, RoutedExperts, RoutingLayout
from rayserve_moe.rollouts import Rollout
from rayserve_moe.rollouts.adapters import (
    areal,
    index_rows,
    megatron,
    miles,
    nemo_rl,
    prime_rl,
    skyrl,
    slime,
    trained_under,
    trajectory_of,
    tunix,
    verl,
)
from tests.support.routing.routing_arrays import random_rows

LAYOUT = RoutingLayout(num_hidden_layers=3, layer_ids=(1, 2), num_experts=8, top_k=2)
PAD = 99
REWARDS = (1.0, 0.0, 0.5)


def logprob(sample, position):
    return np.float32(-(100 * sample + position + 1) / 1000)


def turn(sample, prompt_ids, num_outputs, *, versions, finish="stop", missing=()):
    """A rollout whose log-probs say which sample and position they are of."""
    first, last = len(prompt_ids), len(prompt_ids) + num_outputs
    rows = random_rows(LAYOUT, last - 1, seed=1000 * sample + first)
    return Rollout(
        f"p{sample}",
        0,
        versions[-1][2],
        1,
        prompt_ids=np.asarray(prompt_ids, np.int32),
        output_ids=np.arange(first, last, dtype=np.int32) + 10,
        logprobs=np.array([logprob(sample, t) for t in range(first, last)]),
        logprob_versions=versions,
        text="",
        finish_reason=finish,
        routing=RoutedExperts(rows, missing=missing),
        layout=LAYOUT,
    )


def two_turns():
    first = turn(0, [1, 2, 3], 2, versions=((3, 5, "7"),))
    second = turn(0, [1, 2, 3, 13, 14, 50, 51], 3, versions=((7, 9, "7"), (9, 10, "8")), finish="length")
    return [first, second]


@pytest.fixture
def trajectories():
    others = [turn(1, [4], 4, versions=((1, 5, "8"),)), turn(2, [5, 6, 7, 8], 1, versions=((4, 5, "9"),))]
    return [trajectory_of(two_turns()), *(trajectory_of([other]) for other in others)]


def of_next(trajectories, firsts, width):
    """What a trainer computes [B, width]: in each column the log-prob of the token in the next one."""
    computed = np.full((len(trajectories), width), np.nan, np.float32)
    for sample, (each, first) in enumerate(zip(trajectories, firsts, strict=True)):
        for position in range(len(each.token_ids) - 1):
            computed[sample, first + position] = logprob(sample, position + 1)
    return computed


def assert_meets(ours, mask, theirs, trajectories):
    mask = np.asarray(mask, bool)
    assert mask.sum(axis=1).tolist() == [each.trained.sum() for each in trajectories] == [5, 4, 1]
    np.testing.assert_array_equal(np.asarray(ours)[mask], theirs[mask])


def assert_rows(routed, firsts, trajectories, layers=slice(None)):
    """The row of every token but the last is in the token's own column; dense layers are zeros."""
    for sample, (each, first) in enumerate(zip(trajectories, firsts, strict=True)):
        count = len(each.token_ids) - 1
        wide = np.zeros((count, 3, 2), int)
        wide[:, 1:] = each.routing.rows
        np.testing.assert_array_equal(np.asarray(routed[sample])[first : first + count], wide[:, layers])


def test_turns_are_joined_with_what_each_token_was_sampled_under():
    turns = two_turns()
    joined = trajectory_of(turns)
    assert joined.token_ids.tolist() == [1, 2, 3, 13, 14, 50, 51, 17, 18, 19] and joined.prompt_len == 3
    assert np.flatnonzero(joined.trained).tolist() == [3, 4, 7, 8, 9] and joined.is_truncated
    assert joined.versions.tolist() == [""] * 3 + ["7"] * 2 + [""] * 2 + ["7", "7", "8"]
    rows = turns[0].routing.rows, turns[1].routing.rows
    np.testing.assert_array_equal(joined.routing.rows, np.concatenate([rows[0], rows[1][4:]]))
    assert (rows[0][:4] != rows[1][:4]).any(), "rows that were computed again are not taken"


def test_tokens_of_other_versions_are_left_out_of_the_loss_and_stay_in_the_context(trajectories):
    kept = [trained_under(each, {"8", "9"}) for each in trajectories]
    assert [np.flatnonzero(each.trained).tolist() for each in kept] == [[9], [1, 2, 3, 4], [4]]
    masks = slime.train_data(kept, LAYOUT, rewards=REWARDS)
    assert masks["loss_masks"][0] == [0, 0, 0, 0, 0, 0, 1] and masks["rollout_mask_sums"] == [1, 4, 1]
    none = trained_under(trajectories[2], ["7"])
    named = replace(trajectories[2], versions=np.where(trajectories[2].versions == "", "", "step-9").astype(object))
    assert (trained_under(named, "step-9").trained == named.trained).all() and named.trained.any(), "a text is one name"
    assert nemo_rl.train_data([none], LAYOUT)["sample_mask"].tolist() == [0]
    assert all((a.logprobs == b.logprobs).all() for a, b in zip(kept, trajectories, strict=True))


def test_slime_takes_responses_from_the_logits_one_earlier(trajectories):
    data = slime.train_data(trajectories, LAYOUT, rewards=REWARDS)
    assert data["response_lengths"] == [7, 4, 1] and data["truncated"] == [1, 0, 0] and data["rewards"] == [1, 0, 0.5]
    assert data["rollout_mask_sums"] == [5, 4, 1] and data["rollout_ids"] == [0, 1, 2]
    for sample, (tokens, length) in enumerate(zip(data["tokens"], data["response_lengths"], strict=True)):
        theirs = np.array([logprob(sample, t + 1) for t in range(len(tokens) - 1)] + [np.nan], np.float32)
        sliced = theirs[len(tokens) - length - 1 : len(tokens) - 1]
        ours, mask = np.array(data["rollout_log_probs"][sample], np.float32), np.array(data["loss_masks"][sample])
        assert len(ours) == len(mask) == length
        np.testing.assert_array_equal(ours[mask == 1], sliced[mask == 1])
        assert (ours[mask == 0] == 0).all(), "tokens of the environment have log-prob 0"
        assert data["rollout_routed_experts"][sample].shape == (len(tokens) - 1, 3, 2)
    assert data["rollout_routed_experts"][0].dtype == np.int32
    assert_rows(data["rollout_routed_experts"], [0, 0, 0], trajectories)


def test_miles_sees_the_oldest_version_of_a_sample(trajectories):
    data = miles.train_data(trajectories, LAYOUT, rewards=REWARDS)
    assert data["weight_versions"] == [["7", "8"], ["8"], ["9"]]
    oldest = [min(int(version) for version in versions) for versions in data["weight_versions"]]
    assert oldest == [7, 8, 9]
    same = slime.train_data(trajectories, LAYOUT, rewards=REWARDS)
    assert all(np.array_equal(a, b) for name in same for a, b in zip(same[name], data[name], strict=True))


INDEX = IndexLayout((0, 2), (0, 1, 2, 4), top_k=4)


def indexed(rollout, *, without=()):
    """A turn whose tokens see the last tokens by the first index, and themselves alone by the second."""
    positions = np.arange(len(rollout.routing.rows))[:, None]
    chosen = np.full((len(positions), 2, 4), -1, np.int32)
    chosen[:, 0] = np.sort(np.where(positions >= np.arange(4), positions - np.arange(4), 99), axis=1)
    chosen[chosen == 99] = -1
    chosen[:, 1, :1] = positions
    index = packed_index(chosen)
    index[list(without)] = None
    return replace(rollout, routing=replace(rollout.routing, parts={"index": index}), index_layout=INDEX)


def test_index_rows_of_turns_are_those_of_every_sparse_layer():
    joined = trajectory_of([indexed(each) for each in two_turns()])
    rows = index_rows(joined)
    assert rows.shape == (9, 4, 4) and rows.dtype == np.int32
    assert rows[0, 0].tolist() == [0, -1, -1, -1] and rows[8].tolist() == [[5, 6, 7, 8]] * 2 + [[8, -1, -1, -1]] * 2
    with pytest.raises(ValueError, match="only some have any"):
        trajectory_of([indexed(two_turns()[0]), two_turns()[1]])
    with pytest.raises(ValueError, match="set returns_index"):
        index_rows(trajectory_of(two_turns()))
    lacking = trajectory_of([indexed(each, without=[1]) for each in two_turns()])
    with pytest.raises(ValueError, match=r"no index rows for \[\(1, 2\)\] positions"):
        index_rows(lacking)


def test_miles_replays_index_rows_stream_by_stream(trajectories):
    """It requires int32 of [tokens - 1, streams, top_k], and pads with -1; each layer takes its stream in order."""
    ours = [trajectory_of([indexed(each) for each in two_turns()]), trajectory_of([indexed(other_turn())])]
    data = miles.train_data(ours, LAYOUT, rewards=REWARDS[:2])
    for rows, tokens in zip(data["rollout_indexer_topk"], data["tokens"], strict=True):
        assert rows.dtype == np.int32 and rows.shape == (len(tokens) - 1, len(INDEX.sparse_layer_ids), INDEX.top_k)
        streams = [rows[:, stream] for stream in range(rows.shape[1])]
        np.testing.assert_array_equal(streams[0], streams[1])
        assert all((stream.max(-1) == np.arange(len(tokens) - 1)).all() for stream in streams)
    assert "rollout_indexer_topk" not in miles.train_data(trajectories, LAYOUT, rewards=REWARDS)
    with pytest.raises(ValueError, match="without index rows"):
        miles.train_data([ours[0], *trajectories[1:]], LAYOUT, rewards=REWARDS)


def other_turn():
    return turn(1, [4], 4, versions=((1, 5, "8"),))


def test_megatron_takes_the_rows_of_all_tokens_by_layer():
    ours = trajectory_of([indexed(each) for each in two_turns()])
    layers = megatron.indexer_replay_data(ours)
    assert len(layers) == len(INDEX.sparse_layer_ids)
    for layer, rows in enumerate(layers):
        assert rows.shape == (10, INDEX.top_k) and rows.dtype == np.int32 and rows.flags.c_contiguous
        np.testing.assert_array_equal(rows[:9], index_rows(ours)[:, layer])
        assert rows[9].tolist() == [6, 7, 8, 9]
    short = megatron.indexer_replay_data(trajectory_of([indexed(turn(1, [4], 2, versions=((1, 3, "8"),)))]))
    assert short[0][2].tolist() == [0, 1, 2, -1]


@pytest.mark.parametrize("columns", [{}, {"prompt_length": 6, "response_length": 9}])
def test_verl_has_prompts_left_and_responses_right(trajectories, columns):
    batch = verl.batch(trajectories, LAYOUT, rewards=REWARDS, pad_token_id=PAD, **columns)
    left, right = columns.get("prompt_length", 4), columns.get("response_length", 7)
    firsts = [left - each.prompt_len for each in trajectories]
    assert batch["prompts"].shape == (3, left) and batch["responses"].shape == (3, right)
    assert batch["prompts"][1].tolist() == [PAD] * (left - 1) + [4]
    for sample, each in enumerate(trajectories):
        real = batch["attention_mask"][sample] == 1
        assert batch["input_ids"][sample][real].tolist() == each.token_ids.tolist()
        assert batch["position_ids"][sample][real].tolist() == list(range(len(each.token_ids)))
        assert (batch["input_ids"][sample][~real] == PAD).all()
    theirs = of_next(trajectories, firsts, left + right)[:, -right - 1 : -1]
    assert_meets(batch["rollout_log_probs"], batch["response_mask"], theirs, trajectories)
    assert batch["rm_scores"][0, 6] == 1 and batch["rm_scores"][2].tolist() == [0.5] + [0] * (right - 1)
    assert batch["routed_experts"].dtype == np.int16 and batch["routed_experts"].shape == (3, left + right, 3, 2)
    assert_rows(batch["routed_experts"], firsts, trajectories)
    assert not batch["routed_experts"][batch["attention_mask"] == 0].any()
    assert batch["min_global_steps"].tolist() == [7, 8, 9] and batch["max_global_steps"].tolist() == [8, 8, 9]


def test_verl_refuses_a_sample_that_does_not_fit(trajectories):
    with pytest.raises(ValueError, match="columns"):
        verl.batch(trajectories, LAYOUT, rewards=REWARDS, response_length=6)


def test_prime_rl_shifts_its_own_log_probs_right(trajectories):
    samples = prime_rl.training_samples(trajectories, LAYOUT, advantages=REWARDS)
    for sample, (fields, each) in enumerate(zip(samples, trajectories, strict=True)):
        count = len(each.token_ids)
        by_token = ("token_ids", "mask", "logprobs", "temperatures", "advantages")
        assert all(len(fields[name]) == count for name in by_token)
        theirs = np.array([np.nan] + [logprob(sample, t) for t in range(1, count)], np.float32)
        mask = np.array(fields["mask"])
        np.testing.assert_array_equal(np.array(fields["logprobs"], np.float32)[mask], theirs[mask])
        assert set(np.array(fields["advantages"])[mask]) == {REWARDS[sample]}
        assert not np.array(fields["advantages"])[~mask].any()
        routes = fields["routed_experts"]
        assert routes["shape"] == [count, 3, 2] and routes["dtype"] == "uint8"
        rows = np.frombuffer(routes["data"], routes["dtype"]).reshape(routes["shape"])
        assert_rows([rows], [0], [each])
        assert (rows[-1] == rows[-2]).all()


def test_nemo_rl_drops_the_first_column_of_its_masks(trajectories):
    data = nemo_rl.train_data(trajectories, LAYOUT, pad_token_id=PAD, divisible_by=4)
    assert data["input_ids"].shape == (3, 12) and data["input_lengths"].tolist() == [10, 5, 5]
    assert data["input_ids"][1].tolist() == [4, 11, 12, 13, 14] + [PAD] * 7
    theirs = of_next(trajectories, [0, 0, 0], 12)[:, :-1]
    assert_meets(data["generation_logprobs"][:, 1:], data["token_mask"][:, 1:], theirs, trajectories)
    assert not data["token_mask"][:, 0].any() and data["sample_mask"].tolist() == [1, 1, 1]
    routed = data["routed_experts"]
    assert routed.dtype == np.int8 and routed.shape == (3, 12, 2, 2)
    assert_rows(routed, [0, 0, 0], trajectories, layers=slice(1, None))
    assert all((routed[sample, length - 1 :] == -1).all() for sample, length in enumerate(data["input_lengths"]))


def test_skyrl_aligns_everything_right(trajectories):
    data = skyrl.training_input(trajectories, LAYOUT, rewards=REWARDS, pad_token_id=PAD)
    firsts = [0, 5, 5]
    assert data["sequences"][1].tolist() == [PAD] * 5 + [4, 11, 12, 13, 14]
    assert data["attention_mask"].sum(axis=1).tolist() == [10, 5, 5] and (data["attention_mask"][:, -1] == 1).all()
    assert data["response_mask"].sum(axis=1).tolist() == [7, 4, 1] and data["response_mask"][2].tolist() == [0] * 6 + [
        1
    ]
    theirs = of_next(trajectories, firsts, 10)[:, -7 - 1 : -1]
    assert_meets(data["rollout_logprobs"], data["loss_mask"], theirs, trajectories)
    assert data["rewards"][:, -1].tolist() == list(REWARDS) and not data["rewards"][:, :-1].any()
    routed, masked = data["rollout_expert_indices"], data["router_padding_mask"]
    assert routed.dtype == np.uint8
    assert_rows(routed, firsts, trajectories)
    assert (routed[masked] == [0, 1]).all(), "distinct experts where there is no row"
    assert masked.sum(axis=1).tolist() == [1, 6, 6] and masked[:, -1].all()


def aligned_by_tunix(rows, completion_len, *, prompt_width, completion_width):
    """Its `align_routed_experts` for one sample: completions are counted from the end of the rows."""
    split = max(len(rows) - completion_len, 0)
    prompt, completion = rows[max(split - prompt_width, 0) : split], rows[split : split + completion_width]
    laid = np.full((prompt_width + completion_width, *rows.shape[1:]), tunix.UNSET, np.int16)
    laid[prompt_width - len(prompt) : prompt_width] = prompt
    laid[prompt_width : prompt_width + len(completion)] = completion
    return laid


def test_tunix_aligns_our_rows_as_we_lay_them_out():
    generator = np.random.default_rng(0)
    for number in range(1000):
        prompt_len, num_outputs = generator.integers(1, 9, 2).tolist()
        each = trajectory_of([turn(number, range(prompt_len), num_outputs, versions=((prompt_len, 20, "3"),))])
        widths = {"prompt_width": prompt_len + number % 3, "completion_width": num_outputs + number % 2}
        data = tunix.payload([each], LAYOUT, advantages=[1], pad_token_id=PAD, **widths)
        rows = tunix.rows_of(each, LAYOUT)
        assert rows.shape == (prompt_len + num_outputs, 3, 2)
        np.testing.assert_array_equal(data["routed_experts"][0], aligned_by_tunix(rows, num_outputs, **widths))
        first = widths["prompt_width"] - prompt_len
        kept = data["routed_experts"][0, first : first + len(rows) - 1]
        np.testing.assert_array_equal(kept[:, 1:], each.routing.rows)
        others = np.delete(data["routed_experts"][0], np.arange(first, first + len(rows) - 1), axis=0)
        assert (others == tunix.UNSET).all() and (kept[:, 0] == tunix.UNSET).all()


def test_tunix_takes_completions_from_the_logits_one_earlier(trajectories):
    data = tunix.payload(trajectories, LAYOUT, advantages=REWARDS, pad_token_id=PAD)
    assert data["prompt_ids"].shape == (3, 4) and data["completion_ids"].shape == (3, 7)
    assert data["prompt_ids"][1].tolist() == [PAD] * 3 + [4] and data["prompt_mask"][1].tolist() == [0, 0, 0, 1]
    assert data["completion_ids"][2].tolist() == [18 - 4] + [PAD] * 6
    theirs = of_next(trajectories, [1, 3, 0], 11)[:, -7 - 1 : -1]
    assert_meets(data["old_per_token_logps"], data["completion_mask"], theirs, trajectories)
    assert data["routed_experts"].dtype == np.int16 and data["advantages"].tolist() == list(REWARDS)
    with pytest.raises(ValueError, match="sample 0 contains the token 50"):
        tunix.payload(trajectories, LAYOUT, advantages=REWARDS, pad_token_id=50)


def test_tunix_has_a_segment_for_each_turn_and_one_version(trajectories):
    found = tunix.segments(trajectories[0], LAYOUT)
    assert [each["source"] for each in found] == ["assistant", "env", "assistant"]
    assert [each["tokens"].tolist() for each in found] == [[13, 14], [50, 51], [17, 18, 19]]
    assert [each["loss_mask"].tolist() for each in found] == [[1, 1], [0, 0], [1, 1, 1]]
    assert found[1]["logps"] is None and found[2]["logps"].tolist() == [logprob(0, t) for t in (7, 8, 9)]
    rows = np.concatenate([each["routed_experts"] for each in found])
    np.testing.assert_array_equal(rows, tunix.rows_of(trajectories[0], LAYOUT)[3:])
    masked = trained_under(trajectories[0], ["8"])
    assert [each["loss_mask"].tolist() for each in tunix.segments(masked, LAYOUT)] == [[0, 0], [0, 0], [0, 0, 1]]
    assert [tunix.policy_version(each) for each in trajectories[1:]] == [8, 9]
    with pytest.raises(ValueError, match="the versions 7, 8; tunix has one"):
        tunix.policy_version(trajectories[0])
    assert tunix.policy_version(trajectories[0], allows_mixed=True) == 7
    named = replace(trajectories[1], versions=np.where(trajectories[1].versions == "", "", "a").astype(object))
    with pytest.raises(ValueError, match="a are not all integers"):
        tunix.policy_version(named)


def test_areal_has_tokens_in_place_and_the_last_row_twice(trajectories):
    data = areal.batch(trajectories, LAYOUT, rewards=REWARDS, pad_token_id=PAD)
    assert data["input_ids"][1].tolist() == [4, 11, 12, 13, 14] + [PAD] * 5
    assert data["attention_mask"].sum(axis=1).tolist() == [10, 5, 5]
    assert data["versions"][0].tolist() == [-1, -1, -1, 7, 7, -1, -1, 7, 7, 8]
    theirs = np.roll(of_next(trajectories, [0, 0, 0], 10), 1, axis=1)
    assert_meets(data["logprobs"], data["loss_mask"], theirs, trajectories)
    routed = data["routed_experts"]
    assert routed.dtype == np.int32 and routed.shape == (3, 10, 2, 2) and data["r3_routing_valid"].all()
    assert_rows(routed, [0, 0, 0], trajectories, layers=slice(1, None))
    for sample, each in enumerate(trajectories):
        last = len(each.token_ids) - 1
        assert (routed[sample, last:] == routed[sample, last - 1]).all()


def test_areal_routes_itself_where_a_row_is_missing(trajectories):
    gappy = trajectory_of([turn(1, [4, 5], 3, versions=((2, 5, "8"),), missing=((1, 2),))])
    data = areal.batch([trajectories[1], gappy], LAYOUT, rewards=[0, 0])
    assert data["r3_routing_valid"].tolist() == [True, False] and not data["routed_experts"][1].any()
    named = replace(gappy, versions=np.where(gappy.versions == "", "", "a").astype(object))
    with pytest.raises(ValueError, match="a are not all integers"):
        areal.batch([named], LAYOUT, rewards=[0])
    with pytest.raises(ValueError, match="of another model"):
        areal.batch([gappy], replace(LAYOUT, top_k=3), rewards=[0])


@pytest.mark.parametrize(
    "write",
    [
        lambda each: slime.train_data([each], LAYOUT, rewards=[0]),
        lambda each: tunix.payload([each], LAYOUT, advantages=[0], pad_token_id=PAD),
        lambda each: tunix.segments(each, LAYOUT),
        lambda each: verl.batch([each], LAYOUT, rewards=[0]),
        lambda each: prime_rl.training_samples([each], LAYOUT, advantages=[0]),
        lambda each: skyrl.training_input([each], LAYOUT, rewards=[0], pad_token_id=PAD),
    ],
)
def test_a_missing_row_is_refused_where_it_would_be_replayed(write):
    with pytest.raises(ValueError, match="has no rows"):
        write(trajectory_of([turn(1, [4, 5], 3, versions=((2, 5, "8"),), missing=((1, 2),))]))


@pytest.mark.parametrize(
    "scores", [[], [0.5], [0.5, 1, 0, 0], [[0.5], [1], [0]]], ids=["none", "one", "four", "nested"]
)
@pytest.mark.parametrize(
    "write",
    [
        lambda each, scores: slime.train_data(each, LAYOUT, rewards=scores),
        lambda each, scores: miles.train_data(each, LAYOUT, rewards=scores),
        lambda each, scores: verl.batch(each, LAYOUT, rewards=scores),
        lambda each, scores: prime_rl.training_samples(each, LAYOUT, advantages=scores),
        lambda each, scores: skyrl.training_input(each, LAYOUT, rewards=scores, pad_token_id=PAD),
        lambda each, scores: tunix.payload(each, LAYOUT, advantages=scores, pad_token_id=PAD),
        lambda each, scores: areal.batch(each, LAYOUT, rewards=scores),
    ],
)
def test_a_batch_has_one_number_for_each_of_its_samples(trajectories, write, scores):
    with pytest.raises(ValueError, match="3 samples need"):
        write(trajectories, scores)
    with pytest.raises(ValueError, match="at least one sample"):
        write([], [])


def test_an_empty_batch_and_a_trajectory_without_turns_are_refused():
    with pytest.raises(ValueError, match="at least one sample"):
        nemo_rl.train_data([], LAYOUT)
    with pytest.raises(ValueError, match="at least one turn"):
        trajectory_of([])


def test_a_missing_row_is_the_routers_own_choice_in_nemo_rl():
    gappy = trajectory_of([turn(1, [4, 5], 3, versions=((2, 5, "8"),), missing=((1, 2),))])
    routed = nemo_rl.train_data([gappy], LAYOUT)["routed_experts"][0]
    assert (routed[[1, 4]] == -1).all() and (routed[[0, 2, 3]] >= 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda turns: [turns[0], replace(turns[1], prompt_ids=turns[1].prompt_ids[::-1])], "does not begin"),
        (lambda turns: [replace(turns[0], routing=None)], "without routing"),
        (lambda turns: [replace(turns[0], output_ids=turns[0].output_ids[:0])], "sampled nothing"),
    ],
)
def test_turns_that_are_no_conversation_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        trajectory_of(change(two_turns()))
