"""Faults that other servers have had on the wire, planted by their numbers there: none of them reaches a trainer.

Nearly all of them had the right shape and the wrong ids.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rayserve_moe.replay.encoding import DIALECTS, routed_experts_info, routing_from
from rayserve_moe.replay.encoding.wire_rows import to_base64
from rayserve_moe.requests.records import RoutedExperts, RoutingLayout
from rayserve_moe.rollouts.alignment import (
    Sample,
    check_routing,
    check_shared_prefixes,
    decode_answer,
    join_turns,
    to_trainer_layout,
)
from tests.support.routing.routing_arrays import random_rows

LAYOUT = RoutingLayout(num_hidden_layers=9, layer_ids=tuple(range(1, 9)), num_experts=64, top_k=4)
PROMPT_LEN, NUM_TOKENS = 20, 33
TOKENS = [(7 * i) % 101 for i in range(NUM_TOKENS)]
ROWS = random_rows(LAYOUT, NUM_TOKENS - 1, seed=3)
WHOLE = (0, NUM_TOKENS - 1)
RIGHT = RoutedExperts(ROWS, source=((*WHOLE, "computed"),), weight_version=((*WHOLE, "7"),))
DESCRIPTION = routed_experts_info(RIGHT, LAYOUT)


def with_rows(rows: np.ndarray, **changes: object) -> RoutedExperts:
    return replace(RIGHT, rows=rows, **changes)


def kinds(routing: RoutedExperts, **known: object) -> set[str]:
    return {finding.kind for finding in check_routing(TOKENS, routing, layout=LAYOUT, prompt_len=PROMPT_LEN, **known)}


def zeros_at(*places: slice) -> np.ndarray:
    rows = ROWS.copy()
    for place in places:
        rows[place] = 0
    return rows


def test_the_routing_that_the_faults_are_planted_in_is_right():
    assert kinds(RIGHT, description=DESCRIPTION, weight_version="7") == set()


PHYSICAL = (ROWS.astype(np.uint16) * 5) % 80
RANK_LOCAL = np.sort(ROWS % 16, axis=-1) + np.arange(4, dtype=np.uint8)
FAULTS = [
    # A wrong set of rows.
    ("sglang 20964: the last prompt token has no row", ROWS[:-1], "row_count"),
    ("NeMo-RL: rows lost between prefix cache and chunks", np.delete(ROWS, 9, axis=0), "row_count"),
    ("vllm-ascend 15451: padding comes along", np.concatenate([ROWS, ROWS[:3]]), "row_count"),
    # Zeros in the place of data.
    ("vLLM 33013: the buffer is never written", np.zeros_like(ROWS), "zero_rows"),
    ("tpu-inference 2965: rows written past the prompt's slots", zeros_at(slice(0, PROMPT_LEN)), "zero_rows"),
    ("tpu-inference 3583: slots of another cache group are read", zeros_at(slice(0, PROMPT_LEN)), "zero_rows"),
    ("vLLM 39568: prefix hits from elsewhere were never captured", zeros_at(slice(0, 16)), "zero_rows"),
    ("sglang 39146: what the prefill server routed is lost", zeros_at(slice(0, PROMPT_LEN)), "zero_rows"),
    ("slime: layers of other pipeline stages", np.where(np.arange(8)[:, None] < 4, ROWS, 0), "zero_layer"),
    # Ids of another space.
    ("vLLM 33013: ids of expert slots, after balancing", PHYSICAL, "id_range"),
    ("sglang 25285: mapped twice", PHYSICAL, "id_range"),
    ("vLLM 39917: minus one for cached prefixes", np.where(np.arange(32)[:, None, None] < 16, -1, ROWS), "id_range"),
    ("vllm-ascend 15451: ids of one rank", RANK_LOCAL, "narrow_ids"),
    # Rows of somebody else.
    ("vllm-ascend 10717: a buffer read while it is written", np.repeat(ROWS[::4], 4, axis=0), "constant_rows"),
]


@pytest.mark.parametrize(("rows", "kind"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_the_rows_themselves_show_the_fault(rows, kind):
    assert kind in kinds(with_rows(rows))


STALE = random_rows(LAYOUT, NUM_TOKENS - 1, seed=4)
PLAUSIBLE = [
    ("sglang 26975: stale rows of a host cache", np.concatenate([STALE[:16], ROWS[16:]])),
    ("vLLM 39568: rows of another request", STALE),
    ("tpu-inference 2965: rows shifted by one", np.roll(ROWS, 1, axis=0)),
    ("vllm-ascend 10727: rows of the next step", np.concatenate([ROWS[:20], ROWS[21:], ROWS[:1]])),
    ("vLLM 33013: expert slots without replicas", np.random.default_rng(0).permutation(64).astype(np.uint8)[ROWS]),
]


@pytest.mark.parametrize("rows", [fault[1] for fault in PLAUSIBLE], ids=[fault[0] for fault in PLAUSIBLE])
def test_plausible_rows_are_caught_by_checksum_by_turns_and_by_samples_of_the_same_prompt(rows):
    wrong = with_rows(rows)
    assert "checksum" in kinds(wrong, description=DESCRIPTION)
    assert [finding.kind for finding in check_shared_prefixes([(TOKENS, RIGHT), (TOKENS, wrong)])] == ["shared_prefix"]
    with pytest.raises(ValueError, match="disagree on the row of position"):
        join_turns([RIGHT, wrong])
    answer = {"meta_info": {"routed_experts": DIALECTS["sglang"].encode(wrong, LAYOUT)}}
    answer["meta_info"]["routed_experts_info"] = DESCRIPTION
    with pytest.raises(ValueError, match="crc32"):
        decode_answer(answer, LAYOUT)


def test_miles_3277_recomputed_rows_are_not_paired_with_old_log_probs():
    source = ((0, PROMPT_LEN + 2, "recomputed"), (PROMPT_LEN + 2, NUM_TOKENS - 1, "computed"))
    findings = check_routing(TOKENS, with_rows(ROWS, source=source), layout=LAYOUT, prompt_len=PROMPT_LEN)
    assert [(each.kind, each.positions) for each in findings] == [("recomputed", ((PROMPT_LEN, PROMPT_LEN + 2),))]


def test_sglang_26975_rows_of_earlier_weights_are_named():
    versions = ((0, 16, "6"), (16, NUM_TOKENS - 1, "7"))
    findings = check_routing(TOKENS, with_rows(ROWS, weight_version=versions), layout=LAYOUT, weight_version="7")
    assert [(each.kind, each.positions) for each in findings] == [("weight_version", ((0, 16),))]


def test_rows_without_a_source_or_version_are_named():
    short = with_rows(ROWS, source=((0, 9, "computed"),), weight_version=((3, NUM_TOKENS - 1, "7"),))
    found = {each.kind: each.positions for each in check_routing(TOKENS, short, layout=LAYOUT)}
    assert found == {"source": ((9, NUM_TOKENS - 1),), "weight_version": ((0, 3),)}


def test_sglang_20964_a_prefill_has_a_row_for_every_token():
    prompt = TOKENS[:-1]
    assert check_routing(prompt, RIGHT, layout=LAYOUT, prompt_len=len(prompt)) == []
    lost = with_rows(ROWS[:-1], source=(), weight_version=())
    findings = check_routing(prompt, lost, layout=LAYOUT, prompt_len=len(prompt))
    assert [(each.kind, each.positions) for each in findings] == [("row_count", ((NUM_TOKENS - 2, NUM_TOKENS - 1),))]


def test_sglang_39146_null_is_no_routing_of_zeros():
    for value in (None, ""):
        with pytest.raises(ValueError, match=r"no routed_experts|another shape"):
            decode_answer({"meta_info": {"routed_experts": value, "routed_experts_info": DESCRIPTION}}, LAYOUT)


@pytest.mark.parametrize("dtype", [np.int16, np.int32])
def test_vllm_39917_a_sentinel_is_no_id(dtype):
    ids = np.zeros((4, 9, 4), dtype)
    ids[:2, 1:] = -1
    packed = {"data": to_base64(ids), "shape": [4, 9, 4], "start": 0, "dtype": np.dtype(dtype).name}
    with pytest.raises(ValueError, match=r"outside \[0, 64\)"):
        decode_answer({"choices": [{"routed_experts": packed}]}, LAYOUT)


def test_sgl_jax_dense_layers_of_minus_one_are_no_ids():
    ids = np.zeros((4, 9, 4), np.int32)
    ids[:, 0] = -1
    with pytest.raises(ValueError, match="does not route"):
        decode_answer({"meta_info": {"routed_experts": to_base64(ids)}}, LAYOUT)


def test_sglang_24851_a_delta_that_starts_too_late_is_a_gap_and_too_early_an_overlap():
    first, rest = with_rows(ROWS[:20], source=(), weight_version=()), routing_from(RIGHT, 20)
    for late in (rest, routing_from(RIGHT, 12)):
        np.testing.assert_array_equal(join_turns([first, late]).rows, ROWS)
    with pytest.raises(ValueError, match="positions 20 to 20"):
        join_turns([first, routing_from(RIGHT, 21)])


def test_prime_rl_takes_no_sentinel_and_nemo_rl_routes_a_missing_row_itself():
    gapped = with_rows(ROWS, missing=((4, 6),))
    sample = Sample(TOKENS, PROMPT_LEN, gapped)
    assert "missing" in kinds(gapped)
    with pytest.raises(ValueError, match="cannot skip"):
        to_trainer_layout([sample], LAYOUT, convention="prime_rl")
    batch = to_trainer_layout([sample], LAYOUT, convention="nemo_rl")
    assert (batch.routed_experts[0, 4:6, 1:] == -1).all() and not batch.replay_mask[0, 4:6].any()


def test_another_model_is_noticed_by_its_shape():
    findings = check_routing(TOKENS, RIGHT, layout=replace(LAYOUT, top_k=8))
    assert [finding.kind for finding in findings] == ["shape"]
