"""Delta and Mamba-2 layers in the TPU kernel: the reference but for rounding, whatever the way that tokens came."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.kernels.reference.gated_delta import DeltaPools, DeltaTokens, Pieces, RowEntries, cut_pieces
from rayserve_moe.kernels.table import TPU
from rayserve_moe.kernels.tpu.delta_rule import piece_scalars
from tests.support.kernels.delta_rule import CASES, CUTS, ENGINES, FAULTS, MAX_ERROR
from tests.support.kernels.interpreter import Outcome, run_cases

MODULE, FEW = "tests.support.kernels.delta_rule", ("few", "few by element", "few without delta")


def is_sound(found: Outcome) -> bool:
    """Return True if a case has the reference's numbers, and no copy raced."""
    return found.difference <= MAX_ERROR and not (found.has_races or found.has_rest or found.error)


@pytest.mark.slow
def test_a_single_a_fold_and_drafts_are_the_reference():
    """Rings hold NaN behind the cursor."""
    for name, found in run_cases(MODULE, *FEW).items():
        assert is_sound(found), (name, found)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in FEW])
def test_other_cases_are_the_reference(name):
    (found,) = run_cases(MODULE, name).values()
    assert is_sound(found), found


@pytest.mark.slow
@pytest.mark.parametrize("name", CUTS)
def test_no_bit_depends_on_how_tokens_came(name):
    """Outputs, states and rings are equal for a prompt at once, in parts, beside others, and token by token.

    Interpreted without fused multiply-adds, which XLA on CPUs takes at some uses of a value and not at others.
    """
    (found,) = run_cases(MODULE, name).values()
    assert found.difference == 0 and found.largest > 0 and not found.error, found


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_generates_with_the_kernel_what_it_does_with_the_reference(name):
    (found,) = run_cases(MODULE, name).values()
    assert is_sound(found), found


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    (found,) = run_cases(MODULE, fault).values()
    assert not is_sound(found)


def test_visits_are_the_pieces_of_a_row_and_take_turns_on_cores():
    positions = jnp.asarray([5, 64, 65, -1, 130, 128, -1], jnp.int32)
    rows = jnp.asarray([3, 1, 1, 1, 1, 2, 2], jnp.int32)
    entries = RowEntries(rows + 10, jnp.full(7, 9, jnp.int32), jnp.asarray([0, 0, 0, 0, 64, 128, 0], jnp.int32))
    pieces = cut_pieces(positions, rows, entries, num_singles=7, block_tokens=32)
    found = piece_scalars(pieces, (jnp.int32(40), jnp.int32(20)), num_cores=2)
    is_real = np.asarray(positions) >= 0
    assert found.visit_P.tolist() == [0, 1, 1, -1, 1, 2, -1]
    assert found.starts_V.tolist()[:3] == [0, 1, 5] and set(found.starts_V.tolist()[3:]) == {7}
    assert found.ends_P.tolist() == [1, 0, 0, 0, 1, 1, 0]
    assert len(found.starts_V) >= 3 + 2 * 2, "every core looks two visits ahead"
    assert (found.start_P + found.known_P)[is_real].tolist() == [5, 64, 65, 130, 128]
    assert found.folds_P[is_real].tolist() == [0, 1, 0, 0, 0], "an entry that ends at 128 needs no fold"
    assert found.source_P[is_real].tolist() == [9, 9, 11, 11, 9], "later states lie in the row's own entry"
    assert found.layer_X.tolist() == [40, 20]


def test_blocks_of_a_prompt_are_one_visit():
    """Ten tokens from 60 on in two blocks of eight, then a single token of a prompt, behind one that is decoded."""
    positions = jnp.asarray([3, *range(60, 70), *[-1] * 6, 64, *[-1] * 7], jnp.int32)
    rows = jnp.asarray([4, 1, 1, 2], jnp.int32)
    entries = RowEntries(rows, jnp.zeros(4, jnp.int32), jnp.zeros(4, jnp.int32))
    pieces = cut_pieces(positions, rows, entries, num_singles=1, block_tokens=8)
    found = piece_scalars(pieces, (jnp.int32(0), jnp.int32(0)), num_cores=1)
    assert found.visit_P.tolist() == [0, 1, 1, 1, -1, 2, -1]
    assert np.flatnonzero(found.ends_P).tolist() == [0, 3, 5]
    is_prompt = np.asarray(found.visit_P) == 1
    assert found.start_P[is_prompt].tolist() == [56, 64, 64] and found.known_P[is_prompt].tolist() == [4, 0, 4]
    assert found.token_P[is_prompt].tolist() == [1, 5, 9] and found.row_P[5] == 2
    assert np.flatnonzero(np.asarray(found.folds_P) * (np.asarray(found.visit_P) >= 0)).tolist() == [2, 5]


def shaped(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def reason(*, num_tokens: int = 8, heads: int = 32, width: int = 128, per_channel: bool = False, **knobs) -> str:
    """Return the text of the choice for a call."""
    places, pieces = knobs.pop("places", 128), [shaped(num_tokens)] * 5
    key_heads = knobs.pop("key_heads", heads if per_channel else heads // 2)
    value_dim, blocks = knobs.pop("value_dim", width), knobs.pop("blocks", heads)
    rows, values = shaped(num_tokens, key_heads, width), shaped(num_tokens, heads, value_dim)
    tokens = DeltaTokens(rows, rows, values, shaped(num_tokens, heads, width if per_channel else 1), values, rows)
    decay = shaped(3, heads, places) if places else shaped(3, 64, heads, 1)
    if per_channel:
        decay = shaped(3, 64, heads, width)
    lanes = heads * value_dim // blocks
    pools = DeltaPools(*[shaped(3, blocks, width, lanes)] * 4, decay, shaped(3, 16, heads, width))
    pieces = Pieces(*pieces, RowEntries(*pieces[:3]))
    return str(TPU.recurrence.advance.choose(tokens, pools, pieces, layer=(0, 0), **knobs))


def test_other_calls_are_for_the_reference():
    assert reason() == "delta_rule"
    assert reason(num_tokens=8193) == "xla (delta_rule: 8193 tokens, not 8192 or fewer)"
    assert reason(per_channel=True) == "delta_rule"
    shared = "xla (delta_rule: 32 heads with a decay per element share 16 key heads)"
    assert reason(per_channel=True, key_heads=16) == shared
    assert reason(width=64) == "xla (delta_rule: keys of width 64, not 128)"
    assert reason(places=0) == "xla (delta_rule: rings of decays have other places)"
    assert reason(heads=256) == "xla (delta_rule: 256 heads, not 128 or fewer)"
    assert reason(heads=64) == reason(heads=4) == "delta_rule"
    assert reason(heads=128) == "xla (delta_rule: states and rings of 128 heads take 48 of 30 MiB)"


def test_values_of_mamba_fill_rows_together():
    mamba = partial(reason, delta=False, value_dim=64)
    assert mamba(heads=64, key_heads=8, blocks=32) == mamba(heads=128, key_heads=1, blocks=64) == "delta_rule"
    assert reason(delta=False) == "delta_rule"
    assert mamba() == "xla (delta_rule: pools hold values of width 64 in rows of other widths than 128)"
    held = "xla (delta_rule: 16 heads in 8 rows of values do not divide over {} key heads)"
    assert mamba(heads=16, key_heads=16, blocks=8) == held.format(16)
    assert reason(value_dim=64, heads=16, key_heads=8, blocks=8) == held.format(8)
    by_element = "xla (delta_rule: a decay per element without the delta rule)"
    assert reason(per_channel=True, delta=False) == by_element
