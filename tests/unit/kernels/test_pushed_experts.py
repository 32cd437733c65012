"""Rows that one kernel pushes to their slots' devices come back as what their own experts make of them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from rayserve_moe.kernels.pushed_places import count_slots, places_of, table_rows
from tests.support.pushed_cases import FAULTS, run_cases

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


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["", ", int8"])
def test_sums_are_those_of_one_device_however_uneven_the_load(dtype):
    """On eight ranks, without a race; twice what a device sends may come to another one."""
    names = ["any", "mostly one slot", "all to one slot", "ranks without tokens or without rows", "nothing at all"]
    for name, found in run_cases(*(name + dtype for name in names)).items():
        assert not (found.error or found.has_races or found.has_rest), (name, found)
        assert found.difference <= ROUNDING * found.largest, name


@pytest.mark.slow
def test_a_layer_is_the_dense_one_for_any_placement():
    (found,) = run_cases("a layer with placements").values()
    assert found.difference <= 2 * ROUNDING * found.largest and not (found.has_races or found.has_rest)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["an engine", "an engine, int8"])
def test_an_engine_gives_the_answers_that_it_gives_by_an_exchange(name):
    """With the same routing, of prompts and single tokens, over data ranks and redundant slots."""
    (found,) = run_cases(name).values()
    assert found.difference <= ROUNDING and not (found.has_races or found.has_rest)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    """A race, a number that is none or wrong, a semaphore that is left over, or ranks that do not meet."""
    (found,) = run_cases(fault).values()
    assert found.error or found.has_races or found.has_rest or not found.difference <= ROUNDING * found.largest
