"""Rows that one kernel pushes to their slots' devices come back as what their own experts make of them."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.kernels.tpu.dispatch_rows import count_slots, in_slot_order, places_of, slots_of_core, table_rows
from rayserve_moe.kernels.tpu.dispatch_sizes import DispatchSizes, unsupported_reason
from rayserve_moe.kernels.tpu.dispatch_weights import early_arrays
from tests.support.kernels.low_latency_dispatch import (
    BY_DEVICE,
    FAULTS,
    FEW_TOKENS,
    IN_BLOCKS,
    NARROW_ROWS,
    ON_TWO_CORES,
    run_dispatch,
)

ROUNDING = 2**-7
"""Of a result in bfloat16, against the largest one: the kernel rounds as often as the reference."""
RANKS, LOCAL, TILE = 4, 3, 8
SLOTS = np.random.default_rng(0).integers(-1, RANKS * LOCAL, (RANKS, 16, 3))


def counts_of(slots: np.ndarray) -> np.ndarray:
    return np.asarray(count_slots(jnp.asarray(slots), 128))[0].astype(int)


def test_places_are_slot_after_slot_and_none_is_taken_twice():
    for slots in SLOTS:
        counts = counts_of(slots)
        assert (counts == np.bincount(slots[slots >= 0], minlength=128)).all()
        found = np.asarray(places_of(jnp.asarray(slots), jnp.asarray(counts[None], jnp.float32), nowhere=99))[:, :3]
        by_place = slots[slots >= 0][np.argsort(found[slots >= 0])]
        assert sorted(found[slots >= 0]) == list(range(len(by_place))) and (np.diff(by_place) >= 0).all()
        assert (found[slots < 0] == 99).all()


def test_places_in_the_order_of_slots_say_where_a_device_begins():
    slots = SLOTS[0]
    places = np.random.default_rng(1).permutation(slots.size).reshape(slots.shape)
    lanes = np.pad(places, ((0, 0), (0, 128 - slots.shape[1])))
    found = np.asarray(in_slot_order(jnp.asarray(slots), jnp.asarray(lanes, jnp.int32), num_local=LOCAL))
    order = np.argsort(slots, axis=1, kind="stable")
    ranks = np.take_along_axis(slots, order, axis=1) // LOCAL
    is_first = np.diff(ranks, axis=1, prepend=-9) != 0
    expected = np.concatenate([np.take_along_axis(places, order, axis=1), order, is_first], axis=1)
    np.testing.assert_array_equal(found[:, : 3 * slots.shape[1]], expected)


def test_what_ranks_send_lies_apart_and_in_tiles_of_one_slot():
    counts = [counts_of(slots) for slots in SLOTS]
    rows = table_rows([jnp.asarray(each[None], jnp.float32) for each in counts], num_local=LOCAL, tile_rows=TILE)
    table = np.concatenate([np.asarray(row) for row in rows])
    sent, at_receiver, at_sender = table[:RANKS], table[RANKS : 2 * RANKS], table[2 * RANKS : 3 * RANKS]
    assert (sent == counts).all() and (table[-2] == np.sum(counts, axis=0)).all()
    assert (at_sender == np.cumsum(counts, axis=1) - counts).all()
    for receiver in range(RANKS):
        taken = []
        for slot in range(receiver * LOCAL, (receiver + 1) * LOCAL):
            places = [
                p
                for rank in range(RANKS)
                for p in range(at_receiver[rank, slot], at_receiver[rank, slot] + sent[rank, slot])
            ]
            assert table[-1, slot] % TILE == 0 and places == list(range(table[-1, slot], table[-1, slot] + len(places)))
            taken += [place // TILE for place in places[::TILE]]
        assert taken == list(range(len(taken))), "no tile is of two slots, and none is left out"


def test_every_slot_is_of_one_core_and_cores_count_alike():
    for num_slots, num_cores in ((3, 2), (4, 2), (5, 1), (1, 2)):
        sizes = DispatchSizes(16, 3, 256, 128, num_slots, (("data", RANKS),), num_cores=num_cores)
        of_core, all_slots = sizes.of_core.num_slots, RANKS * num_slots
        slots = np.arange(-1, all_slots + 3)[:, None]
        seen = np.zeros(len(slots), int)
        for core in range(num_cores):
            own = np.asarray(slots_of_core(jnp.asarray(slots, jnp.int32), jnp.int32(core), sizes))[:, 0]
            rank, local = own // of_core, own % of_core + core * of_core
            assert (rank * num_slots + local)[own >= 0].tolist() == slots[own >= 0, 0].tolist()
            seen += own >= 0
        assert (seen == ((slots >= 0) & (slots < all_slots))[:, 0]).all()


def test_experts_that_do_not_fit_twice_are_read_in_blocks():
    sizes = DispatchSizes(32, 8, 4096, 1536, 4, (("data", 32),), num_cores=2)
    assert sizes.block == 512 and replace(sizes, weight_dtype="int8").block == 768
    assert not replace(sizes, width=2048, inner=768).is_streamed
    # However many rows there may be, they are not in the core's memory.
    assert not unsupported_reason(sizes, core_bytes=48 << 20)
    assert sizes.of_core.num_received * sizes.width * 2 > 48 << 20
    assert "do not fit twice" in unsupported_reason(replace(sizes, width=1 << 16), core_bytes=96 << 20)


def test_the_first_slot_is_read_early_as_far_as_it_has_rows():
    """16 slots: whole with 64 rows or more, a single matrix with fewer, nothing on a core without a slot."""
    sizes = DispatchSizes(8, 8, 2048, 768, 16, (("data", 8),))
    assert early_arrays(sizes) == 3 and early_arrays(replace(sizes, weight_dtype="int8")) == 6
    assert early_arrays(replace(sizes, num_tokens=7)) == 1
    assert early_arrays(replace(sizes, num_cores=2)) == 3
    assert early_arrays(replace(sizes, num_slots=1, num_cores=2)) == 0


def test_tokens_whose_gates_and_places_exceed_scalar_memory_are_refused():
    """A row of scalars is padded to 128 words: 1,040 tokens of GLM-4.7-Flash need 1.03 MiB, of which a core has one."""
    sizes = DispatchSizes(1040, 4, 2048, 1536, 8, (("data", 8),))
    reason = "1040 tokens take 1056 KiB of the 1016 KiB of scalar memory"
    assert unsupported_reason(sizes, core_bytes=96 << 20) == reason
    assert "scalar memory" not in unsupported_reason(replace(sizes, num_tokens=992), core_bytes=96 << 20)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["", ", int8"])
def test_sums_are_those_of_one_device_however_uneven_the_load(dtype):
    """On eight ranks, without a race; twice what a device sends may come to another one."""
    names = ["any", "mostly one slot", "all to one slot", "ranks without tokens or without rows", "nothing at all"]
    for name, found in run_dispatch(*(name + dtype for name in names)).items():
        assert not (found.error or found.has_races or found.has_rest), (name, found)
        assert found.difference <= ROUNDING * found.largest, name


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        IN_BLOCKS + "all to one slot, int8",
        "mostly one slot, float8_e4m3fn",
        IN_BLOCKS + "mostly one slot, float8_e4m3fn in blocks",
        ON_TWO_CORES + "ranks without tokens or without rows",
        ON_TWO_CORES + IN_BLOCKS + "mostly one slot",
        FEW_TOKENS + "any",
        FEW_TOKENS + IN_BLOCKS + "all to one slot",
    ],
)
def test_sums_are_the_same_in_blocks_and_over_cores(name):
    """Of experts that are read in blocks, with more rows than a group has; and of slots that two cores share."""
    (found,) = run_dispatch(name).values()
    assert not (found.error or found.has_races or found.has_rest), found
    # Each core rounds its sum, and the sum of both is rounded again.
    assert found.difference <= 2 * ROUNDING * found.largest


@pytest.mark.slow
@pytest.mark.parametrize("name", ["any, float8_e4m3fn", "mostly one slot, float8_e4m3fn in blocks"])
def test_rows_in_8_bits_are_those_of_the_reference(name):
    """Sums in another order may round a number of e4m3 the other way, which is an eighth of the number."""
    (found,) = run_dispatch(NARROW_ROWS + name).values()
    assert not (found.error or found.has_races or found.has_rest), found
    assert found.difference <= 4 * ROUNDING * found.largest


@pytest.mark.slow
def test_results_are_added_up_device_by_device_to_the_bit():
    names = [BY_DEVICE + load for load in ("any", "mostly one slot", "ranks without tokens or without rows")]
    for name, found in run_dispatch(*names).items():
        assert not (found.error or found.has_races or found.has_rest), (name, found)
        assert found.difference == 0 and found.largest > 0, name


@pytest.mark.slow
def test_a_layer_is_the_dense_one_for_any_placement():
    (found,) = run_dispatch("a layer with placements").values()
    assert found.difference <= 2 * ROUNDING * found.largest and not (found.has_races or found.has_rest)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["an engine", "an engine, int8"])
def test_an_engine_gives_the_answers_that_it_gives_by_an_exchange(name):
    """With the same routing, of prompts and single tokens, over data ranks and redundant slots."""
    (found,) = run_dispatch(name).values()
    assert found.difference <= ROUNDING and not (found.has_races or found.has_rest)


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["four", "eight"])
def test_laws_hold_by_all_kernels_of_our_own(devices):
    """Answers depend neither on the batch, nor on chunks and preemption; they are no further from float32 than twice
    those by the kernels of CPUs."""
    (found,) = run_dispatch(f"laws on {devices} devices").values()
    assert found.difference <= 2 * found.largest and not (found.error or found.has_races or found.has_rest), found


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    """A race, a number that is none or wrong, a semaphore that is left over, or ranks that do not meet."""
    (found,) = run_dispatch(fault).values()
    most = 0 if BY_DEVICE in fault else (4 if NARROW_ROWS in fault else 1) * ROUNDING * found.largest
    assert found.error or found.has_races or found.has_rest or not found.difference <= most
