"""Experts that move, and selection with limited capacity: laws of the core model, held over a model of every family."""

from __future__ import annotations

import pytest

from tests.pipelines import test_migration as migration
from tests.pipelines import test_selection_modes as selection
from tests.pipelines.families.conftest import families
from tests.support.models.families import FamilyCase

pytestmark = [pytest.mark.slow, families()]

runs = migration.runs
card, runner_with = selection.card, selection.runner_with
test_balanced_selection = (
    selection.test_a_balanced_selection_is_top_k_where_there_is_room_and_another_where_there_is_not
)
test_replicas = selection.test_replicas_by_room_change_no_bit


@pytest.mark.parametrize("backend", ["fused", "all_to_all"])
def test_experts_that_move_change_no_bit(runs: migration.Runs, backend: str):
    law = migration.test_answers_are_the_same_bits_without_balancing_with_it_and_while_experts_move
    law(runs, (2, 2), backend, migration.few_requests)


@pytest.mark.parametrize("mesh", [(4, 1), (1, 4)], ids=str)
def test_experts_that_move_change_no_bit_of_other_meshes(
    runs: migration.Runs, case: FamilyCase, mesh: tuple[int, int], is_native: bool
):
    if not is_native:
        pytest.skip("held to one device in test_scheduling, which native kernels are not")
    if case.num_groups_of_mixers % mesh[1]:
        pytest.skip("n_groups does not divide over the devices of a rank")
    law = migration.test_answers_are_the_same_bits_without_balancing_with_it_and_while_experts_move
    law(runs, mesh, "all_to_all", migration.crowd)


def test_slots_hold_their_experts(runs: migration.Runs):
    migration.test_slots_hold_their_experts_after_any_sequence_of_placements(runs, 0)
