"""Verdicts about claims with made-up passes, and sketches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rayserve_moe.replay.audit import VERDICTS, Claim, Scored, Tolerances, judge, needs_free_pass, worst
from rayserve_moe.replay.sketches import compare_sketches, sketch_matrix, sketches_of, splitmix64

NUM_EXPERTS, TOP_K, LAYERS, TOKENS, PROMPT = 32, 4, 3, 40, 10
EXACT = Tolerances(1e-3, 1e-3)


def drawn(seed: int = 0) -> tuple[Claim, Scored]:
    """Return a claim and a matching pass."""
    generator = np.random.default_rng(seed)
    rows = generator.permuted(np.tile(np.arange(NUM_EXPERTS), (TOKENS, LAYERS, 1)), axis=-1)[..., :TOP_K]
    logprobs = -generator.random(TOKENS - 1).astype(np.float32)
    scored = Scored(rows, np.full((TOKENS, LAYERS), 0.5), np.full((TOKENS, LAYERS), TOP_K), logprobs)
    ids = generator.integers(0, 100, TOKENS).astype(np.int32)
    return Claim(ids, rows[:-1], PROMPT, logprobs[PROMPT - 1 :].copy()), scored


def under(claim: Claim, free: Scored, *, rank: int = NUM_EXPERTS) -> Scored:
    """Return a forced pass with a large margin and `rank` at differing decisions."""
    differs = (np.sort(claim.rows, -1) != np.sort(free.native[:-1], -1)).any(-1)
    ranks = free.ranks.copy()
    ranks[:-1][differs] = rank
    return replace(free, ranks=ranks, margins=np.where(ranks > TOP_K, 2.0, 0.5))


def verdict_of(claim: Claim, forced: Scored, free: Scored) -> str:
    if not needs_free_pass(claim, forced, tolerances=EXACT):
        return judge(claim, forced, free=None, num_experts=NUM_EXPERTS, tolerances=EXACT).verdict
    return judge(claim, forced, free=free, num_experts=NUM_EXPERTS, tolerances=EXACT).verdict


def test_order_of_experts_does_not_matter():
    claim, free = drawn()
    turned = replace(claim, rows=claim.rows[..., ::-1])
    assert verdict_of(turned, free, free) == verdict_of(claim, free, free) == "right"


def test_rows_may_also_cover_the_last_token():
    claim, free = drawn()
    assert verdict_of(replace(claim, rows=free.native), free, free) == "right"


@pytest.mark.parametrize("shift", [-10, -8, -1, 1, 3, 10])
def test_shifts_are_found(shift: int):
    claim, free = drawn()
    rows = free.native[np.clip(np.arange(TOKENS - 1) + shift, 0, TOKENS - 1)]
    shifted = replace(claim, rows=rows)
    report = judge(shifted, under(shifted, free), free=free, num_experts=NUM_EXPERTS, tolerances=EXACT)
    assert (report.verdict, report.shift) == ("shifted rows", shift)


def test_a_shift_within_the_prompt_is_found():
    claim, free = drawn()
    rows = claim.rows.copy()
    rows[: PROMPT - 1] = claim.rows[1:PROMPT]
    shifted = replace(claim, rows=rows)
    report = judge(shifted, under(shifted, free), free=free, num_experts=NUM_EXPERTS, tolerances=EXACT)
    assert (report.verdict, report.shift, report.first.token) == ("shifted rows", 1, 0)


def test_wrong_rows_and_other_weights_differ_by_the_free_log_probs():
    claim, free = drawn()
    wrong = replace(claim, rows=drawn(1)[0].rows)
    assert verdict_of(wrong, under(wrong, free), free) == "wrong rows"
    other = replace(free, logprobs=drawn(1)[1].logprobs)
    assert verdict_of(wrong, under(wrong, other), other) == "wrong version"
    one_off = replace(free, logprobs=free.logprobs + np.eye(1, TOKENS - 1, PROMPT)[0])
    assert verdict_of(wrong, under(wrong, one_off), one_off) == "wrong rows"


def test_wrong_gates_differ_from_wrong_rows_by_the_free_rows():
    """The layer behind wrong gates chooses other experts than the claimed ones, which are the server's own."""
    claim, free = drawn()
    native, margins = free.native.copy(), free.margins.copy()
    native[5:, 1:], margins[5:, 1:] = drawn(1)[1].native[5:, 1:], 2.0
    forced = replace(free, native=native, margins=margins)
    assert verdict_of(replace(claim, has_gates=True), forced, free) == "wrong gates"
    assert verdict_of(claim, forced, free) == "wrong rows"
    rows = claim.rows.copy()
    rows[5, 1] = drawn(2)[0].rows[5, 1]
    assert verdict_of(replace(claim, rows=rows, has_gates=True), forced, free) == "wrong rows"


def test_without_log_probs_ranks_tell_other_weights():
    claim, free = drawn()
    wrong = replace(claim, rows=drawn(1)[0].rows, logprobs=None)
    assert verdict_of(wrong, under(wrong, free, rank=TOP_K + 1), free) == "wrong version"
    assert verdict_of(wrong, under(wrong, free, rank=NUM_EXPERTS - 3), free) == "wrong rows"
    few = claim.rows.copy()
    few[3:5] = wrong.rows[3:5]
    few_wrong = replace(claim, rows=few, logprobs=None)
    assert verdict_of(few_wrong, under(few_wrong, free, rank=TOP_K + 1), free) == "wrong rows"


def test_log_probs_that_are_no_numbers_are_wrong():
    claim, free = drawn()
    logprobs = claim.logprobs.copy()
    logprobs[4] = np.nan
    report = judge(replace(claim, logprobs=logprobs), free, free=None, num_experts=NUM_EXPERTS, tolerances=EXACT)
    assert (report.verdict, report.first_logprob) == ("wrong log-probs", PROMPT + 4)


def test_a_batch_has_its_worst_verdict():
    assert worst([]) == "right" and worst(["right", "numerics only"]) == "numerics only"
    assert worst(["wrong mask", "right", "shifted rows"]) == "shifted rows"
    assert worst(list(VERDICTS)) == "wrong version"


def test_the_generator_of_projections_is_splitmix64():
    wanted = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert splitmix64(np.arange(3, dtype=np.uint64)).tolist() == wanted


def test_a_sketch_keeps_the_size_of_a_state():
    states = np.random.default_rng(0).standard_normal((400, 96)).astype(np.float32)
    matrix = sketch_matrix(96)
    assert matrix.dtype == np.float32
    np.testing.assert_allclose(np.abs(matrix), 1 / np.sqrt(96), rtol=1e-6)
    ratio = np.mean(np.square(sketches_of(states))) / np.mean(np.square(states))
    assert ratio == pytest.approx(1.0, abs=0.1)


def test_passes_part_where_the_distance_jumps():
    ours = np.random.default_rng(0).standard_normal((20, 6, 8))
    noisy = ours * (1 + 1e-3 * np.random.default_rng(1).standard_normal(ours.shape))
    assert compare_sketches(ours, noisy).first is None
    parted = noisy.copy()
    parted[7:, 4:] += 0.5
    found = compare_sketches(ours, parted)
    assert found.first == (7, 4) and len(found.by_layer) == 6
    parted[3, 2] = np.nan
    assert compare_sketches(ours, parted).first == (3, 2)
